"""How a trainer's parts are built: parameters on their devices from the start, and the state around them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import spmd
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.models import axes
from holdfast.models.config import ModelSpec
from holdfast.models.decoder import Decoder
from holdfast.models.lora import adapter_shardings, fingerprint, fresh_adapters
from holdfast.models.pretrained import load_params
from holdfast.optim import state_shardings
from holdfast.training.state import (
    Base,
    KLDivergenceTrainState,
    Objective,
    TrainState,
    overlaid,
    shardings_of,
    without_adapters,
)
from holdfast.training.trainable import leaves_of, tree_of


def sharded_init(model: Any, key: jax.Array, *args: Any, mesh: jax.sharding.Mesh, **kwargs: Any) -> tuple[Any, Any]:
    """Variables of a model, made on the devices that hold them, and their shardings.

    Shapes come first, without memory; then the initialiser is compiled with those output shardings, so that no
    device ever holds more than its part.
    """

    def initialise(key: jax.Array) -> Any:
        return model.init(key, *args, **kwargs)

    shardings = _shardings(jax.eval_shape(initialise, key), mesh)
    unboxed = jax.jit(lambda key: nn.meta.unbox(initialise(key)), out_shardings=shardings)
    with jax.set_mesh(mesh):
        return unboxed(key), shardings


def _shardings(boxed: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where the parameters of a model lie, from the logical names of their axes."""
    return spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, axes.RULES)


def initial_params(spec: ModelSpec, seed: int, mesh: jax.sharding.Mesh, source: str | None = None) -> Any:
    """Initial weights, or those of a pretrained model.

    Args:
        source: the pretrained model to start from (`architecture/from`).
    """
    if source is not None:
        return load_params(source, spec, mesh)
    tokens = jnp.zeros((1, 1), jnp.int32)
    return sharded_init(Decoder(spec), jax.random.key(seed), tokens, mesh=mesh)[0]["params"]


def initial_state(
    kind: type[TrainState], objective: Objective, seed: int, mesh: jax.sharding.Mesh, source: str | None = None
) -> TrainState:
    """The state before the first step: initial or pretrained weights, fresh optimizer, no reference.

    Args:
        seed: of the initial weights and of adapters.
        source: the pretrained model to start from (`architecture/from`).
    """
    params = initial_params(objective.model, seed, mesh, source)
    replicated = NamedSharding(mesh, PartitionSpec())
    return begun(_state(kind, objective, lambda value: jax.device_put(value, replicated)), params, seed)


def described_state(kind: type[TrainState], objective: Objective, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first step as shapes and shardings alone, for devices that are not there."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    boxed = jax.eval_shape(Decoder(objective.model).init, key, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    params = jax.tree.map(_placed, nn.meta.unbox(boxed)["params"], _shardings(boxed, mesh)["params"])
    replicated, base = NamedSharding(mesh, PartitionSpec()), None
    if objective.lora is not None:
        leaves, shapes = leaves_of(params), objective.lora.shapes(objective.model)
        placed = adapter_shardings(leaves, shapes)
        adapters = {path: jax.ShapeDtypeStruct(shapes[path], jnp.float32, sharding=placed[path]) for path in shapes}
        params, base = tree_of({**leaves, **adapters}), Base("described")
    state = _state(kind, objective, lambda value: _placed(value, replicated)).replace(params=params, base=base)
    shapes = jax.eval_shape(lambda params: objective.optimizer.init(objective.trained(params)), params)
    state = state.replace(opt_state=jax.tree.map(_placed, shapes, _optimizer_shardings(objective, params, replicated)))
    if not objective.ema:
        return state
    average = jax.eval_shape(objective.average_of, params)
    return state.replace(ema=jax.tree.map(_placed, average, _trained_shardings(objective, params)))


def _placed(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _optimizer_shardings(objective: Objective, params: Any, replicated: Any) -> Any:
    """Where the optimizer's state lies, from the parameters as arrays or shapes with shardings."""
    trained = jax.eval_shape(objective.trained, params)
    return state_shardings(objective.optimizer, trained, _trained_shardings(objective, params), replicated)


def _trained_shardings(objective: Objective, params: Any) -> Any:
    return shardings_of(params if objective.trainable is None else objective.trainable.whole(params))


def _state(kind: type[TrainState], objective: Objective, scalar: Any) -> TrainState:
    """A state without parameters."""
    fields: dict[str, Any] = {
        "step": scalar(jnp.int32(0)),
        "apply_fn": Decoder(objective.model).apply,
        "params": None,
        "tx": objective.optimizer.transformation,
        "opt_state": None,
        "skipped": scalar(jnp.int32(0)),
        "skipped_in_a_row": scalar(jnp.int32(0)),
        "objective": objective,
        "base": None,
        "ema": None,
    }
    if issubclass(kind, KLDivergenceTrainState):
        fields["beta"] = scalar(jnp.float32(0))
    return kind(**fields)


def begun(state: TrainState, params: Any, seed: int, source: str | None = None) -> TrainState:
    """The state at the start of training from some weights: fresh adapters if they are trained, fresh optimizer.

    Args:
        params: without adapters.
        seed: of the adapters.
        source: the checkpoint that the weights come from, as `Base` has it.
    """
    objective, base = state.objective, None
    if objective.lora is not None:
        leaves = leaves_of(params)
        base = Base(fingerprint(leaves), source, int(state.step))
        adapters = fresh_adapters(leaves, objective.lora.shapes(objective.model), objective.lora.scale, seed)
        params = tree_of({**leaves, **adapters})
    placed = _optimizer_shardings(objective, params, state.skipped.sharding)
    fresh = jax.jit(lambda params: objective.optimizer.init(objective.trained(params)), out_shardings=placed)
    state = state.replace(params=params, opt_state=fresh(params), base=base)
    if not objective.ema:
        return state
    average = jax.jit(objective.average_of, out_shardings=_trained_shardings(objective, params))
    return state.replace(ema=average(params))


def restore_target(state: TrainState, reference: str | None) -> dict[str, Any]:
    """Shapes and shardings of the arrays that a checkpoint holds.

    Args:
        reference: what it holds of a reference: None, `all`, or beside adapters also `base` (nothing) or `adapters`.
    """
    arrays = state.arrays()
    arrays.pop("reference", None)
    if reference in ("all", "adapters"):
        arrays["reference"] = arrays["params"] if reference == "adapters" else without_adapters(state.params)
    target: dict[str, Any] = jax.tree.map(abstract, arrays)
    return target


def abstract(leaf: Any) -> Any:
    """An array's shape, type and sharding without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def with_arrays(state: TrainState, arrays: dict[str, Any], reference: str | None = None) -> TrainState:
    """The state with the arrays of a checkpoint.

    Args:
        reference: as for `restore_target`.
    """
    if isinstance(state, KLDivergenceTrainState):
        arrays = {"reference": {} if reference == "base" else None, **arrays}
    if state.base is not None:
        arrays = {**arrays, "params": overlaid(state.params, arrays["params"])}
    return state.replace(**arrays)
