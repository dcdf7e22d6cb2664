"""Run by test_chip_plan.py on four virtual devices: what the devices exchange in a step under fsdp."""

import tempfile
from pathlib import Path

from holdfast.analysis import estimates
from holdfast.analysis.chip_plan import kinds
from holdfast.analysis.hlo import collectives
from holdfast.training.compile import abstract_arguments, trace_train
from training import tiny

# Rows enough that activations are far larger than the model.
OPTIONS = (
    "training.batch_size=256",
    "architecture.block_size=64",
    "training.per_device_batch_size=64",
    "architecture.scan_layers=true",
)
VALUES = {**tiny.PRETRAIN, "training": {**tiny.PRETRAIN["training"], "tokens": 256 * 64 * 4}}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer("gpt/train/pretrain", VALUES, Path(folder), *OPTIONS, data=1, fsdp=4)
    run, topology = trainer.resolved, trainer.topology
    [(_, state)] = kinds(run, trainer.state).values()
    arguments = abstract_arguments(run, topology, 64, state)
    compiled = trace_train(trainer.train_step, topology.mesh, *arguments).lower().compile()
    found = collectives(compiled.as_text(), 4)
    whole = estimates.shard_bytes(trainer.state.params) * 4
    total = sum(part.num_bytes for part in found)
    activations = 256 * 64 * trainer.resolved.model.width * 4
    assert activations > 4 * whole, "the test would not notice"
    # Forward, backward and gradients move the model four times at the most.
    assert whole < total < 5 * whole, (whole, activations, found)
    print("weights alone")


if __name__ == "__main__":
    main()
