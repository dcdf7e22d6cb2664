"""How long `holdfast --help` takes: what every command pays before it does anything."""

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.bench import Bench, say
from benchmarks.workers import ROOT, environment

TIMES = 15


def run(bench: Bench) -> dict[str, Any]:
    """The median over some starts, the first of which reads from the disk and is left out."""
    found = []
    for _ in range(1 + (3 if bench.quick else TIMES)):
        started = time.perf_counter()
        command = [sys.executable, "-m", "holdfast", "--help"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - started)
    say(f"command: --help in {statistics.median(found[1:]):.3f} s")
    return {"help_seconds": statistics.median(found[1:])}
