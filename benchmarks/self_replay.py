"""How much of what KL on real old rows keeps does a model keep that replays its own samples instead?

    python -m benchmarks.self_replay --minutes 30     # runs what has no row yet, for about so long
    python -m benchmarks.self_replay --summary        # what the rows say

stories260K, tinystories → shakespeare. What an arm keeps is the old loss of plain training at the same new loss, read
off its learning rates seed by seed, minus its own. The ratio of the two arms' means has Fieller's interval over seeds.
Rows of `benchmarks/results/self_replay.csv` are final.
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
from benchmarks.keep import CURRICULA, append, known, options, trained
from holdfast.evaluation.statistics import student

RESULTS = Path(__file__).parent / "results" / "self_replay.csv"
FIELDS = ("arm", "rate", "seed", "steps", "lr", "old", "new", "seconds")
STORIES = CURRICULA["stories"]
RATES = (0.1, 0.2, 0.5, 1.0)
SEEDS = tuple(range(8))
ANCHOR = (
    "stages.1.beta=1",
    "stages.1.update_reference=true",
    "optimization.kl={estimator: forward, on: old}",
)
ARMS = {
    "real": ("training.replay={rate: 0.25, objective: kl}", *ANCHOR),
    "self": ("training.replay={source: self, rate: 0.25, objective: kl}", *ANCHOR),
}


def wanted() -> Iterator[tuple[str, float, int, tuple[str, ...]]]:
    """All runs, seed by seed: the frontier of plain training, and both arms."""
    for seed in SEEDS:
        for rate in RATES:
            yield "plain", rate, seed, (f"stages.1.lr={rate}",)
        for arm, overrides in ARMS.items():
            yield arm, 1.0, seed, overrides


def measured(arm: str, rate: float, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run to the end in a folder of its own; bits per byte of old and new then."""
    started, scratch = time.monotonic(), Path(tempfile.mkdtemp(prefix="self-replay-"))
    try:
        run_dir = trained(arm, options(STORIES, seed), overrides, scratch)
        scores = json.loads((run_dir / "results.json").read_text())["points"][-1]["scores"]
        old, new = (f"{scores[name]['bits_per_byte']:.5f}" for name in (STORIES.old, STORIES.new))
        seconds = f"{time.monotonic() - started:.0f}"
        return dict(zip(FIELDS, (arm, rate, seed, STORIES.steps, STORIES.lr, old, new, seconds), strict=True))
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
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    asked = parser.parse_args()
    if not asked.summary:
        if not (SHARED / "data" / "tinystories").is_dir():
            raise SystemExit(f"no {SHARED / 'data'} (HOLDFAST_SHARED names the folder of real data)")
        end = time.monotonic() + 60 * asked.minutes
        done = {(row["arm"], float(row["rate"]), int(row["seed"])) for row in known(RESULTS)}
        for arm, rate, seed, overrides in wanted():
            if (arm, rate, seed) not in done and time.monotonic() < end:
                append(measured(arm, rate, seed, overrides), RESULTS)
    print(f"{len(known(RESULTS))} rows of {len(list(wanted()))}")
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
