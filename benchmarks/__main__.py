"""`python -m benchmarks`: everything that is said about speed and memory, measured in one run.

Ours and the peers take turns, so that all see the same machine. Writes benchmarks/out/latest.json and
docs/benchmarks.md; with --only or --quick benchmarks/out/partial.json alone.
"""

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, chips, command, data, families, growth, methods, packing, page, speed, start
from benchmarks.bench import OUT, Bench, say
from benchmarks.figures import figure_table, judged, shape_table
from benchmarks.shapes import SHAPES

CORES = 2
PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "packing": packing.run,
    "data": data.run,
    "checkpoints": checkpoints.run,
    "start": start.run,
    "command": command.run,
    "growth": growth.run,
}
# Parts that a whole run leaves out.
ASKED_FOR: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "methods": methods.run,
    "families": families.run,
    "chips": chips.run,
}


def main() -> None:
    names = ["speed", *PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often everybody is measured")
    parser.add_argument("--only", nargs="+", choices=[*names, *ASKED_FOR], default=names, help="these parts alone")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=None, help="of speed, these shapes alone")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few rounds: shows that the harness works")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # everything that is started here inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    folder = OUT / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bench = Bench(folder, 2 if arguments.quick else arguments.rounds, arguments.quick)
    partial = arguments.quick or arguments.only != names or arguments.shapes is not None
    results = measure(bench, arguments.only, arguments.shapes)
    results["figures"] = judged(results)
    target = OUT / ("partial.json" if partial else "latest.json")
    target.write_text(json.dumps(results, indent=1) + "\n")
    show(results, whole=not partial)
    say(f"\nwritten: {target}")
    if not partial:
        say(f"written: {page.write(results)}")
    shutil.rmtree(folder, ignore_errors=True)


def measure(bench: Bench, parts: list[str], shapes: list[str] | None) -> dict[str, Any]:
    """What was asked for, and on what it was measured."""
    started = time.time()
    results: dict[str, Any] = {
        "machine": machine(),
        "rounds": bench.rounds,
        "quick": bench.quick,
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "load_before": os.getloadavg()[0],
    }
    if "speed" in parts:
        for name in shapes or bench.shapes:
            results[name] = speed.measure(bench, name)
    for name, part in {**PARTS, **ASKED_FOR}.items():
        if name in parts:
            say(f"{name} ...")
            results[name] = part(bench)
    return results | {"load_after": os.getloadavg()[0], "minutes": (time.time() - started) / 60}


def machine() -> dict[str, Any]:
    """The machine in a few words."""
    model = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        model = next(line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": CORES, "memory": memory, "python": platform.python_version()}


def show(results: dict[str, Any], *, whole: bool) -> None:
    """The tables."""
    for name in SHAPES:
        if name in results:
            say(f"\n### {name}\n\n{shape_table(results[name])}")
    if "methods" in results:
        say(f"\n### methods\n\n{methods.method_table(results['methods'])}")
    if "families" in results:
        say(f"\n### families\n\n{families.family_table(results['families'])}")
    say(f"\n{figure_table(results, whole=whole)}")


if __name__ == "__main__":
    main()
