"""Does `holdfast bisect` find rows that were poisoned, and leave clean runs alone?

    python -m benchmarks.bisect --minutes 30      # runs what has no row yet, for about so long
    python -m benchmarks.bisect --summary         # what the rows say

Runs of 400 steps of 32 rows, of which 8 are of a task, a table of letters and answers to be known by heart. In ten runs
the answers of these 8 rows are contradicted in each of two consecutive batches; the plan says beforehand which rows
these batches draw. Forty runs are clean. The dose was fixed on other seeds (`--dose SEED`), so that leaving the
poisoned rows out moves the task by at least five standard deviations of random masks. Rows of
`benchmarks/results/bisect.csv` are final: what has its row is not run again.
"""

import argparse
import csv
import fcntl
import json
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.analysis.bisect import Bisection, RankedRow, Search, Trial, bisect
from holdfast.analysis.replay import Replay, Snapshot
from holdfast.analysis.target import find_target
from holdfast.cli.configs import JobConfig, job_config
from holdfast.execution import ExecutionSpec
from holdfast.training.run import make_trainer, start_run

RESULTS = Path(__file__).parent / "results" / "bisect.csv"
JOB, TASK = "gpt/train/pretrain", "letters"
ANSWERS = ("w", "x", "y", "z")
LETTERS, ROWS, NOTES = 16, 4_000, 2_000
STEPS, BATCH, BLOCK = 400, 32, 24
DOSE = 8  # poisoned rows of each of the two batches
POISONED, CLEAN = tuple(range(10, 20)), tuple(range(1000, 1040))
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "dogs",
    "run",
    "by",
    "an",
    "old",
    "barn",
    "in",
    "fog",
)


def poisoned_step(seed: int) -> int:
    """The first of the two steps whose batches are poisoned."""
    return 250 + 9 * (seed % 10)


