"""How a trainer's parts are built: parameters on their devices from the start, and the state around them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import spmd
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.models import axes
from holdfast.models.decoder import Decoder
from holdfast.models.pretrained import load_params
from holdfast.optim import state_shardings
from holdfast.training.state import KLDivergenceTrainState, Objective, TrainState, shardings_of


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


def initial_state(
    kind: type[TrainState], objective: Objective, seed: int, mesh: jax.sharding.Mesh, source: str | None = None
) -> TrainState:
    """The state before the first step: initial or pretrained weights, fresh optimizer, no reference.

    Args:
        source: the pretrained model to start from (`architecture/from`).
    """
    model = Decoder(objective.model)
    if source is None:
        tokens = jnp.zeros((1, 1), jnp.int32)
        params = sharded_init(model, jax.random.key(seed), tokens, mesh=mesh)[0]["params"]
    else:
        params = load_params(source, objective.model, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = state_shardings(objective.optimizer, params, shardings_of(params), replicated)
    opt_state = jax.jit(objective.optimizer.init, out_shardings=placed)(params)

    def scalar(value: Any) -> Any:
        return jax.device_put(value, replicated)

    return _state(kind, objective, params, opt_state, scalar)


def described_state(kind: type[TrainState], objective: Objective, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first step as shapes and shardings alone, for devices that are not there."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    boxed = jax.eval_shape(Decoder(objective.model).init, key, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    shardings = _shardings(boxed, mesh)["params"]
    params = jax.tree.map(_placed, nn.meta.unbox(boxed)["params"], shardings)
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = state_shardings(objective.optimizer, params, shardings, replicated)
    opt_state = jax.tree.map(_placed, jax.eval_shape(objective.optimizer.init, params), placed)
    return _state(kind, objective, params, opt_state, lambda value: _placed(value, replicated))


def _placed(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _state(kind: type[TrainState], objective: Objective, params: Any, opt_state: Any, scalar: Any) -> TrainState:
    fields: dict[str, Any] = {
        "step": scalar(jnp.int32(0)),
        "apply_fn": Decoder(objective.model).apply,
        "params": params,
        "tx": objective.optimizer.transformation,
        "opt_state": opt_state,
        "skipped": scalar(jnp.int32(0)),
        "skipped_in_a_row": scalar(jnp.int32(0)),
        "objective": objective,
    }
    if issubclass(kind, KLDivergenceTrainState):
        fields["beta"] = scalar(jnp.float32(0))
    return kind(**fields)


def restore_target(state: TrainState, *, reference: bool) -> dict[str, Any]:
    """Shapes and shardings of the arrays that a checkpoint holds, with or without a reference."""
    arrays = state.arrays()
    arrays.pop("reference", None)
    if reference:
        arrays["reference"] = arrays["params"]
    target: dict[str, Any] = jax.tree.map(abstract, arrays)
    return target


def abstract(leaf: Any) -> Any:
    """An array's shape, type and sharding without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def with_arrays(state: TrainState, arrays: dict[str, Any]) -> TrainState:
    """The state with the arrays of a checkpoint."""
    if isinstance(state, KLDivergenceTrainState):
        arrays = {"reference": None, **arrays}
    return state.replace(**arrays)
