"""Compiled steps of a run: where batches lie, one program for each stage kind, and how many rows fit at once.

The state that goes into a train step is donated. How many rows fit is asked of the compiler instead of tried until
something is killed.
"""

import contextlib
import platform
import re
import resource
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.data.batches import Batch, KeptRows
from holdfast.data.plan import DataPlan
from holdfast.data.slots import OldSlots, most_old_rows
from holdfast.errors import ConfigError
from holdfast.execution import Topology, processes
from holdfast.execution.chips import chip_of
from holdfast.models.axes import BATCH_AXES
from holdfast.models.kernels import lowering_for
from holdfast.training.data import penalty_view
from holdfast.training.initial import abstract_stage
from holdfast.training.manifest import ROW_ORDER
from holdfast.training.placement import shardings_of
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import Objective, TrainState, marks_old, objective_at, stages_with_slots
from holdfast.training.step import probe_step
from holdfast.types import Json, Tree

# Share of a device's memory that a step may plan to use; the rest is for the host's own work and fragmentation.
USABLE = 0.8
UNKNOWN = 1 << 62  # bytes of a step that the compiler refused without saying how many it needs
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

Stepped = tuple[TrainState, jax.Array, Json]
Compiled = Any  # a stage of JAX's way from a function to a program: traced, lowered or compiled


class TrainStep(Protocol):
    """One optimizer step, as `BaseTrainer.train_step` is."""

    def __call__(self, state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int, /) -> Stepped: ...


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows of each micro-batch are spread over data × fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def local_rows(mesh: jax.sharding.Mesh, shape: tuple[int, int]) -> slice:
    """The part of B that the devices of this process hold."""
    indices = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    spans = [index[1].indices(shape[1])[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in spans), max(stop for _, stop in spans))


def place(batch: Batch, mesh: jax.sharding.Mesh, num_rows: int) -> Batch:
    """A batch of this process's rows as global arrays on the mesh.

    Args:
        num_rows: B, of all processes together.
    """
    sharding = batch_sharding(mesh)

    def put(array: Tree) -> Tree:
        if array is None:
            return None
        # Of slots the second axis is the shards, of all else the rows.
        shape = (array.shape[0], array.shape[1] * num_rows // batch[0].shape[1], array.shape[-1])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return Batch(*(put(array) for array in batch))


class PrecompiledStep(NamedTuple):
    """A train step that was compiled from shapes, to see what memory it needs."""

    arguments: tuple[Tree, ...]
    compiled: Compiled

    def fits(self, arguments: tuple[Tree, ...]) -> bool:
        """Whether it is the step of these arrays: of their kind, shapes, types and places."""

        def same(shape: Tree, array: Tree) -> bool:
            alike = (shape.shape, shape.dtype) == (array.shape, array.dtype)
            return alike and bool(shape.sharding.is_equivalent_to(array.sharding, len(shape.shape)))

        kinds: list[Any] = [jax.tree.structure(part) for part in (self.arguments, arguments)]
        return kinds[0] == kinds[1] and all(jax.tree.leaves(jax.tree.map(same, self.arguments, arguments)))


class CompiledSteps:
    """The compiled steps of a run; `compile_seconds` is what making them took.

    Args:
        train_step, val_step: the trainer's.
        dropout_seed: keys of steps are folded from it.
        precompiled: what the search for a micro-batch has compiled.
    """

    def __init__(
        self,
        train_step: TrainStep,
        val_step: Callable[[TrainState, Batch], Any],
        mesh: jax.sharding.Mesh,
        dropout_seed: int,
        precompiled: PrecompiledStep | None = None,
    ) -> None:
        self._train_step, self._val_step = train_step, val_step
        self._mesh = mesh
        self._precompiled = precompiled
        self._compiled: dict[tuple[Hashable, ...], Compiled] = {}
        self.compile_seconds = 0.0
        replicated = NamedSharding(mesh, PartitionSpec())
        self._fold = jax.jit(
            lambda step: jax.random.fold_in(jax.random.key(dropout_seed), step), out_shardings=replicated
        )
        # In-process collectives of several CPU devices deadlock when steps are dispatched ahead of each other.
        self._one_at_a_time = jax.default_backend() == "cpu" and mesh.devices.size > 1

    def key(self, state: TrainState) -> jax.Array:
        """The random key of the step that a state is about to take."""
        found: jax.Array = self._fold(state.step)
        return found

    def ready(self, state: TrainState, batch: Batch) -> Callable[[], Stepped]:
        """One optimizer step, compiled and to be called once: the state that goes in is used up."""
        key = self.key(state)
        compiled = self._get("train", self._lower_train, state, batch, key)

        def train() -> Stepped:
            stepped: Stepped = compiled(state, batch, key)
            if self._one_at_a_time:
                jax.block_until_ready(stepped)
            return stepped

        return train

    def probe(self, state: TrainState, batch: Batch, probes: tuple[Callable[..., Any], ...]) -> dict[str, jax.Array]:
        """What probes see of the step that is about to be taken."""

        def lower(*arguments: Tree) -> Compiled:
            with tracing_for(self._mesh):
                return jax.jit(lambda state, batch, key: probe_step(state, batch, key, probes)).lower(*arguments)

        key = self.key(state)
        found: dict[str, jax.Array] = self._get(("probe", probes), lower, state, batch, key)(state, batch, key)
        if self._one_at_a_time:
            jax.block_until_ready(found)
        return found

    def validate(self, state: TrainState, batch: Batch) -> tuple[float, float]:
        """Sum of the NLL and number of tokens of a validation batch."""
        loss_sum, token_count, _ = self._get("val", self._lower_val, state, batch)(state, batch)
        return float(loss_sum), float(token_count)

    def _get(self, kind: Hashable, lower: Callable[..., Compiled], *arguments: Tree) -> Compiled:
        state, batch = arguments[:2]
        # What a reference holds beside adapters, and what methods remember, can change from one stage to the next.
        leaves, structure = jax.tree.flatten((state.reference, state.memory))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        slots = None if batch.slots is None else batch.slots.shape
        key = (kind, state.objective, structure, shapes, batch.x.shape, slots)
        if key not in self._compiled:
            started = time.perf_counter()
            ready = self._precompiled
            if kind == "train" and ready is not None and ready.fits(arguments):
                self._compiled[key] = ready.compiled
            else:
                self._compiled[key] = lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _lower_train(self, *arguments: Tree) -> Compiled:
        return trace_train(self._train_step, self._mesh, *arguments).lower()

    def _lower_val(self, *arguments: Tree) -> Compiled:
        with tracing_for(self._mesh):
            return jax.jit(self._val_step).lower(*arguments)

    @property
    def num_compiled(self) -> int:
        """How many steps were compiled so far."""
        return len(self._compiled)

    def hlo(self) -> str:
        """The compiler's text of the newest train step."""
        newest = [step for key, step in self._compiled.items() if key[0] == "train"][-1]
        return str(newest.as_text())


def trace_train(
    train_step: TrainStep, mesh: jax.sharding.Mesh, state: TrainState, batch: Batch, key: jax.Array
) -> Compiled:
    """The train step, traced for these shapes and shardings and for the mesh's platform."""
    num_micro = batch.x.shape[0]
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        lambda state, batch, key: train_step(state, batch, key, num_micro),
        donate_argnums=0,
        out_shardings=(shardings_of(state), replicated, replicated),
    )
    with tracing_for(mesh):
        return jitted.trace(state, batch, key)


