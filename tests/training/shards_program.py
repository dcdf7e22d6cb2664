"""Run by test_sharded_init.py on four virtual devices: what each device holds of a whole train state."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from holdfast.training.state import KLDivergenceTrainState
from training import tiny


def held(**axes: int) -> dict[str, list[int]]:
    """Bytes on each device of parameters, optimizer state and reference."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer("continual/train/abcd_kl", tiny.CONTINUAL, Path(folder), **axes)
    assert isinstance(trainer.state, KLDivergenceTrainState)
    state = trainer.state.snapshot(0)

    def on_each(tree: Any) -> list[int]:
        sums = dict.fromkeys(jax.devices(), 0)
        for leaf in jax.tree.leaves(tree):
            for shard in leaf.addressable_shards:
                sums[shard.device] += shard.data.nbytes
        return list(sums.values())

    return {name: on_each(getattr(state, name)) for name in ("params", "opt_state", "reference")}


def main() -> None:
    whole = held(data=4)
    for axes, share in (({"data": 1, "fsdp": 4}, 4), ({"data": 2, "fsdp": 2}, 2), ({"fsdp": 2, "tensor": 2}, 4)):
        for name, each in held(**axes).items():
            full = whole[name][0]
            assert whole[name] == [full] * 4
            # Scales and biases are small and on every device.
            assert full / share <= max(each) <= full / share + 0.05 * full, (axes, name, each, full)
            assert len(set(each)) == 1, (axes, name, each)
    print("shrinks")


if __name__ == "__main__":
    sys.exit(main())
