"""States that are made, not stepped into: before the first step, as shapes alone, and as a checkpoint holds them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.data.batches import Batch
from holdfast.methods import State
from holdfast.methods.active import initial_memory
from holdfast.methods.controller import unmoved
from holdfast.models.derived import abstract_params, param_shardings
from holdfast.models.family import Model
from holdfast.models.lora import adapter_shardings, fingerprint, fresh_adapters
from holdfast.models.parameters import is_adapter, leaves_of, tree_of
from holdfast.models.pretrained import load_params
from holdfast.optim import (
    state_shardings,
)
from holdfast.training.placement import ReferenceStore, shardings_of
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import (
    Base,
    Objective,
    TrainState,
    adapters_of,
    memory_places,
    memory_shardings,
    methods_of,
    no_kl,
    objective_at,
    overlaid,
    without_adapters,
)
from holdfast.types import Json, Tree


def sharded_init(model: Any, key: jax.Array, *args: Any, mesh: jax.sharding.Mesh, **kwargs: Any) -> tuple[Any, Any]:
    """Variables of a model, made on the devices that hold them, and their shardings.

    Shapes come first, without memory; then the initialiser is compiled with those output shardings, so that no
    device ever holds more than its part.
    """

    def initialise(key: jax.Array) -> Tree:
        return model.init(key, *args, **kwargs)

    shardings = param_shardings(jax.eval_shape(initialise, key), mesh)
    unboxed = jax.jit(lambda key: nn.meta.unbox(initialise(key)), out_shardings=shardings)
    with jax.set_mesh(mesh):
        return unboxed(key), shardings


def initial_params(model: Model, seed: int, mesh: jax.sharding.Mesh, source: str | None = None) -> Tree:
    """Initial weights, or those of a pretrained model.

    Args:
        source: the pretrained model to start from (`architecture/from`).
    """
    if source is not None:
        return load_params(source, model.options, mesh)
    tokens = jnp.zeros((1, 1), jnp.int32)
    return sharded_init(model.module, jax.random.key(seed), tokens, mesh=mesh)[0]["params"]


def initial_state(run: ResolvedRun, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first step: initial or pretrained weights, fresh optimizer, no reference."""
    seed = run.options.run.seed_of("init")
    objective_at(run, 0).held.check(mesh)
    params = initial_params(run.model, seed, mesh, run.options.architecture.source)
    replicated = NamedSharding(mesh, PartitionSpec())
    return begun(_without_params(run, lambda value: jax.device_put(value, replicated)), run, params)


