"""The measurements of budgets and of self-replay: rows that are taken up again, and what they say."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks import keep, self_replay


def row(arm: str, value: float, seed: int, **measured: Any) -> dict[str, Any]:
    """A row of the results."""
    facts = {
        "curriculum": "stories",
        "arm": arm,
        "value": value,
        "seed": seed,
        "steps": 1,
        "lr": 1,
        "low": 0,
        "high": 0,
    }
    return {**facts, "rise": 0.2, "documents": 9, "new": 2.0, "control": 0.01, "alpha": 1.0, **measured}


def test_what_has_its_row_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "keep.csv"
    monkeypatch.setattr(keep.known, "__defaults__", (results,))
    every = list(keep.missing())
    assert len(every) == 2 * (20 + 3 * 20 + 5 * 2 + 3 * 20)
    assert len({(name, arm.name, arm.value, seed) for name, arm, seed in every}) == len(every)
    keep.append(row("plain", 0.0, 0), results)
    keep.append(row("keep", 0.05, 0, rise=0.04), results)
    left = list(keep.missing())
    assert len(left) == len(every) - 2


def test_a_budget_counts_where_it_is_exceeded_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "keep.csv"
    monkeypatch.setattr(keep.known, "__defaults__", (results,))
    for seed, rise in enumerate((0.2, 0.3, 0.01)):
        keep.append(row("plain", 0.0, seed, rise=rise), results)
    for seed, rise in enumerate((0.04, 0.06, 0.01)):
        keep.append(row("keep", 0.05, seed, rise=rise), results)
    keep.append(row("fixed", 1.0, 100, rise=0.04, new=2.1), results)
    keep.append(row("fixed", 0.1, 100, rise=0.4, new=1.1), results)
    line = next(line for line in keep.summary() if "keep 0.05" in line)
    assert "2 runs, 1 broken (50%), median use 100%" in line
    assert "best fixed weight on other seeds 1 with new loss 2.100" in line


def test_the_ratio_of_two_means_has_an_interval() -> None:
    ratio, low, high = self_replay.fieller([1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0])
    assert ratio == pytest.approx(0.5)
    assert 0.46 < low < ratio < high < 0.54
    assert self_replay.fieller([1.0, 1.1], [0.3, -0.1])[1:] == (float("-inf"), float("inf"))
