"""Writes docs/leaderboard.md from the results of the studies in examples/studies/results, and from nothing else.

python tools/leaderboard.py           # write it
python tools/leaderboard.py --check   # exit 1 when it is not current

The verdicts are those of `holdfast verdict FILE --json`; means, costs and the gap to joint training are read from the
same file.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from holdfast.evaluation.statistics import student
from holdfast.studies.records import Row, read_rows
from holdfast.studies.study import BEFORE, BOUNDS, PLAIN

ROOT = Path(__file__).resolve().parents[1]
STUDIES, TARGET = ROOT / "examples" / "studies", ROOT / "docs" / "leaderboard.md"
Key = tuple[str, str, str, str, int]  # arm, seed, learning rate, strength, steps
INTRODUCTION = """# Which way keeps the most?

Written by `python tools/leaderboard.py` from `examples/studies/results/*.csv`, which
`holdfast study run examples/studies/*.yaml` writes; do not edit it by hand.

An arm is compared with the best that plain training does **while learning as much**: five learning rates or more, early
stopping, interpolation with the snapshot. Δ is how many bits per byte of the old text it keeps more than that, with its
interval adjusted for all arms of the table. Where an arm has a grid, one configuration was chosen on other seeds. Lower
losses are better. "Worst" is the largest old loss that was measured during the new stages.
"""


def judged(path: Path) -> dict[str, Any]:
    """The verdict on a file of results."""
    command = [sys.executable, "-m", "holdfast", "verdict", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{path}: {done.stderr.strip() or done.stdout.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spread(values: Sequence[float]) -> str:
    """Mean, and half of its 95 % interval over seeds.

    >>> spread([1.0, 1.0])
    '1.000 ± 0.000'
    """
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    half = student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def points(rows: Iterable[Row]) -> dict[Key, tuple[float, dict[str, float]]]:
    """New loss, and old loss of each task, of every measured point; documents weigh as many as they have bytes."""
    sums: dict[Key, tuple[float, dict[str, list[float]]]] = {}
    for row in rows:
        key = (row["arm"], row["seed"], row["learning_rate"], row["strength"], int(row["steps"] or 0))
        size = float(row["bytes"] or 1)
        total = sums.setdefault(key, (float(row["new"]), {}))[1].setdefault(row["task"], [0.0, 0.0])
        total[0], total[1] = total[0] + float(row["old"]) * size, total[1] + size
    return {key: (new, {task: top / size for task, (top, size) in old.items()}) for key, (new, old) in sums.items()}


class Table:
    """The rows of a study's judging seeds, by arm and seed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row["role"] != "selection"]
        self.runs = len({(row["arm"], row["seed"], row["learning_rate"], row["strength"]) for row in rows})
        self.points = {key: (sum(old.values()) / len(old), new) for key, (new, old) in points(self.rows).items()}

    def arms(self) -> list[str]:
        """Arms in the order of the file."""
        return [*dict.fromkeys(row["arm"] for row in self.rows if row["arm"] not in (BEFORE, PLAIN, *BOUNDS))]

    def ends(self, arm: str, rate: str | None = None) -> dict[str, tuple[float, float]]:
        """Old and new loss at the end, by seed."""
        last: dict[str, tuple[int, tuple[float, float]]] = {}
        for (name, seed, own, strength, steps), point in self.points.items():
            wanted = name == arm and rate in (None, own) and not (name == PLAIN and strength)
            if wanted and steps >= last.get(seed, (-1, (0.0, 0.0)))[0]:
                last[seed] = (steps, point)
        return {seed: point for seed, (_, point) in last.items()}

    def worst(self, arm: str) -> list[float]:
        """The largest old loss during the new stages, by seed."""
        seeds: dict[str, float] = {}
        for (name, seed, *_), (old, _new) in self.points.items():
            if name == arm:
                seeds[seed] = max(seeds.get(seed, old), old)
        return [*seeds.values()]

    def value(self, arm: str, column: str) -> str:
        """What a column says of an arm."""
        found = {row[column] for row in self.rows if row["arm"] == arm}
        return ", ".join(sorted(found)) if any(found) else "–"


def section(name: str, path: Path) -> str:
    """The tables of one study, in words first."""
    table, verdict = Table(read_rows(path)), judged(path)
    lines = [f"## {name}", ""]
    for arm, found in verdict["arms"].items():
        lines.append(f"- {sentence(arm, found)}")
    lines += ["", "| arm | verdict | Δ | learned new | kept old | worst | strength, rate | old rows | gap to joint |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    joint = table.ends("joint")
    before = table.ends(BEFORE)
    lines.append(f"| before | | | {_ends(before, 1)} | {_ends(before, 0)} | | | | |")
    rates = sorted({row["learning_rate"] for row in table.rows if row["arm"] == PLAIN}, key=float)
    for rate in rates:
        ends = table.ends(PLAIN, rate)
        lines.append(f"| plain | | | {_ends(ends, 1)} | {_ends(ends, 0)} | | {rate} | 0 | {_gap(ends, joint)} |")
    for arm in table.arms():
        found, ends = verdict["arms"].get(arm, {}), table.ends(arm)
        chosen = f"{table.value(arm, 'strength')}, {table.value(arm, 'learning_rate')}"
        lines.append(
            f"| {arm} | {found.get('verdict', '–')} | {_interval(found)} | {_ends(ends, 1)} | {_ends(ends, 0)} | "
            f"{spread(table.worst(arm))} | {chosen} | {table.value(arm, 'extra_rows')} | {_gap(ends, joint)} |"
        )
    for bound in BOUNDS:
        ends = table.ends(bound)
        if ends:
            lines.append(f"| {bound} (a bound) | | | {_ends(ends, 1)} | {_ends(ends, 0)} | | | | |")
    lines += [
        "",
        f"{table.runs} measured configurations and seeds stand behind this table; {len(before)} judging seeds.",
    ]
    return "\n".join(lines)


def sentence(arm: str, found: dict[str, Any]) -> str:
    """A verdict in words."""
    word, delta, mde = found["verdict"], found.get("delta"), found.get("mde")
    if delta is None:
        return f"**{arm}**: {word}"
    told = f"**{arm}**: {word}; keeps {_interval(found)} bits per byte more than plain"
    return told + (f"; an effect of {mde:.3f} would have been seen" if word == "no evidence" and mde else "")


def _interval(found: dict[str, Any]) -> str:
    if found.get("delta") is None:
        return "–"
    return f"{found['delta']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _ends(ends: dict[str, tuple[float, float]], index: int) -> str:
    return spread([point[index] for point in ends.values()])


def _gap(ends: dict[str, tuple[float, float]], joint: dict[str, tuple[float, float]]) -> str:
    """Old loss above that of training on all data mixed, paired by seed."""
    return spread([ends[seed][0] - joint[seed][0] for seed in ends if seed in joint])


def page() -> str:
    """The whole page; studies without results are named."""
    parts, missing = [INTRODUCTION], []
    for study in sorted(STUDIES.glob("*.yaml")):
        path = STUDIES / "results" / f"{study.stem}.csv"
        if path.exists():
            parts.append(section(study.stem, path))
        else:
            missing.append(study.stem)
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not current")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
