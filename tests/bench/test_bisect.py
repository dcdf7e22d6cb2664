"""The measurement of `holdfast bisect`: rows that are taken up again, and what they say."""

from pathlib import Path
from typing import Any

from benchmarks import bisect


def row(kind: str, seed: int, **measured: Any) -> dict[str, Any]:
    """A row of the results."""
    found = {"verdict": "rows", "holds": 1, "candidates": 512, "precision_at_8": 0.75, "undone": 0.8, "deviations": 9.0}
    return {"kind": kind, "seed": seed, **found, "dose": 6.0, **measured}


def test_what_has_its_row_is_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "bisect.csv"
    every = list(bisect.missing(results))
    assert len({*every}) == 10 + 40
    assert [kind for kind, _ in every[:5]].count("poisoned") == 1
    bisect.append(row("clean", 1000, verdict="kept"), results)
    bisect.append(row("poisoned", 10), results)
    assert len(list(bisect.missing(results))) == 48
    assert [each["kind"] for each in bisect.known(results)] == ["poisoned", "clean"]


def test_an_alarm_in_a_clean_run_is_named(tmp_path: Path) -> None:
    results = tmp_path / "bisect.csv"
    bisect.append(row("poisoned", 0), results)
    bisect.append(row("poisoned", 1, verdict="kept", holds=0, candidates=300, precision_at_8=""), results)
    bisect.append(row("clean", 1000), results)
    bisect.append(row("clean", 1001, verdict="evenly"), results)
    said = "\n".join(bisect.summary(results))
    assert "poisoned: 2 runs; rows accused in 1; the interval holds the poison in 1; precision at 8 is at least" in said
    assert "clean: 2 runs; rows accused in 1 (seeds 1000)" in said


def test_the_poison_is_where_the_plan_draws(tmp_path: Path) -> None:
    rows = bisect.written(tmp_path, 0)
    other = bisect.written(tmp_path, 0, {5: "?"})
    assert [index for index, (one, two) in enumerate(zip(rows, other, strict=True)) if one != two] == [5]
    assert all(250 <= bisect.poisoned_step(seed) < 340 for seed in bisect.POISONED)
