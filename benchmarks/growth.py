"""Whether a long run grows: memory and step time of a tiny model over thousands of steps of `holdfast run`."""

import statistics
from typing import Any

from benchmarks import runs
from benchmarks.bench import Bench
from benchmarks.shapes import TINY, options, write_corpus

STEPS = 5_000
REPORT = 10


def run(bench: Bench) -> dict[str, Any]:
    """Compare the second tenth of the run, when everything has happened once, with the last one."""
    steps = 500 if bench.quick else STEPS
    corpus = bench.folder / "growth"
    write_corpus(corpus, TINY)
    config = options(TINY, corpus, bench.cache)
    training = {**config["training"], "tokens": TINY.tokens * steps, "validation": True, "validation_steps": 8}
    logging = {"report_interval": REPORT, "checkpoint_interval": steps // 20, "validation_interval": steps // 20}
    file = runs.write_config(bench.folder / "growth.yaml", {**config, "training": training, "logging": logging})
    out, log = bench.folder / "runs", bench.log("growth")
    process = runs.holdfast("run", str(file), "--name", "growth", "--out", str(out), cache=bench.cache, log=log)
    metrics = out / "general" / "default" / "growth" / "metrics.jsonl"
    memory: list[tuple[int, int]] = []
    for resident in runs.watch(process, 0.1):
        memory.append((_step(metrics), resident))
    runs.check(process, log)
    taken = [(record["step"], _seconds(record)) for record in runs.train_records(metrics)]
    early, late = (steps // 10, steps // 5), (steps - steps // 10, steps - 1)
    grown = _in(memory, late, 0.5) / _in(memory, early, 0.5) - 1
    # The lower quartile: other processes only ever make a step slower.
    slower = _in(taken, late, 0.25) / _in(taken, early, 0.25) - 1
    return {
        "steps": steps,
        "memory": grown,
        "step_time": slower,
        "resident_bytes": _in(memory, late, 0.5),
        "step_seconds": _in(taken, late, 0.25),
    }


def _step(metrics: Any) -> int:
    """The step of the newest record, from the end of the file alone."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        tail = file.read()
    found = [part.split(b",")[0] for part in tail.split(b'"step": ')[1:]]
    return int(found[-1]) if found else 0


def _seconds(record: dict[str, Any]) -> float:
    spent = record["seconds"]
    return (spent.get("compute", 0.0) + spent.get("data", 0.0)) / REPORT


def _in(values: list[tuple[int, Any]], span: tuple[int, int], share: float) -> float:
    """A quantile of what was measured in a span of steps."""
    inside = [value for step, value in values if span[0] <= step <= span[1]]
    assert len(inside) > 1, f"nothing was measured between steps {span}"
    return float(statistics.quantiles(inside, n=100, method="inclusive")[round(share * 100) - 1])
