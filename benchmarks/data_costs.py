"""Times of batches, in a process of their own; see `data.py`."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.data import prepare
from holdfast.data.batches import Batches, prefetched
from holdfast.data.checksums import PIECE, PieceSums
from holdfast.data.config import DataConfig
from holdfast.data.tokenizers import load_tokenizer
from holdfast.training.config import config_classes
from holdfast.training.manifest import facts
from holdfast.training.resolve import resolve

LATE_STEP = 1_000_000
BATCHES, STEPS = 20, 2  # of one round
CORPUS_PARAGRAPHS = 10_000  # of the store that is prepared, 26 MB


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def batch_cost(config: dict[str, Any], rounds: int) -> dict[str, float]:
    """Making a batch beside a step of the loop, in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        cfg = merge(config_classes("gpt/train/pretrain"), config)
        rehearsal = Rehearsal(resolve("gpt/train/pretrain", cfg), Path(scratch))
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
        trainer = Rehearsal(resolve(job, merge(config_classes(job), config)), Path(scratch)).trainer
        run = trainer.resolved.options.run

        def first(step: int) -> None:
            plan = trainer.data.plan(trainer.resolved.curriculum, run.seed_of("data"), run.mixture_unit)
            facts(plan, step)
            batches = Batches(plan, trainer.data.train, trainer.batch_shape[0])
            next(prefetched(batches.__getitem__, len(batches), step, run.prefetch))

        first(0)
        times: dict[int, list[float]] = {0: [], LATE_STEP: []}
        for _ in range(4 * rounds):
            for step, found in times.items():
                found.append(seconds(lambda step=step: first(step)))
    early, late = statistics.median(times[0]), statistics.median(times[LATE_STEP])
    return {"early_seconds": early, "late_seconds": late, "late_over_early": late / early}


class NoSums(PieceSums):
    """Checksums that cost nothing, to see what the real ones cost."""

    def update(self, data: bytes) -> None:
        """Count pieces, look at nothing."""
        pieces, self._filled = divmod(self._filled + len(data), PIECE)
        self._whole += bytes(4 * pieces)


def checksum_cost(rounds: int) -> dict[str, float]:
    """Preparing a store with its checksums and without them, in turns, in CPU time; bytes are the fastest tokenizer."""
    tokenizer = load_tokenizer("bytes")
    times: dict[type[PieceSums], list[float]] = {PieceSums: [], NoSums: []}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "root" / "texts" / "train.txt"
        file.parent.mkdir(parents=True)
        words = " ".join(f"word{number}" for number in range(300))
        file.write_text("\n\n".join(f"{number} {words}" for number in range(CORPUS_PARAGRAPHS)))
        for number in range(rounds + 1):
            for sums, found in times.items():
                cache = str(Path(scratch) / f"cache-{number}-{sums.__name__}")
                data = DataConfig(root=str(Path(scratch) / "root"), cache=cache)
                with (
                    mock.patch.multiple("holdfast.data.prepare", PieceSums=sums),
                    mock.patch.multiple("holdfast.data.store", PieceSums=sums),
                ):
                    started = time.process_time()
                    prepare.prepare("texts", "train", data=data, tokenizer=tokenizer, progress=False)
                if number:  # the first round warms up
                    found.append(time.process_time() - started)
    with_sums, without = (statistics.median(found) for found in times.values())
    return {"with_seconds": with_sums, "without_seconds": without, "ratio": with_sums / without}


def main() -> None:
    told = json.loads(sys.argv[1])
    rounds = told["rounds"]
    batches = {name: batch_cost(config, rounds) for name, config in told["configs"].items()}
    first = {name: first_batches(job, config, rounds) for name, (job, config) in told["first"].items()}
    print(json.dumps({"batches": batches, "first": first, "checksums": checksum_cost(rounds)}))


if __name__ == "__main__":
    main()
