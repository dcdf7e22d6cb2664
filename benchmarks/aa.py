"""A/A on real runs: what does `holdfast verdict` say where there is no difference?

    HOLDFAST_DATA=../shared/data python -m benchmarks.aa --train --out runs    # trains both names; writes aa.csv
    python -m benchmarks.aa                                                    # judges; exit 1 where a limit is missed

`--train` runs plain training of examples/studies/stories-shakespeare.yaml at all its rates on all judging seeds, and
beside it `nll_difference`, whose gradient is plain's, and `again`: plain at the base rate, which begins the new stage
with the same weights and sees its rows in another order (the order is drawn from a dataset's name, so it reads the same
files under another name). `aa.csv` beside the benchmarks' other results keeps them.

The names of two arms are then swapped at random, seed by seed, 200 times: where there is no difference every swap is as
likely as another. And the seeds of every arm of the study are split at random into two names that are paired at random,
200 times: there parents differ too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from holdfast.config import read_yaml
from holdfast.studies.measured import measured
from holdfast.studies.pairs import compare_pair, resampled
from holdfast.studies.results import BEFORE, BOUNDS, PLAIN, Row, read_results
from holdfast.studies.study import SeedsConfig, read_study
from holdfast.studies.verdict import BETTER, NO_EVIDENCE, WORSE, default_margin, judge_rows

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "examples" / "studies" / "stories-shakespeare.yaml"
RESULTS, AGAIN = STUDY.parent / "results" / "stories-shakespeare.csv", ROOT / "benchmarks" / "results" / "aa.csv"
NAME, NLL = "again", "nll_difference"
LEAST = 0.95


def train(out: Path) -> None:
    """Train both names, and keep their rows."""
    config = read_study(STUDY).config
    assert isinstance(config.seeds, SeedsConfig)
    assert isinstance(config.new, str)
    data = Path(os.environ["HOLDFAST_DATA"]).absolute()
    values = read_yaml(STUDY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in data.iterdir():
            (folder / each.name).symlink_to(each)
        (folder / NAME).symlink_to(data / config.new)
        again = [f"stages.1.data=[{{name: {NAME}}}]", f"eval.held_out=[{config.new}]"]
        values |= {
            "name": "aa",
            "base": str(STUDY.parent / str(config.base)),
            "seeds": config.judging,
            "arms": {NAME: {"set": again}, NLL: read_yaml(STUDY.parent / values["arms"])[NLL]},
            "bounds": [],
            "results": str(AGAIN),
            "relearn": None,
            "drift": False,
        }
        file = folder / "aa.yaml"
        file.write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "holdfast", "study", "run", str(file), "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "HOLDFAST_DATA": str(folder)})


def swapped(rows: Sequence[Row], rate: float, seeds: set[int]) -> list[Row]:
    """The rows with the two names exchanged on some seeds."""

    def named(row: Row) -> Row:
        if row.seed not in seeds or row.learning_rate != rate:
            return row
        # An interpolation with the snapshot is of plain alone.
        if row.arm == PLAIN and not row.strength:
            return replace(row, arm=NAME)
        return replace(row, arm=PLAIN) if row.arm == NAME else row

    return [named(row) for row in rows]


class Swaps(NamedTuple):
    """What is said of a rate of plain, and of an arm that is plain at it, where the two names are swapped.

    Args:
        words: verdicts on the arm against plain's frontier.
        dominated: how often the rate is called dominated.
        fastest: how often it is not, because with these names it learns most of all rates.
    """

    words: Counter[str]
    dominated: int
    fastest: int


def frontier(rows: Sequence[Row], rate: float, times: int) -> Swaps:
    """Verdicts on the second name of plain against plain's frontier, and what is said of its rate."""
    kept = [row for row in rows if row.arm in (PLAIN, BEFORE, NAME)]
    seeds = sorted({row.seed for row in kept})
    random = np.random.default_rng(0)
    words: Counter[str] = Counter()
    dominated = fastest = 0
    for _ in range(times):
        chosen = {seed for seed in seeds if random.random() < 0.5}
        found = judge_rows(swapped(kept, rate, chosen))
        words[found.primary[NAME].word] += 1
        dominated += rate in found.dominated
        new = found.measured.new.mean(0)
        fastest += rate not in found.dominated and found.measured.points[int(new.argmin())].rate == rate
    return Swaps(words, dominated, fastest)


