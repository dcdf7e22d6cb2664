"""Run by test_data_axis.py on eight virtual devices: a run with kernels inside, to its end or until it kills itself.

kernel_run.py FOLDER DEVICES [STEP]
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax

from holdfast.execution import ExecutionSpec, Topology, TopologyConfig
from holdfast.models.kernels import KERNELS, emulating
from holdfast.training.loop import TrainLoop
from holdfast.training.run import make_trainer
from training import tiny

MESHES = {1: TopologyConfig(), 8: TopologyConfig(data=2, fsdp=2, tensor=2)}
# Rows long enough for a kernel, packed, and few of them: two steps in each stage.
TOKENS = 2 * 8 * 128
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": TOKENS, "data": [{"name": "lists", "style": "PACKED"}]},
        {
            "tokens": TOKENS,
            "data": [{"name": "arithmetic", "style": "PACKED"}],
            "beta": 0.5,
            "update_reference": True,
        },
    ],
    "training": {"batch_size": 8, "per_device_batch_size": 1, "evaluate": False, "validation": False},
    "architecture": {**tiny.PRETRAIN["architecture"], "block_size": 128, "n_kv_head": 2, "scan_layers": True},
    "logging": {"report_interval": 1, "checkpoint_interval": 1},
    "eval": {"evaluations": []},
}


def main() -> None:
    folder, devices, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None
    after, splash, taken = TrainLoop.after, KERNELS["splash"], []

    def killing(self: TrainLoop, done: int) -> None:
        after(self, done)
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def noticed(*given: Any) -> jax.Array:
        taken.append(given)
        return splash(*given)

    TrainLoop.after = killing  # type: ignore[method-assign]  # the end of this process is what is tried
    KERNELS["splash"] = noticed
    topology = Topology.build(MESHES[devices], jax.devices()[:devices])
    spec = dataclasses.replace(ExecutionSpec.local(folder, name="run"), topology=topology)
    with emulating("tpu"):
        trainer = make_trainer(tiny.resolved("continual/train/abcd_kl", VALUES), spec)
        trainer.run()
    assert taken, "no step had the kernel inside"
    print(trainer.spec.run_dir)


if __name__ == "__main__":
    main()
