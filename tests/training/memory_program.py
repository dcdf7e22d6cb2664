"""Run by test_memory_options.py on four virtual devices: a reference on the host in shards, resumed in the middle."""

import shutil
import sys
from pathlib import Path
from typing import Any

from training import tiny
from training.killing import losses
from training.test_memory_options import HALF, HOST, MOMENTS, QUIET, held

MESH = {"data": 2, "fsdp": 2}


def main() -> None:
    folder = Path(sys.argv[1])

    def trainer(name: str, *overrides: str) -> Any:
        made = tiny.trainer("continual/train/abcd_kl", tiny.CONTINUAL, folder, *QUIET, *overrides, name=name, **MESH)
        made.run()
        return made

    device, host = trainer("device"), trainer("host", HOST)
    assert losses(device.spec.run_dir) == losses(host.spec.run_dir)
    tiny.same_state(device, host)
    assert held(host.state.reference) == {("pinned_host", "float32")}
    whole = trainer("half", HOST, HALF, *MOMENTS)
    half = whole.spec.run_dir / "checkpoints"
    shutil.rmtree(half / "16")
    again = trainer("half", HOST, HALF, *MOMENTS)
    tiny.same_state(whole, again)
    print("the same")


if __name__ == "__main__":
    sys.exit(main())