def split(rows: Sequence[Row], arm: str, times: int) -> Counter[str]:
    """Verdicts on two halves of the seeds of one arm, or of plain at a rate, as if they were two arms."""
    name, _, rate = arm.partition("@")
    mine = [row for row in rows if row.arm == name and not (name == PLAIN and row.strength)]
    if rate:
        mine = [row for row in mine if row.learning_rate == float(rate)]
    frame = [row for row in rows if row.arm in (PLAIN, BEFORE)]
    seeds = sorted({row.seed for row in mine})
    half = len(seeds) // 2
    kept = [row for row in frame if row.seed in seeds[:half]]
    margin = default_margin(measured(frame))[0]
    random = np.random.default_rng(0)
    words: Counter[str] = Counter()
    for _ in range(times):
        drawn = [seeds[index] for index in random.permutation(len(seeds))]
        names = {seed: ("one", seeds[at]) for at, seed in enumerate(drawn[:half])}
        names |= {seed: ("two", seeds[at]) for at, seed in enumerate(drawn[half : 2 * half])}
        halves = [replace(row, arm=names[row.seed][0], seed=names[row.seed][1]) for row in mine if row.seed in names]
        words[compare_pair([*kept, *halves], "one", "two", margin=margin).word] += 1
    return words


def told(words: Counter[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in words.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aa", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help="train the second name first")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results of the study")
    parser.add_argument("--times", type=int, default=200, help="resamplings")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.out)
    both, study = (judging(path) for path in (AGAIN, arguments.results))
    sys.exit(1 if judged(both or study, study, arguments.times) else 0)


def judging(path: Path) -> list[Row]:
    """The rows of a file that are judged; none where it is missing."""
    return [row for row in read_results(path) if row.role != "selection"] if path.is_file() else []


def judged(rows: Sequence[Row], study: Sequence[Row], times: int) -> list[str]:
    """Print all figures; returns the limits that are missed.

    Args:
        rows: of plain and of the names that are plain.
        study: whose arms are split in two halves.
    """
    rate = next(row.learning_rate for row in rows if row.arm == NLL)
    assert rate is not None
    missed: list[str] = []

    def line(text: str, fine: bool) -> None:
        missed.extend([] if fine else [text])
        print(f"{text}{'' if fine else ': MISSED'}", flush=True)

    plain, arms = f"{PLAIN}@{rate:g}", [*dict.fromkeys(row.arm for row in rows)]
    for first in (each for each in (NAME, NLL) if each in arms):
        mine = [row for row in rows if row.arm in (PLAIN, BEFORE, first)]
        print(compare_pair(mine, first, plain).words())
        counts = Counter(resampled(mine, first, plain, times=times))
        line(f"  {times} swaps: {told(counts)}", counts[NO_EVIDENCE] >= LEAST * times)
    halves: Counter[str] = Counter()
    named = dict.fromkeys(row.arm for row in study)
    tried = [plain, *(arm for arm in named if arm not in (PLAIN, BEFORE, *BOUNDS))]
    for arm in tried:
        halves += split(study, arm, times)
    line(
        f"two halves of the seeds of one arm, {times} splits of each of {len(tried)}: {told(halves)}",
        halves[BETTER] + halves[WORSE] <= (1 - LEAST) * halves.total(),
    )
    if NAME in arms:
        by = judge_rows([row for row in rows if row.arm in (PLAIN, BEFORE)]).dominated.get(rate)
        line(f"plain at {rate:g} is dominated by {f'{by:g}' if by else 'no other rate'}", by is not None)
        found = frontier(rows, rate, times)
        # Where no rate beats it, because with these names it learns most, it is not dominated.
        kept = f"{found.dominated} of {times} swaps, and in {found.fastest} it learns most of all rates"
        line(f"  it is called dominated in {kept}", found.dominated + found.fastest == times)
        wrong = found.words[BETTER] + found.words[WORSE]
        line(f"{NAME} as an arm against plain's frontier: {told(found.words)}", wrong <= (1 - LEAST) * times)
    return missed


if __name__ == "__main__":
    main()
