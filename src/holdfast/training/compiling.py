"""Compiled steps of a trainer: one for each stage kind, with donated state and fixed shardings."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.data.batches import Batch
from holdfast.models.attention import lowering_for
from holdfast.models.axes import BATCH_AXES
from holdfast.training import build
from holdfast.training.microbatch import device_limit, largest_fitting, needed_bytes, refused_bytes
from holdfast.training.state import KLDivergenceTrainState, TrainState, adapters_of, shardings_of

if TYPE_CHECKING:
    from holdfast.training.base import BaseTrainer


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows of each micro-batch are spread over data × fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def local_rows(mesh: jax.sharding.Mesh, shape: tuple[int, int]) -> slice:
    """The part of B that the devices of this process hold."""
    indices = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    spans = [index[1].indices(shape[1])[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in spans), max(stop for _, stop in spans))


def place(batch: Batch, mesh: jax.sharding.Mesh, shape: tuple[int, int]) -> Batch:
    """A batch of this process's rows as global arrays on the mesh."""
    sharding = batch_sharding(mesh)

    def put(array: Any) -> Any:
        if array is None:
            return None
        return jax.make_array_from_process_local_data(sharding, array, (*shape, array.shape[-1]))

    return Batch(*(put(array) for array in batch))


class Ahead(NamedTuple):
    """A train step that was compiled from shapes, to see what memory it needs."""

    arguments: tuple[Any, ...]
    compiled: Any

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether it is the step of these arrays: of their kind, shapes, types and places."""

        def same(shape: Any, array: Any) -> bool:
            alike = (shape.shape, shape.dtype) == (array.shape, array.dtype)
            return alike and shape.sharding.is_equivalent_to(array.sharding, len(shape.shape))

        kinds: list[Any] = [jax.tree.structure(part) for part in (self.arguments, arguments)]
        return kinds[0] == kinds[1] and all(jax.tree.leaves(jax.tree.map(same, self.arguments, arguments)))


class Steps:
    """The compiled steps of a run; `compile_seconds` is what making them took.

    Args:
        trainer: whose `train_step` and `val_step` are compiled.
    """

    def __init__(self, trainer: "BaseTrainer[Any, Any]") -> None:
        self._trainer = trainer
        self._mesh = trainer.topology.mesh
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0
        replicated = NamedSharding(self._mesh, PartitionSpec())
        seed = trainer.settings.run.seed_of("dropout")
        self._fold = jax.jit(lambda step: jax.random.fold_in(jax.random.key(seed), step), out_shardings=replicated)
        # In-process collectives of several CPU devices deadlock when steps are dispatched ahead of each other.
        self._one_at_a_time = jax.default_backend() == "cpu" and self._mesh.devices.size > 1

    def ready(self, state: TrainState, batch: Batch) -> Callable[[], tuple[TrainState, Any, dict[str, Any]]]:
        """One optimizer step, compiled and to be called once: the state that goes in is used up."""
        key = self._fold(state.step)
        compiled = self._get("train", state, batch, key)

        def train() -> tuple[TrainState, Any, dict[str, Any]]:
            stepped: tuple[TrainState, Any, dict[str, Any]] = compiled(state, batch, key)
            if self._one_at_a_time:
                jax.block_until_ready(stepped)
            return stepped

        return train

    def validate(self, state: TrainState, batch: Batch) -> tuple[float, float]:
        """Sum of the NLL and number of tokens of a validation batch."""
        loss_sum, token_count, _ = self._get("val", state, batch)(state, batch)
        return float(loss_sum), float(token_count)

    def _get(self, kind: str, *arguments: Any) -> Any:
        state, batch = arguments[:2]
        # What a reference holds beside adapters can change from one stage to the next.
        reference = state.reference if isinstance(state, KLDivergenceTrainState) else None
        key = (kind, state.objective, jax.tree.structure(reference), batch.x.shape)
        if key not in self._compiled:
            started = time.perf_counter()
            ahead = self._trainer.compiled_ahead
            if kind == "train" and ahead is not None and ahead.fits(arguments):
                self._compiled[key] = ahead.compiled
            else:
                lowered = lower_train if kind == "train" else lower_val
                self._compiled[key] = lowered(self._trainer, *arguments).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    @property
    def num_compiled(self) -> int:
        """How many steps were compiled so far."""
        return len(self._compiled)

    def hlo(self) -> str:
        """The compiler's text of the newest train step."""
        newest = [step for key, step in self._compiled.items() if key[0] == "train"][-1]
        return str(newest.as_text())


def lower_train(trainer: "BaseTrainer[Any, Any]", state: Any, batch: Any, key: Any) -> Any:
    """The train step, lowered for these shapes and shardings."""
    return trace_train(trainer, state, batch, key).lower()