@contextlib.contextmanager
def tracing_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """What is traced inside is for the devices of a mesh: their platform, and where activations lie on them.

    `with mesh:` would not do: the model's hints are looked up in the mesh that `jax.set_mesh` sets. One device needs
    no hints, and compiles faster without.
    """
    placed = jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()
    device = mesh.devices.flat[0]
    # By its name and not by what it says itself: a device that is only described gets the program of a real one.
    chip = chip_of(device.device_kind)
    with placed, lowering_for(device.platform, chip.memory if chip else None):
        yield


# Shapes of a step's arguments


def largest_stage(run: ResolvedRun) -> int:
    """A stage whose steps need the most memory: the first with a penalty, else the first with the most methods."""
    stages = range(len(run.curriculum.stages))
    return max(
        stages,
        key=lambda index: (
            run.curriculum.stages[index].beta > 0 or bool(run.curriculum.budgets_in(index)),
            len(objective_at(run, index).methods.by_name),
            -index,
        ),
    )


def abstract_batch(
    run: ResolvedRun, mesh: jax.sharding.Mesh, shape: tuple[int, int], slots: tuple[int, int] | None = None
) -> Batch:
    """A batch of the run as shapes.

    Args:
        slots: shards and old slots of each block, where the batch has some.
    """
    sharding = batch_sharding(mesh)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*shape, run.config.block_size), dtype, sharding=sharding)

    return Batch(
        x=array(jnp.int32),
        y=array(jnp.int32),
        padding_mask=array(jnp.int8),
        segment_ids=array(jnp.int32) if run.packed else None,
        positions=array(jnp.int32) if run.packed else None,
        penalty_mask=array(jnp.int8) if penalty_view(run) else None,
        old_mask=array(jnp.int8) if marks_old(run) else None,
        slots=jax.ShapeDtypeStruct((shape[0], *slots), jnp.int8, sharding=sharding) if slots else None,
        kept=jax.ShapeDtypeStruct((*shape, len(KeptRows._fields)), jnp.float32, sharding=sharding)
        if run.curriculum.budgets
        else None,
    )


