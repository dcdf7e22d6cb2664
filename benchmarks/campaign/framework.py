"""Tries, their outcomes, and the counts of them that are kept between sessions."""

import csv
import importlib
import os
import pkgutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "campaign"
SCRATCH = "HOLDFAST_CAMPAIGN_SCRATCH"  # the folder of a part, for its process
COLUMNS = ("seed", "what", "outcome", "held", "count")
POSITION = "(next)"  # in the place of `what`: how many tries of a seed were made


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Args:
        what: what the fault was done to, in few words; counts are by it.
        how: how it held (`noticed`, `identical`), or what went wrong.
        held: nothing was lost and nothing silent.
    """

    what: str
    how: str
    held: bool = True


@dataclass(frozen=True)
class Try:
    """One fault that can be tried.

    Args:
        name: says exactly what is done, so that a finding can be done again.
        act: does it.
    """

    name: str
    act: Callable[[], Outcome | Iterable[Outcome]]


@dataclass
class Counts:
    """The counts of a part, as its file holds them."""

    path: Path
    outcomes: Counter[tuple[int, str, str, bool]] = field(default_factory=Counter)
    position: Counter[int] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> "Counts":
        """The counts in a file, none where there is no file."""
        counts = cls(path)
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    seed, number = int(row["seed"]), int(row["count"])
                    if row["what"] == POSITION:
                        counts.position[seed] = number
                    else:
                        counts.outcomes[seed, row["what"], row["outcome"], row["held"] == "yes"] += number
        return counts

    def add(self, seed: int, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of one more try."""
        for outcome in outcomes:
            self.outcomes[seed, outcome.what, outcome.how, outcome.held] += 1
        self.position[seed] += 1

    def write(self) -> None:
        """Write the file, whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            [seed, what, how, "yes" if held else "no", count]
            for (seed, what, how, held), count in sorted(self.outcomes.items())
        ]
        rows += [[seed, POSITION, "", "", count] for seed, count in sorted(self.position.items())]
        scratch_file = self.path.with_suffix(".new")
        with scratch_file.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, *rows])
        scratch_file.replace(self.path)

    def totals(self) -> tuple[int, int]:
        """How many faults were tried, and how many of them held."""
        tried = sum(self.outcomes.values())
        return tried, sum(count for (_, _, _, held), count in self.outcomes.items() if held)


def part_names() -> list[str]:
    """The names of all parts."""
    from benchmarks.campaign import parts

    return sorted(module.name for module in pkgutil.iter_modules(parts.__path__) if not module.name.startswith("_"))


def part(name: str) -> ModuleType:
    """The module of a part."""
    return importlib.import_module(f"benchmarks.campaign.parts.{name}")


def scratch() -> Path:
    """The folder of the part that runs in this process."""
    if SCRATCH not in os.environ:
        os.environ[SCRATCH] = tempfile.mkdtemp(prefix="holdfast-campaign-")
    folder = Path(os.environ[SCRATCH])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_tries(
    tries: Iterator[Try],
    counts: Counts,
    seed: int,
    *,
    most: int | None = None,
    minutes: float | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Do what has not been done yet, in order; counts are written as it goes.

    Args:
        most: tries in this session.
        minutes: of this session, at most; what has begun is ended.
    """
    started, done = time.monotonic(), 0
    before = counts.position[seed]
    for number, each in enumerate(tries):
        if number < before:
            continue
        if (most is not None and done >= most) or (minutes is not None and time.monotonic() - started > 60 * minutes):
            break
        outcomes = list(_outcomes(each, say))
        for outcome in outcomes:
            if not outcome.held:
                say(f"FINDING: {each.name}: {outcome.how}")
        counts.add(seed, outcomes)
        counts.write()
        done += 1


def _outcomes(each: Try, say: Callable[[str], object]) -> Iterable[Outcome]:
    try:
        found = each.act()
        return [found] if isinstance(found, Outcome) else list(found)
    except Exception as error:  # of the part or of what it tries: a finding either way
        say(traceback.format_exc())
        return [Outcome(each.name, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}", held=False)]
