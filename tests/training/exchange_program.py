"""Run by test_ahead.py on four virtual devices: what the devices exchange in a step under fsdp."""

import tempfile
from pathlib import Path

import jax

from holdfast.training import compiling, estimates
from holdfast.training.ahead import kinds
from holdfast.training.program import collectives
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
    [(_, state)] = kinds(trainer).values()
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    compiled = compiling.trace_abstract(trainer, 64, state).lower().compile()
    found = collectives(compiled.as_text(), 4)
    whole = estimates.shard_bytes(trainer.state.params) * 4
    total = sum(part.num_bytes for part in found)
    activations = 256 * 64 * trainer.model_spec.n_embd * 4
    assert activations > 4 * whole, "the test would not notice"
    # Forward, backward and gradients move the model four times at the most.
    assert whole < total < 5 * whole, (whole, activations, found)
    print("weights alone")


if __name__ == "__main__":
    main()
