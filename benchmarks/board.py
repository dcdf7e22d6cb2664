"""How long the board takes to list 1,000 runs: copies of a run's files, read for the first time.

python benchmarks/board.py RUN
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from holdfast.report import live

NUM_RUNS = 1000


def main() -> None:
    run = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_RUNS):
            target = Path(folder) / "group" / f"run{number:04}"
            target.mkdir(parents=True)
            for name in ("config.yaml", "metrics.jsonl", "results.json"):
                shutil.copy(run / name, target / name)
        started = time.perf_counter()
        found = live.statuses(Path(folder))
        print(f"{len(found)} runs listed in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