def trace_train(trainer: "BaseTrainer[Any, Any]", state: Any, batch: Any, key: Any) -> Any:
    """The train step, traced for these shapes and shardings and for the mesh's platform."""
    mesh, num_micro = trainer.topology.mesh, batch.x.shape[0]
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        lambda state, batch, key: trainer.train_step(state, batch, key, num_micro),
        donate_argnums=0,
        out_shardings=(shardings_of(state), replicated, replicated),
    )
    with tracing_for(mesh):
        return jitted.trace(state, batch, key)


def lower_val(trainer: "BaseTrainer[Any, Any]", state: Any, batch: Any) -> Any:
    """The validation step, lowered for these shapes and shardings."""
    with tracing_for(trainer.topology.mesh):
        return jax.jit(trainer.val_step).lower(state, batch)


@contextlib.contextmanager
def tracing_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """What is traced inside is for the devices of a mesh: their platform, and where activations lie on them.

    `with mesh:` would not do: the model's hints are looked up in the mesh that `jax.set_mesh` sets. One device needs
    no hints, and compiles faster without.
    """
    placed = jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()
    with placed, lowering_for(mesh.devices.flat[0].platform):
        yield


def abstract_state(trainer: "BaseTrainer[Any, Any]") -> TrainState:
    """The largest state of the run as shapes: with a reference if any stage has one, and its penalty."""
    state = trainer.state
    penalised = [index for index, stage in enumerate(trainer.stages.stages) if stage.beta > 0]
    if penalised:
        reference = state.params if state.base is None else adapters_of(state.params)
        state = state.replace(objective=trainer.objective_at(penalised[0]), reference=reference)
    shapes: TrainState = jax.tree.map(build.abstract, state)
    return shapes


def abstract_batch(trainer: "BaseTrainer[Any, Any]", shape: tuple[int, int]) -> Batch:
    """A batch of the run as shapes."""
    sharding = batch_sharding(trainer.topology.mesh)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*shape, trainer.config.block_size), dtype, sharding=sharding)

    return Batch(
        x=array(jnp.int32),
        y=array(jnp.int32),
        padding_mask=array(jnp.int8),
        segment_ids=array(jnp.int32) if trainer.packed else None,
        positions=array(jnp.int32) if trainer.packed else None,
        penalty_mask=array(jnp.int8) if trainer.penalty_view else None,
    )


def abstract_key(mesh: jax.sharding.Mesh) -> Any:
    """The key of a step as a shape."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def abstract_arguments(trainer: "BaseTrainer[Any, Any]", per_device: int, state: TrainState) -> tuple[Any, ...]:
    """What the train step takes, as shapes, with this micro-batch per shard."""
    rows = per_device * trainer.topology.num_row_shards
    batch = abstract_batch(trainer, (trainer.config.batch_size // rows, rows))
    return state, batch, abstract_key(trainer.topology.mesh)


def trace_abstract(trainer: "BaseTrainer[Any, Any]", per_device: int, state: TrainState) -> Any:
    """The train step traced on shapes alone, with this micro-batch per shard."""
    return trace_train(trainer, *abstract_arguments(trainer, per_device, state))


def step_bytes(trainer: "BaseTrainer[Any, Any]", per_device: int) -> int:
    """Bytes of one device that a step with this micro-batch needs, from the compiler, also when it refuses the step.

    The step is kept, so that a run that takes this micro-batch need not compile it once more.
    """
    arguments = abstract_arguments(trainer, per_device, abstract_state(trainer))
    try:
        compiled = trace_train(trainer, *arguments).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        return needed
    trainer.compiled_ahead = Ahead(arguments, compiled)
    return needed_bytes(compiled)


def find_micro_batch(trainer: "BaseTrainer[Any, Any]") -> int:
    """The largest micro-batch per shard that fits the device's memory."""
    rows_per_shard = trainer.config.batch_size // trainer.topology.num_row_shards
    limit = device_limit(trainer.topology.mesh)
    started = time.perf_counter()
    size, _ = largest_fitting(rows_per_shard, limit, lambda rows: step_bytes(trainer, rows))
    trainer.search_seconds = time.perf_counter() - started
    return size


def host(metrics: Any) -> dict[str, float]:
    """Metrics as Python numbers."""
    return {name: np.asarray(value).item() for name, value in jax.device_get(metrics).items()}


def peak_memory(mesh: jax.sharding.Mesh) -> int:
    """The most bytes in use so far: of a device, or of this process where devices do not tell."""
    stats = mesh.local_devices[0].memory_stats() if mesh.local_devices else None
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
