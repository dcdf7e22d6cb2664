"""Times of batches, in a process of their own; see `data.py`."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.config import merge
from holdfast.data.batches import Batches, prefetched
from holdfast.training.jobs import config_classes
from holdfast.training.manifest import facts
from holdfast.training.rehearsal import Rehearsal

LATE_STEP = 1_000_000
BATCHES, STEPS = 20, 2  # of one round


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def batch_cost(config: dict[str, Any], rounds: int) -> dict[str, float]:
    """Making a batch beside a step of the loop, in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        cfg = merge(config_classes("gpt/train/pretrain"), config)
        rehearsal = Rehearsal("gpt/train/pretrain", cfg, Path(scratch))
        rehearsal.take(2)
        batches = rehearsal.trainer.batches
        batch, step = [], []
        for number in range(rounds):
            for index in range(BATCHES):
                at = 1000 + number * BATCHES + index
                batch.append(seconds(lambda at=at: batches[at]))
            step.append(seconds(lambda: rehearsal.take(STEPS)) / STEPS)
        rehearsal.close()
    made, taken = statistics.median(batch), statistics.median(step)
    return {"batch_seconds": made, "step_seconds": taken, "ratio": made / taken}


def first_batches(job: str, config: dict[str, Any], rounds: int) -> dict[str, float]:
    """From opened stores to the first batch of the loop, with the check of the past that a resumed run makes."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Rehearsal(job, merge(config_classes(job), config), Path(scratch)).trainer
        run = trainer.settings.run

        def first(step: int) -> None:
            plan = trainer.data.plan(trainer.stages, run.seed_of("data"), run.mixture_unit)
            facts(plan, step)
            batches = Batches(plan, trainer.data.train, trainer.batch_shape[0])
            next(prefetched(batches, step, run.prefetch))

        first(0)
        times: dict[int, list[float]] = {0: [], LATE_STEP: []}
        for _ in range(4 * rounds):
            for step, found in times.items():
                found.append(seconds(lambda step=step: first(step)))
    early, late = statistics.median(times[0]), statistics.median(times[LATE_STEP])
    return {"early_seconds": early, "late_seconds": late, "late_over_early": late / early}


def main() -> None:
    told = json.loads(sys.argv[1])
    rounds = told["rounds"]
    batches = {name: batch_cost(config, rounds) for name, config in told["configs"].items()}
    first = {name: first_batches(job, config, rounds) for name, (job, config) in told["first"].items()}
    print(json.dumps({"batches": batches, "first": first}))


if __name__ == "__main__":
    main()
