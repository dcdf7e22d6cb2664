"""How long `holdfast run` takes to its first step: with nothing compiled before, and the second time."""

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.bench import Bench, say

PAIRS = 3


def run(bench: Bench) -> dict[str, Any]:
    """Pairs of starts, each pair with a fresh cache of compiled functions; data is prepared before."""
    config = bench.options("small")
    training = {**config["training"], "per_device_batch_size": -1}
    config = {**config, "training": training, "logging": {"report_interval": 1}}
    first, second = [], []
    for pair in range(1 if bench.quick else PAIRS):
        cache = bench.folder / f"start-{pair}"
        ours = {**config, "data": {**config["data"], "cache": str(cache)}}  # the config's own folder would win
        file = runs.write_config(bench.folder / f"start-{pair}.yaml", ours)
        log = bench.log("start-prepare")
        runs.check(runs.holdfast("prepare", str(file), cache=cache, log=log), log)
        for number, found in enumerate((first, second)):
            found.append(first_step(bench, file, cache, f"start-{pair}-{number}"))
        say(f"start: {first[-1]:.1f} s, then {second[-1]:.1f} s")
    return {
        "first_seconds": statistics.median(first),
        "second_seconds": statistics.median(second),
        "second_over_first": statistics.median(b / a for a, b in zip(first, second, strict=True)),
    }


def first_step(bench: Bench, file: Path, cache: Path, name: str) -> float:
    """Seconds from the command to its first train record."""
    out, log = bench.folder / "runs", bench.log(name)
    metrics = out / "general" / "default" / name / "metrics.jsonl"
    started = time.perf_counter()
    process = runs.holdfast("run", str(file), "--name", name, "--out", str(out), cache=cache, log=log)
    try:
        while not runs.train_records(metrics):
            if process.poll() is not None:
                raise RuntimeError(f"{log}: {log.read_text()[-500:]}")
            time.sleep(0.02)
        return time.perf_counter() - started
    finally:
        runs.stop(process)