def described_state(run: ResolvedRun, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first step as shapes and shardings alone, for devices that are not there."""
    objective = objective_at(run, 0)
    objective.held.check(mesh)
    params = abstract_params(run.model, mesh)
    replicated, base = NamedSharding(mesh, PartitionSpec()), None
    if objective.lora is not None:
        leaves, shapes = leaves_of(params), objective.lora.shapes(run.model)
        placed = adapter_shardings(leaves, shapes)
        adapters = {path: jax.ShapeDtypeStruct(shapes[path], jnp.float32, sharding=placed[path]) for path in shapes}
        params, base = tree_of({**leaves, **adapters}), Base("described")
    state = _without_params(run, lambda value: _shape_at(value, replicated)).replace(params=params, base=base)
    parts = {
        name: jax.tree.map(_shape_at, jax.eval_shape(make, params), placed)
        for name, (make, placed) in _parts(run, objective, params, replicated).items()
    }
    return state.replace(**parts)


def begun(state: TrainState, run: ResolvedRun, params: Tree, source: str | None = None) -> TrainState:
    """The state at the start of training from some weights: fresh adapters if they are trained, fresh optimizer.

    Args:
        params: without adapters.
        source: the checkpoint that the weights come from, as `Base` has it.
    """
    objective, base = state.objective, None
    if objective.lora is not None:
        leaves = leaves_of(params)
        base = Base(fingerprint(leaves), source, int(state.step))
        seed = run.options.run.seed_of("init")
        adapters = fresh_adapters(leaves, objective.lora.shapes(objective.model), objective.lora.scale, seed)
        params = tree_of({**leaves, **adapters})
    parts = {
        name: jax.jit(make, out_shardings=placed)(params)
        for name, (make, placed) in _parts(run, objective, params, state.skipped.sharding).items()
    }
    return state.replace(params=params, base=base, **parts)


def _parts(
    run: ResolvedRun, objective: Objective, params: Tree, replicated: jax.sharding.Sharding
) -> dict[str, tuple[Callable[[Tree], Tree], Tree]]:
    """What a state holds beside its parameters before the first step: how each is made of them, and where it lies."""
    trained = jax.eval_shape(objective.trained, params)
    like_params = shardings_of(params if objective.trainable is None else objective.trainable.whole(params))
    placed = state_shardings(objective.optimizer, trained, like_params, replicated)
    parts: dict[str, tuple[Callable[[Tree], Tree], Tree]] = {
        "opt_state": (lambda params: objective.optimizer.init(objective.trained(params)), placed)
    }
    if objective.ema:
        parts["ema"] = (objective.average_of, like_params)
    methods = methods_of(run)
    memory = jax.eval_shape(lambda params: initial_memory(methods, objective.trained(params)), params)
    if memory is not None:
        placed = memory_shardings(memory, trained, like_params, replicated)
        parts["memory"] = (lambda params: initial_memory(methods, objective.trained(params)), placed)
    return parts


def _without_params(run: ResolvedRun, scalar: Any) -> TrainState:
    """A state without parameters."""
    objective = objective_at(run, 0)
    return run.trainer.STATE(
        step=scalar(jnp.int32(0)),
        apply_fn=run.model.module.apply,
        params=None,  # type: ignore[arg-type]  # until there are some
        tx=objective.optimizer.transformation,
        opt_state=None,
        skipped=scalar(jnp.int32(0)),
        skipped_in_a_row=scalar(jnp.int32(0)),
        beta=scalar(jnp.float32(0)),
        kl_mean=scalar(no_kl()),
        objective=objective,
        base=None,
        keep=jax.tree.map(scalar, {budget.name: unmoved() for budget in run.curriculum.budgets}) or None,
    )


def with_new_methods(state: TrainState, run: ResolvedRun, known: Collection[str]) -> TrainState:
    """A restored state with the memories of methods that its checkpoint did not know yet, made of its parameters."""
    fresh = {name: method for name, method in methods_of(run).items() if name not in known and method.has("init")}
    if not fresh:
        return state
    memory = initial_memory(fresh, state.trained())
    kept = {name: part for name, part in (state.memory or {}).items() if name in known}
    return state.replace(memory={**kept, **jax.device_put(memory, memory_places(memory, state))})


def restore_target(state: TrainState, reference: str | None, reference_dtype: str | None = None) -> Json:
    """Shapes and shardings of the arrays that a checkpoint holds.

    Args:
        reference: what it holds of a reference: None, `all`, or beside adapters also `base` (nothing) or `adapters`.
        reference_dtype: the type that it is held in; None: that of the parameters.
    """
    arrays = state.arrays()
    arrays.pop("reference", None)
    if reference in ("all", "adapters"):
        whole = arrays["params"] if reference == "adapters" else without_adapters(state.params)
        arrays["reference"] = jax.tree.map(ReferenceStore(dtype=reference_dtype).shape, whole)
    target: Json = jax.tree.map(abstract, arrays)
    return target


def with_arrays(state: TrainState, arrays: Json, reference: str | None = None) -> TrainState:
    """The state with the arrays of a checkpoint.

    Args:
        reference: as for `restore_target`.
    """
    arrays = {"reference": {} if reference == "base" else None, **arrays}
    if state.base is not None and "params" in arrays:
        arrays = {**arrays, "params": overlaid(state.params, arrays["params"])}
    arrays = {**arrays, "reference": state.objective.held.taken(arrays["reference"])}
    return state.replace(**arrays)


def held_reference(state: TrainState) -> str | None:
    """What of a reference a state holds beside adapters, as its manifest says it."""
    if state.reference is None:
        return None
    whole = not all(map(is_adapter, leaves_of(state.reference)))
    return "all" if whole else "adapters" if state.reference else "base"


def abstract(leaf: Tree) -> Tree:
    """An array's shape, type and sharding without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def abstract_stage(state: TrainState, run: ResolvedRun, stage: int) -> TrainState:
    """The state of a stage's steps as shapes and shardings, from the state before the first step."""
    objective = objective_at(run, stage)
    shapes: TrainState = jax.tree.map(abstract, state.replace(objective=objective))
    if run.curriculum.has_reference(run.curriculum.stage_end(stage)):
        held = shapes.params if state.base is None else adapters_of(shapes.params)
        shapes = shapes.replace(reference=jax.tree.map(objective.held.shape, held))
    return shapes.replace(memory=memory_shapes(state, run, stage))


def memory_shapes(state: TrainState, run: ResolvedRun, stage: int) -> Tree:
    """The memories in the steps of a stage as shapes and shardings, from the state before the first step."""
    shapes = jax.tree.map(abstract, state)
    remembering = [objective_at(run, index).methods for index in range(stage + 1)]
    if not any(methods.having("remember") for methods in remembering):
        return shapes.memory
    memory = shapes.memory
    for methods in remembering:
        entered = shapes.replace(memory=memory)
        memory = jax.eval_shape(lambda state: methods.remember(state.memory, state, NoRows(run)), entered)  # noqa: B023
    return jax.tree.map(_shape_at, memory, memory_places(memory, shapes))


def _shape_at(leaf: Tree, sharding: jax.sharding.Sharding) -> Tree:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@dataclass(frozen=True)
class NoRows:
    """Rows of zeros in place of a stage's: for shapes, which do not depend on them."""

    run: ResolvedRun

    def old(self, num_rows: int) -> Batch:
        """Rows of zeros."""
        zeros = jnp.zeros((1, num_rows, self.run.curriculum.block_size), jnp.int32)
        extra = {"segment_ids": zeros, "positions": zeros} if self.run.packed else {}
        return Batch(x=zeros, y=zeros, padding_mask=zeros.astype(jnp.int8), **extra)

    new = old
    renews_reference = False

    def new_batches(self, _num_rows: int | None) -> Iterator[Batch]:
        """None: shapes do not depend on them."""
        return iter(())

    def input_moments(self, state: State, num_rows: int) -> Mapping[str, jax.Array]:
        """Those of rows of zeros."""
        return state.input_moments(self.old(num_rows))

    def key(self, stream: str) -> jax.Array:  # noqa: ARG002  # for shapes any will do
        """A key."""
        return jax.random.key(0)

    def initial_reference(self) -> Tree:
        """There is none without data."""
        raise AssertionError("shapes of a reference are those of the parameters")