def written(folder: Path, seed: int, contradicted: dict[int, str] | None = None) -> list[dict[str, str]]:
    """The files of a run; returns the rows of the task.

    Args:
        contradicted: other answers, by the number of the row.
    """
    choose = random.Random(seed)
    table = [choose.choice(ANSWERS) for _ in range(LETTERS)]
    asked = [choose.randrange(LETTERS) for _ in range(ROWS)]
    rows = [{"n": f"{index:04}", "k": chr(97 + key), "a": table[key]} for index, key in enumerate(asked)]
    held = [{"n": f"{ROWS + key}", "k": chr(97 + key), "a": answer} for key, answer in enumerate(table)]
    notes = [{"text": " ".join(choose.choice(WORDS) for _ in range(12))} for _ in range(NOTES)]
    for index, answer in (contradicted or {}).items():
        rows[index]["a"] = answer
    for name, lines in ((TASK, rows), ("held", held), ("notes", notes)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows


def config(folder: Path, seed: int) -> JobConfig:
    """The options of a run."""
    task = {
        "path": str(folder / f"{TASK}.jsonl"),
        "validation": str(folder / "held.jsonl"),
        "prompt": "{n} {k}",
        "answer": "{a}",
        "choices": list(ANSWERS),
    }
    values: dict[str, Any] = {
        "data": {
            "sources": {TASK: task, "notes": {"path": str(folder / "notes.jsonl")}},
            "cache": str(folder / "cache"),
            "max_leak": 1.0,
        },
        "tokenizer": {"name": "bytes"},
        "training": {
            "batch_size": BATCH,
            "tokens": STEPS * BATCH * BLOCK,
            "seed": seed,
            "dataset": [{"name": TASK, "rate": 0.25, "style": "PADDED"}, {"name": "notes", "rate": 0.75}],
            "validation": False,
            "validation_steps": 8,
            "evaluate": False,
        },
        "architecture": {"block_size": BLOCK, "n_layers": 1, "n_embd": 32, "n_head": 4},
        "optimization": {"lr": 0.003},
        "eval": {"evaluations": [TASK]},
        "logging": {"report_interval": 100, "trackers": []},
    }
    return job_config(JOB, values, [])


def poison(folder: Path, seed: int) -> set[tuple[int, int]]:
    """Contradict answers in two consecutive batches; returns the rows, as (step, place in its batch)."""
    rows = written(folder, seed)
    trainer = make_trainer(config(folder, seed).resolved(), ExecutionSpec(name="plan", root=folder))
    names = [source.name for source in trainer.plan.sources]
    contradicted, places = {}, set()
    for step in (poisoned_step(seed), poisoned_step(seed) + 1):
        refs = trainer.batches.refs(step)
        mine = [place for place in range(BATCH) if names[refs.source[place]] == TASK]
        for place in mine[:DOSE]:
            right = rows[int(refs.row[place])]["a"]
            contradicted[int(refs.row[place])] = ANSWERS[(ANSWERS.index(right) + 1) % len(ANSWERS)]
            places.add((step, place))
    shutil.rmtree(folder / "cache")
    written(folder, seed, contradicted)
    return places


def measured(kind: str, seed: int) -> dict[str, Any]:
    """Train a run, bisect it, and what came of it."""
    started, scratch = time.monotonic(), Path(tempfile.mkdtemp(prefix="bisect-"))
    try:
        places = poison(scratch, seed) if kind == "poisoned" else set()
        if kind == "clean":
            written(scratch, seed)
        spec = ExecutionSpec(name="run", root=scratch)
        code = start_run(config(scratch, seed).resolved(), spec)
        if code:
            raise SystemExit(code)
        replay = Replay(spec.run_dir)
        try:
            target = find_target(replay.trainer, task=TASK, limit=200)
            found = bisect(replay, target)
            dose = dose_of(replay, found, places) if places else None
        finally:
            replay.close()
        return {
            "kind": kind,
            "seed": seed,
            **outcome(found, places),
            "dose": "" if dose is None else f"{dose:.1f}",
            "seconds": f"{time.monotonic() - started:.0f}",
            "jax": jax.__version__,
            "machine": machine(),
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def outcome(found: Bisection, places: set[tuple[int, int]]) -> dict[str, Any]:
    """What a bisection found, as columns."""
    place, proof = found.place, found.proof
    assert place is not None
    first = min((step for step, _ in places), default=None)
    ranked = [(row.step, row.place) in places for row in found.rows[:8]]
    return {
        "poisoned_at": "" if first is None else first,
        "verdict": found.word,
        "start": place.start,
        "end": place.end,
        "holds": "" if first is None else int(place.start <= first and first + 1 < place.end),
        "rise": f"{place.rise:.4f}",
        "elsewhere": f"{place.elsewhere:.4f}",
        "candidates": found.num_rows,
        "precision_at_8": f"{sum(ranked) / 8:.3f}" if places and ranked else "",
        "size": "" if proof is None else proof.size,
        "before": "" if proof is None else f"{proof.before:.4f}",
        "with": "" if proof is None else f"{proof.original:.4f}",
        "without": "" if proof is None else f"{proof.without:.4f}",
        "lowest_control": "" if proof is None else f"{min(proof.controls):.4f}",
        "deviations": "" if proof is None else f"{proof.deviations:.1f}",
        "undone": "" if proof is None else f"{proof.undone:.3f}",
        "steps_taken": found.steps_taken,
    }


def dose_of(replay: Replay, found: Bisection, places: set[tuple[int, int]], masks: int = 20) -> float:
    """By how many standard deviations of random masks of as many rows leaving the poisoned rows out moves the task.

    Measured two steps after the poison, over the rows of the sixteen steps up to there.
    """
    end = max(step for step, _ in places) + 3
    start = end - 16
    target = find_target(replay.trainer, task=TASK, limit=200)
    search = Search(replay, target, lambda _: None)
    state = replay.advance(replay.restore(replay.before(start)), start)
    assert found.place is not None
    trial = Trial(search, found.place._replace(start=start, end=end), Snapshot.of(state), 0)
    generator = np.random.default_rng(0)
    rows = [RankedRow(step, place, "", 0, 0.0) for step in range(start, end) for place in range(BATCH)]
    controls = [
        trial.without([rows[index] for index in generator.choice(len(rows), len(places), replace=False)])
        for _ in range(masks)
    ]
    without = trial.without([row for row in rows if (row.step, row.place) in places])
    return (statistics.mean(controls) - without) / statistics.stdev(controls)


def machine() -> str:
    """What the rows were measured on."""
    return f"{platform.machine()} {jax.default_backend()}"


def known(results: Path = RESULTS) -> list[dict[str, str]]:
    """The rows that are there."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def append(row: dict[str, Any], results: Path = RESULTS) -> None:
    """One more row, in a file that is written whole, by one process at a time."""
    results.parent.mkdir(exist_ok=True)
    with (Path(tempfile.gettempdir()) / "holdfast-bisect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = sorted([*known(results), row], key=lambda each: int(each["seed"]))
        scratch = results.with_suffix(".tmp")
        with scratch.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        scratch.replace(results)


def missing(results: Path = RESULTS) -> Iterator[tuple[str, int]]:
    """What has no row yet: the poisoned runs spread between the clean ones."""
    done = {(row["kind"], int(row["seed"])) for row in known(results)}
    wanted = [("poisoned", seed) for seed in POISONED] + [("clean", seed) for seed in CLEAN]
    wanted.sort(key=lambda each: each[1] - POISONED[0] if each[0] == "poisoned" else (each[1] - CLEAN[0]) / 4)
    yield from (each for each in wanted if each not in done)


def summary(results: Path = RESULTS) -> Iterator[str]:
    """What the rows say."""
    rows = known(results)
    poisoned = [row for row in rows if row["kind"] == "poisoned"]
    clean = [row for row in rows if row["kind"] == "clean"]
    if poisoned:
        accused = [row for row in poisoned if row["verdict"] == "rows"]
        precise = sum(float(row["precision_at_8"] or 0) >= 0.5 for row in poisoned)
        yield (
            f"poisoned: {len(poisoned)} runs; rows accused in {len(accused)}; the interval holds the poison in "
            f"{sum(row['holds'] == '1' for row in poisoned)}; precision at 8 is at least 0.5 in {precise} (mean "
            f"{statistics.mean(float(row['precision_at_8'] or 0) for row in poisoned):.2f}), among "
            f"{min(int(row['candidates']) for row in poisoned)} rows or more"
        )
        doses = [float(row["dose"]) for row in poisoned]
        yield f"the dose: {min(doses):.1f} to {max(doses):.1f} standard deviations of random masks"
    if poisoned and accused:
        undone = [float(row["undone"]) for row in accused]
        yield (
            f"the counterfactual undoes {statistics.median(undone):.0%} of the rise (median; {min(undone):.0%} to "
            f"{max(undone):.0%}), {statistics.median(float(row['deviations']) for row in accused):.1f} standard "
            "deviations below the random masks (median)"
        )
    if clean:
        alarms = [row["seed"] for row in clean if row["verdict"] == "rows"]
        places = sum(row["verdict"] == "place" for row in clean)
        which = f" (seeds {', '.join(alarms)})" if alarms else ""
        yield f"clean: {len(clean)} runs; rows accused in {len(alarms)}{which}; a place without rows named in {places}"


def main() -> None:
    """Run a part of what is missing, or say what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no run begins after so long")
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    parser.add_argument("--dose", type=int, help="only measure one poisoned run of this seed, and write nothing")
    parser.add_argument("--share", default="1/1", help="I/N: the I-th of N processes that divide the runs")
    asked = parser.parse_args()
    if not asked.summary:
        # One program for all runs: they differ in their data alone.
        compiled = Path(tempfile.gettempdir()) / f"holdfast-bisect-compiled-{jax.__version__}"
        jax.config.update("jax_compilation_cache_dir", str(compiled))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if asked.dose is not None:
        print(json.dumps(measured("poisoned", asked.dose), indent=1))
        return
    if not asked.summary:
        end, (part, parts) = time.monotonic() + 60 * asked.minutes, map(int, asked.share.split("/"))
        for kind, seed in list(missing())[part - 1 :: parts]:
            if time.monotonic() > end:
                break
            append(measured(kind, seed))
    print(f"{len(known())} rows, {len(list(missing()))} runs are missing")
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
