"""Times of steps with and without a checkpoint before them, in a process of their own; see `checkpoints.py`."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.execution.checksums import checksums, not_finite
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve

STEPS = 8  # after a checkpoint: the writing is over by then, or the wait for it counts too


def main() -> None:
    told = json.loads(sys.argv[1])
    job = "gpt/train/pretrain"
    with tempfile.TemporaryDirectory() as scratch:
        rehearsal = Rehearsal(resolve(job, merge(config_classes(job), told["config"])), Path(scratch))
        rehearsal.take(3)
        plain, saved, blocked, summed = [], [], [], []
        # Other programs on the machine change how long something takes, but hardly how much of the CPU it takes.
        plain_cpu, summed_cpu = [], []
        for _ in range(told["rounds"] + 1):
            started, cpu = time.perf_counter(), time.process_time()
            rehearsal.take(STEPS)
            plain.append(time.perf_counter() - started)
            plain_cpu.append(time.process_time() - cpu)
            started = time.perf_counter()
            rehearsal.loop.checkpoint(rehearsal.step, ())
            blocked.append(time.perf_counter() - started)
            rehearsal.take(STEPS)
            rehearsal.store.wait()
            saved.append(time.perf_counter() - started)
            started, cpu = time.perf_counter(), time.process_time()
            checksums(rehearsal.trainer.state.arrays())
            not_finite(rehearsal.trainer.state.params)
            summed.append(time.perf_counter() - started)
            summed_cpu.append(time.process_time() - cpu)
        size = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
        rehearsal.close()
    # The first checkpoint makes what the others use again.
    lost = [with_it - without for with_it, without in zip(saved[1:], plain[1:], strict=True)]
    print(json.dumps({
        "step_seconds": statistics.median(plain[1:]) / STEPS,
        "lost_seconds": statistics.median(lost),
        "blocked_seconds": statistics.median(blocked[1:]),
        "checksum_seconds": statistics.median(summed[1:]),
        "step_cpu_seconds": min(plain_cpu[1:]) / STEPS,
        "checksum_cpu_seconds": min(summed_cpu[1:]),
        "first_seconds": saved[0] - plain[0],
        "bytes_on_disk": size,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