def slots_for(run: ResolvedRun, plan: DataPlan, shape: tuple[int, int], shards: int, row_order: int) -> OldSlots | None:
    """Where the old rows of a run's batches lie; None where nothing looks at them alone.

    Args:
        shape: (S, B).
        row_order: `manifest.ROW_ORDER` when the run was begun.
    """
    stages = stages_with_slots(run) if row_order >= ROW_ORDER else []
    if not stages:
        return None
    return OldSlots(run.curriculum, {stage: most_old_rows(plan, stage) for stage in stages}, shape[0], shards)


def _largest_slots(
    run: ResolvedRun, objective: Objective, shape: tuple[int, int], shards: int, row_order: int
) -> tuple[int, int] | None:
    """Shards and slots of the steps with an objective that have the most of them; counted by rows, without data."""
    if row_order < ROW_ORDER or not stages_with_slots(run):
        return None
    options = run.options.run
    plan = DataPlan(run.curriculum, options.seed_of("data"), mixture_unit=options.mixture_unit)
    slots = slots_for(run, plan, shape, shards, row_order)
    assert slots is not None
    here = [max(rows) for stage, rows in slots.most.items() if objective_at(run, stage) == objective]
    return (shards, slots.needed(max(here))) if here else None


def abstract_key(mesh: jax.sharding.Mesh) -> Tree:
    """The key of a step as a shape."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def abstract_arguments(
    run: ResolvedRun, topology: Topology, per_device: int, state: TrainState, row_order: int = ROW_ORDER
) -> tuple[Tree, ...]:
    """What the train step takes, as shapes, with this micro-batch per shard."""
    rows = per_device * topology.num_row_shards
    shape = (run.config.batch_size // rows, rows)
    slots = _largest_slots(run, state.objective, shape, topology.num_row_shards, row_order)
    batch = abstract_batch(run, topology.mesh, shape, slots)
    return state, batch, abstract_key(topology.mesh)


# How many rows fit at once


@dataclass(frozen=True)
class MicroBatch:
    """How a step's rows are cut.

    Args:
        shape: (S, B), micro-batches of a step and rows of one.
        precompiled: the step that the search for it compiled, if it searched.
        seconds: that the search took.
    """

    shape: tuple[int, int]
    precompiled: PrecompiledStep | None = None
    seconds: float = 0.0


def choose_micro_batch(
    run: ResolvedRun,
    topology: Topology,
    state: TrainState,
    train_step: TrainStep,
    recorded: int | None = None,
    row_order: int = ROW_ORDER,
) -> MicroBatch:
    """The micro-batch of a run: as the options have it, as it was found before, or the largest that fits.

    Args:
        state: before the first step.
        recorded: rows per shard that an earlier process of this run found on the same mesh.
        row_order: as for `slots_for`.
    """
    size, asked, shards = run.config.batch_size, run.config.per_device_batch_size, topology.num_row_shards
    if asked > 0 or recorded is not None:
        per_device = rows_at_once(size, asked, shards) if asked > 0 else recorded
        assert per_device is not None
        return MicroBatch((size // (per_device * shards), per_device * shards))
    started = time.perf_counter()
    limit = device_limit(topology.mesh)
    shapes = abstract_stage(state, run, largest_stage(run))
    tried: dict[int, PrecompiledStep | None] = {}

    def needs(rows: int) -> int:
        used, tried[rows] = step_bytes(run, topology, train_step, rows, shapes, row_order)
        return used

    found, _ = largest_fitting(size // shards, limit, needs)
    shape = (size // (found * shards), found * shards)
    return MicroBatch(shape, tried[found], time.perf_counter() - started)


def step_bytes(
    run: ResolvedRun,
    topology: Topology,
    train_step: TrainStep,
    per_device: int,
    state: TrainState,
    row_order: int = ROW_ORDER,
) -> tuple[int, PrecompiledStep | None]:
    """Bytes of one device that a step with this micro-batch needs, from the compiler, also when it refuses the step.

    The step is returned too, so that a run that takes this micro-batch need not compile it once more.
    """
    arguments = abstract_arguments(run, topology, per_device, state, row_order)
    try:
        compiled = trace_train(train_step, topology.mesh, *arguments).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        return needed, None
    return needed_bytes(compiled), PrecompiledStep(arguments, compiled)


def check_batch(batch_size: int, per_device: int, num_row_shards: int) -> None:
    """Refuse a batch that the mesh or the micro-batch does not divide."""
    if batch_size % num_row_shards:
        raise ConfigError(
            "training/batch_size",
            batch_size,
            f"a multiple of {num_row_shards}, the data x fsdp shards of the mesh",
            f"set it to {-(-batch_size // num_row_shards) * num_row_shards}, or change topology/data or topology/fsdp",
        )
    if per_device == 0:
        raise ConfigError("training/per_device_batch_size", 0, "-1 or at least 1", "-1 finds the largest that fits")
    if per_device > 0 and batch_size % per_device:
        raise ConfigError(
            "training/per_device_batch_size",
            per_device,
            f"a divisor of training/batch_size = {batch_size}",
            "choose one of " + ", ".join(str(d) for d in divisors(batch_size // num_row_shards)),
        )


def rows_at_once(batch_size: int, per_device: int, num_row_shards: int) -> int:
    """Rows of a shard's micro-batch: those asked for, or fewer where a shard has fewer or they do not divide its rows.

    So a run goes on when it comes back on another number of devices.

    >>> rows_at_once(32, 8, 1), rows_at_once(32, 8, 8), rows_at_once(24, 4, 4)
    (8, 4, 3)
    """
    return next(size for size in divisors(batch_size // num_row_shards) if size <= per_device)


def divisors(number: int) -> list[int]:
    """All divisors, the largest first.

    >>> divisors(12)
    [12, 6, 4, 3, 2, 1]
    """
    return [size for size in range(number, 0, -1) if number % size == 0]


def device_limit(mesh: jax.sharding.Mesh) -> int:
    """Bytes that one device of the mesh may use, the same number in all processes."""
    hosts = processes.gather([platform.node(), _local_limit(mesh)])
    names = [name for name, _ in hosts]
    # Devices with memory of their own share it with nobody; a machine's is shared by the processes on it.
    limits = (limit if own else limit // names.count(name) for name, (own, limit) in hosts)
    return int(min(limits))


def _local_limit(mesh: jax.sharding.Mesh) -> tuple[bool, int]:
    """Whether the devices of this process have memory of their own, and how much each may use."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return True, int(stats["bytes_limit"])
    limit = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit():
            limit = min(limit, int(text))
    return False, int(limit) // len(mesh.local_devices)


