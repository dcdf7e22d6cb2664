"""How much of what KL on real old rows keeps does a model keep that replays its own samples instead?

    python -m benchmarks.self_replay --minutes 30     # runs what has no row yet, for about so long
    python -m benchmarks.self_replay --summary        # what the rows say

stories260K, tinystories → shakespeare. What an arm keeps is the old loss of plain training at the same new loss, read
off its learning rates seed by seed, minus its own. The ratio of the two arms' means has Fieller's interval over seeds.
Arms without real old rows draw no row of tinystories at all, which only measures. Documents are split as in
`benchmarks.keep`. Rows of `benchmarks/results/self_replay.csv` are final.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import SHARED
from benchmarks.keep import CURRICULA, JOB, append, known, shared_options, trained
from holdfast.evaluation.statistics import student
from holdfast.execution import ExecutionSpec

RESULTS = Path(__file__).parent / "results" / "self_replay.csv"
FIELDS = ("arm", "rate", "seed", "steps", "lr", "old", "new", "seconds")
STORIES = CURRICULA["stories"]
BATCH, BLOCK, STEPS, LR = 8, 128, 120, 0.001
HELD_OUT_ROWS = 384
RATES = (0.1, 0.2, 0.5, 1.0)
SEEDS = tuple(range(8))
KL = "optimization.kl={estimator: forward, on: old}"


def wanted() -> Iterator[tuple[str, float, int]]:
    """All runs, seed by seed: the frontier of plain training, and both arms."""
    for seed in SEEDS:
        yield from (("plain", rate, seed) for rate in RATES)
        yield from ((arm, 1.0, seed) for arm in ("real", "self"))


def options(arm: str, rate: float, seed: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The options of a run: its config, and what is changed in it."""
    values, tokens = shared_options(STORIES, seed, folder), BATCH * BLOCK
    del values["tokenizer"]
    new = {"tokens": STEPS * tokens, "data": [{"name": STORIES.new, "style": "PMD"}], "optimizer": "reset", "lr": rate}
    # A step that changes nothing makes real rows old; the model knows them already.
    old = {"tokens": tokens, "data": [{"name": STORIES.old, "style": "PMD"}], "lr": 0.0}
    values["training"] |= {"batch_size": BATCH, "per_device_batch_size": BATCH, "validation_steps": HELD_OUT_ROWS}
    values |= {
        "stages": [old, new] if arm == "real" else [new],
        "architecture": {"from": str(SHARED / "weights" / "stories260K"), "block_size": BLOCK},
        "optimization": {"lr": LR, "schedule": "wsd", "decay_pct": 0.3},
    }
    values["eval"] |= {"held_out": [] if arm == "real" else [STORIES.old]}
    last = len(values["stages"]) - 1
    if arm == "plain":
        return values, []
    source = "source: self, " if arm == "self" else ""
    replay = f"training.replay={{{source}rate: 0.25, objective: kl}}"
    return values, [replay, KL, f"stages.{last}.beta=1", f"stages.{last}.update_reference=true"]


def measured(arm: str, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run to the end in a folder of its own; bits per byte of old and new then."""
    started, scratch = time.process_time(), Path(tempfile.mkdtemp(prefix="self-replay-"))
    try:
        spec = ExecutionSpec(name=arm, root=scratch)
        trained(JOB, *options(arm, rate, seed, folder), spec)
        last = json.loads((spec.run_dir / "results.json").read_text())["points"][-1]
        scores = {**last.get("held_out", {}), **last["scores"]}
        old, new = (f"{scores[name]['bits_per_byte']:.5f}" for name in (STORIES.old, STORIES.new))
        seconds = f"{time.process_time() - started:.1f}"
        return dict(zip(FIELDS, (arm, rate, seed, STEPS, LR, old, new, seconds), strict=True))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def kept(rows: Sequence[dict[str, str]], arm: str, seed: int) -> float | None:
    """Old loss of plain training at an arm's new loss, over its learning rates, minus the arm's own."""
    own = [row for row in rows if row["arm"] == arm and int(row["seed"]) == seed]
    plain = sorted(
        (float(row["new"]), float(row["old"])) for row in rows if row["arm"] == "plain" and int(row["seed"]) == seed
    )
    if not own or len(plain) < len(RATES):
        return None
    new, old = float(own[0]["new"]), float(own[0]["old"])
    return float(np.interp(new, [x for x, _ in plain], [y for _, y in plain])) - old


def fieller(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two means over the same seeds, and Fieller's 95 % interval; infinite where the divisor may be 0.

    >>> [round(value, 3) for value in fieller([1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0])]
    [0.5, 0.465, 0.53]
    """
    x, y = np.asarray(tops, float), np.asarray(bottoms, float)
    count = len(x)
    (vx, cov), (_, vy) = np.cov(x, y) / count
    t2 = student(count - 1) ** 2
    a, b, c = y.mean() ** 2 - t2 * vy, x.mean() * y.mean() - t2 * cov, x.mean() ** 2 - t2 * vx
    ratio, inside = float(x.mean() / y.mean()), b * b - a * c
    if a <= 0 or inside < 0:
        return ratio, -math.inf, math.inf
    return ratio, float((b - math.sqrt(inside)) / a), float((b + math.sqrt(inside)) / a)


def summary() -> Iterator[str]:
    """What the rows say."""
    rows = known(RESULTS)
    pairs = [(kept(rows, "self", seed), kept(rows, "real", seed)) for seed in SEEDS]
    whole = [(own, real) for own, real in pairs if own is not None and real is not None]
    if len(whole) < 2:
        yield "too few seeds for an interval"
        return
    ratio, low, high = fieller([own for own, _ in whole], [real for _, real in whole])
    own, real = (float(np.mean(column)) for column in zip(*whole, strict=True))
    yield (
        f"{len(whole)} seeds: own samples keep {own:.3f} bits per byte, real old rows {real:.3f}, at equal new loss; "
        f"ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
    )


def main() -> None:
    """Run a part of what is missing, or say what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no run begins after so long")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/keep"), help="of the documents' split")
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    asked = parser.parse_args()
    if not asked.summary:
        if not (SHARED / "data" / "tinystories").is_dir():
            raise SystemExit(f"no {SHARED / 'data'} (HOLDFAST_SHARED names the folder of real data)")
        end = time.monotonic() + 60 * asked.minutes
        done = {(row["arm"], float(row["rate"]), int(row["seed"])) for row in known(RESULTS)}
        for arm, rate, seed in wanted():
            if (arm, rate, seed) not in done and time.monotonic() < end:
                append(measured(arm, rate, seed, asked.folder.resolve()), RESULTS)
    print(f"{len(known(RESULTS))} rows of {len(list(wanted()))}")
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
