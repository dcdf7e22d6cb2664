"""Run by test_data_axis.py on eight virtual devices: what the axis `data` of the mesh does to a step."""

import dataclasses
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.analysis import estimates
from holdfast.analysis.hlo import collectives
from holdfast.execution import ExecutionSpec, Topology, TopologyConfig
from holdfast.training.compile import abstract_arguments, place, trace_train, tracing_for
from holdfast.training.initial import abstract_stage
from holdfast.training.run import make_trainer
from holdfast.training.state import objective_at, placed_like
from holdfast.training.step import accumulated, micro_loss
from training import tiny

JOB = "continual/train/abcd_kl"
ROWS = ("training.batch_size=32", "training.per_device_batch_size=1")
TOKENS = 32 * 32 * 2
VALUES = {**tiny.CONTINUAL, "stages": [{**stage, "tokens": TOKENS} for stage in tiny.CONTINUAL["stages"]]}


def gradients(folder: Path, penalty: str, rows: int, *sizes: int) -> Any:
    """Loss and gradients of an anchored step on a mesh of the first devices, and the shape of its batch."""
    options = (
        "training.batch_size=32",
        f"training.per_device_batch_size={rows}",
        f"optimization.kl.estimator={penalty}",
    )
    topology = Topology.build(TopologyConfig(*sizes), jax.devices()[: math.prod(sizes)])
    spec = dataclasses.replace(ExecutionSpec.local(folder, name="run"), topology=topology)
    trainer = make_trainer(tiny.resolved(JOB, VALUES, *options), spec)
    reference = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, trainer.state.params)
    state = trainer.state.replace(
        objective=objective_at(trainer.resolved, 1),
        beta=placed_like(jax.numpy.float32(0.5), trainer.state.beta),
        reference=reference,
    )
    mesh = trainer.topology.mesh
    batch = place(trainer.batches[3], mesh, trainer.batch_shape[1])
    with tracing_for(mesh):
        lowered = jax.jit(lambda *given: accumulated(micro_loss, *given)).lower(state, batch, jax.random.key(0))
    found = lowered.compile()(state, batch, jax.random.key(0))
    return jax.device_get(found), trainer.batch_shape


def equal(folder: Path) -> None:
    """Every mesh gives the gradients of one device."""
    for penalty in ("forward", "l2_reference"):
        alone, _ = gradients(folder / f"{penalty}-1", penalty, 8, 1, 1, 1)
        for sizes in ((4, 2, 1), (2, 2, 2)):
            found, (num_micro, _) = gradients(folder / f"{penalty}-{sizes}", penalty, 1, *sizes)
            assert num_micro > 1, num_micro
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, alone)
            print(penalty, sizes, "equal")


def exchanged(folder: Path) -> None:
    """Gradients are summed over `data` once a step, in their fsdp shards, however many micro-batches it has."""
    trainer = tiny.trainer(JOB, VALUES, folder, *ROWS, "architecture.scan_layers=true", data=4, fsdp=2)
    run, topology = trainer.resolved, trainer.topology
    arguments = abstract_arguments(run, topology, 1, abstract_stage(trainer.state, run, 0))
    assert arguments[1].x.shape[0] == 4
    text = trace_train(trainer.train_step, topology.mesh, *arguments).lower().compile().as_text()
    own = estimates.shard_bytes(trainer.state.params)
    over = {size: sum(part.num_bytes for part in collectives(text, 8) if part.group == size) for size in (4, 8)}
    assert 0.9 * own < over[4] < 1.2 * own, (own, over)
    assert over[8] < 0.1 * own, (own, over)
    print("once a step")


def main() -> None:
    parts = {"equal": equal, "exchanged": exchanged}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            parts[name](Path(folder) / name)


if __name__ == "__main__":
    main()