def needed_bytes(compiled: Compiled) -> int:
    """Bytes of one device that a compiled step needs.

    The analysis' own peak leaves temporaries out, so its parts are summed.
    """
    usage = compiled.memory_analysis()
    if usage is None:
        return 0
    total = (
        usage.argument_size_in_bytes + usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes
    )
    return int(total)


def refused_bytes(message: str) -> int | None:
    """Bytes that a step needs which the compiler refused, from its message; None if it refused for another reason.

    >>> refused_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.")
    22011707392
    >>> refused_bytes("RESOURCE_EXHAUSTED: memory required for HLO temporaries (20.5G) exceeds available HBM (15.75G)")
    22011707392
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    used = re.search(r"(?:[Uu]sed |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", message)
    return int(float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)) if used else UNKNOWN


def largest_fitting(rows_per_shard: int, limit: int, needs: Callable[[int], int]) -> tuple[int, int]:
    """The largest micro-batch per shard whose step fits, and what it needs.

    Memory grows with the rows nearly linearly, so each compilation predicts which size to look at next.

    >>> largest_fitting(512, 1000, lambda rows: 100 + 10 * rows)
    (64, 740)
    """
    sizes = divisors(rows_per_shard)
    position = 0
    while True:
        size = sizes[position]
        used = needs(size)
        if used <= limit * USABLE:
            return size, used
        if position == len(sizes) - 1:
            raise ConfigError(
                "training/per_device_batch_size",
                -1,
                f"a model whose step fits {limit / 2**30:.1f} GiB a device; with one row it needs "
                f"{used / 2**30:.1f} GiB",
                "make the model or architecture/block_size smaller, set architecture/remat, or raise topology/fsdp",
            )
        fits = [p for p in range(position + 1, len(sizes)) if sizes[p] / size * used <= limit * USABLE]
        position = fits[0] if fits else len(sizes) - 1 if position == len(sizes) - 2 else position + 1


def host(metrics: Json) -> dict[str, float]:
    """Metrics as Python numbers."""
    return {name: np.asarray(value).item() for name, value in jax.device_get(metrics).items()}


def peak_memory(mesh: jax.sharding.Mesh) -> int:
    """The most bytes in use so far: of a device, or of this process where devices do not tell."""
    stats = mesh.local_devices[0].memory_stats() if mesh.local_devices else None
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
