"""A run on devices that are not there: what one of them holds, sends and computes in one step.

For a TPU the step that the run would use is compiled for the described devices, by the compiler that would compile
it there: memory and collectives are the compiler's own. For a GPU both are computed from shapes. No array of the
model is ever made.
"""

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any, cast

import jax

from holdfast.analysis import estimates
from holdfast.analysis.hlo import Collectives, collectives, matmul_flops
from holdfast.errors import UserError
from holdfast.execution import ExecutionSpec, Topology, TopologyConfig
from holdfast.execution.chips import Chip, num_devices
from holdfast.execution.topology import AXES, axis_sizes
from holdfast.training.compile import (
    abstract_arguments,
    largest_fitting,
    largest_stage,
    refused_bytes,
    rows_at_once,
    step_bytes,
    trace_train,
)
from holdfast.training.initial import abstract_stage
from holdfast.training.resolve import ResolvedRun
from holdfast.training.run import make_trainer
from holdfast.training.state import TrainState
from holdfast.types import Json

COMPILER, SHAPES = "the compiler's own", "computed from shapes"
# libtpu looks for a TPU's machine around it and complains in several lines; it needs none to compile.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # one process at a time owns a TPU, but any number may compile for one
}
HOST = (2, 2, 1)  # chips of a host, as libtpu has them by default; a smaller slice is less than a host


def chip_plan(run: ResolvedRun, chip: Chip, sizes: tuple[int, ...]) -> Json:
    """What one device does in a step of every kind of stage, as `holdfast plan --chip --json` prints it."""
    topology = describe(chip, sizes, run.options.topology)
    state = make_trainer(run, dataclasses.replace(ExecutionSpec(name="plan"), topology=topology)).state
    per_device = rows_per_device(run, topology, state, chip)
    num_micro = run.config.batch_size // (per_device * topology.num_row_shards)
    return {
        "chip": chip.name,
        "devices": list(sizes),
        "num_devices": num_devices(chip, sizes),
        "mesh": dict(topology.sizes),
        "source": COMPILER if chip.is_tpu else SHAPES,
        "memory_of_a_device": chip.memory,
        "micro_batches": num_micro,
        "rows_per_device": per_device,
        "attention": run.model.kind.attention(
            run.model, "tpu" if chip.is_tpu else "gpu", packed=run.packed, described=True
        ),
        "steps": [
            step_facts(run, topology, chip, name, stages, per_device, shapes)
            for name, (stages, shapes) in kinds(run, state).items()
        ],
    }


def describe(chip: Chip, sizes: tuple[int, ...], config: TopologyConfig) -> Topology:
    """The mesh over devices of that chip, described but not there."""
    shape = axis_sizes(config, num_devices(chip, sizes))
    if not chip.is_tpu:
        types = (jax.sharding.AxisType.Auto,) * len(AXES)
        mesh = jax.sharding.AbstractMesh(tuple(shape[axis] for axis in AXES), AXES, axis_types=types)
        # Shapes of shards are all that is asked of it.
        return Topology(cast(jax.sharding.Mesh, mesh), described=True)
    from jax.experimental import topologies

    for name, value in LIBTPU.items():
        os.environ.setdefault(name, value)
    torus = "x".join(map(str, sizes))
    hosts = tuple(math.gcd(size, most) for size, most in zip((*sizes, 1), HOST, strict=False))
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.topology}:{torus}", chips_per_host_bounds=hosts
        )
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--devices {torus}: {chip.name} does not come in this shape: {reason}") from error
    except (RuntimeError, ImportError) as error:
        raise UserError(
            f"--chip {chip.name}: libtpu, which compiles for TPUs on any machine, is not installed; "
            "pip install 'holdfast[tpu]'"
        ) from error
    built = Topology.build(config, described.devices)
    return dataclasses.replace(built, described=True)


def rows_per_device(run: ResolvedRun, topology: Topology, state: TrainState, chip: Chip) -> int:
    """The micro-batch of a shard: as configured, or the largest that fits the chip."""
    batch_size, shards = run.config.batch_size, topology.num_row_shards
    if run.config.per_device_batch_size > 0:
        return rows_at_once(batch_size, run.config.per_device_batch_size, shards)
    shapes = abstract_stage(state, run, largest_stage(run))

    def needs(rows: int) -> int:
        if chip.is_tpu:
            return step_bytes(run, topology, run.trainer.train_step, rows, shapes)[0]
        return sum(estimates.memory(run, topology, shapes, rows, chip).values())

    return largest_fitting(batch_size // shards, chip.memory, needs)[0]


def kinds(run: ResolvedRun, state: TrainState) -> dict[str, tuple[list[str], TrainState]]:
    """The kinds of step of a run: the names of their stages, and their state as shapes."""
    found: dict[str, tuple[list[str], TrainState]] = {}
    for index, stage in enumerate(run.curriculum.stages):
        shapes = abstract_stage(state, run, index)
        anchored, acting = shapes.objective.penalty is not None, list(shapes.objective.methods.by_name)
        name = f"anchored ({run.trainer.penalties(run.options)[0]})" if anchored else "plain"
        name += f", {', '.join(acting)}" if acting else ""
        name += ", with a reference in memory" if shapes.reference is not None and not anchored else ""
        found.setdefault(name, ([], shapes))[0].append(stage.name)
    return found


def step_facts(
    run: ResolvedRun,
    topology: Topology,
    chip: Chip,
    name: str,
    stages: list[str],
    per_device: int,
    state: TrainState,
) -> Json:
    """One kind of step: memory, collectives, operations, and how long these take at the least."""
    devices, train_step = topology.mesh.size, run.trainer.train_step
    started = time.perf_counter()
    if chip.is_tpu:
        traced = trace_train(train_step, topology.mesh, *abstract_arguments(run, topology, per_device, state))
        memory, sent = compiled_facts(traced, topology.sizes)
    else:
        memory = estimates.memory(run, topology, state, per_device, chip)
        memory["total"] = sum(memory.values())
        sent = estimates.collectives(run, topology, state, per_device)
    # Products inside a kernel are not in a trace: they are counted in one of the plain formula.
    jaxpr = estimates.trace(run, topology, train_step, state, per_device).jaxpr
    flops = matmul_flops(jaxpr, run.config.block_size, run.model.kind.seen_keys(run.model)) / devices
    state_bytes = estimates.shard_bytes(state)
    return {
        "kind": name,
        "stages": stages,
        "memory": memory,
        "fits": memory["total"] <= chip.memory,
        "state_bytes": state_bytes,
        "host_bytes": estimates.host_bytes(state),
        "flops_per_device": flops,
        "collectives": None if sent is None else [{**dataclasses.asdict(part), "sent": part.sent} for part in sent],
        "seconds": estimates.seconds(chip, flops, state_bytes, sent),
        "seconds_to_plan": round(time.perf_counter() - started, 1),
    }


def compiled_facts(traced: Any, mesh: Mapping[str, int]) -> tuple[dict[str, int], list[Collectives] | None]:
    """Memory and collectives of a step from the compiler; without collectives where it refuses to compile."""
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        return {"total": needed}, None
    usage = compiled.memory_analysis()
    memory = {
        "arguments": usage.argument_size_in_bytes,
        "outputs": usage.output_size_in_bytes,
        "aliased": usage.alias_size_in_bytes,
        "temporaries": usage.temp_size_in_bytes,
        "program": usage.generated_code_size_in_bytes,
    }
    total = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["program"]
    return {**memory, "total": total}, collectives(compiled.as_text(), math.prod(mesh.values()), mesh)
