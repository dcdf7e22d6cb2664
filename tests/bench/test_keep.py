"""The measurements of budgets and of self-replay: rows that are taken up again, and what they say."""

import json
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
    return {**facts, "rise": 0.2, "documents": 9, "new": 2.0, "control": 0.01, "fresh": 0.01, "alpha": 1.0, **measured}


def test_what_has_its_row_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "keep.csv"
    monkeypatch.setattr(keep.known, "__defaults__", (results,))
    every = list(keep.missing())
    assert len(every) == 2 * (20 + 3 * 20 + 5 * 2 + 2 * 3 * 20)
    assert len({(name, arm.name, arm.value, arm.length.steps, seed) for name, arm, seed in every}) == len(every)
    keep.append(row("plain", 0.0, 0, steps=keep.LONG.steps), results)
    keep.append(row("keep", 0.05, 0, steps=keep.LONG.steps, rise=0.04), results)
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


def test_documents_are_split_anew_and_none_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "SHARED", tmp_path)
    for split, numbers in (("train", range(20)), ("validation", range(20, 30))):
        path = tmp_path / "data" / "old" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"document {number:02} and more"}) + "\n" for number in numbers))
    sources = keep.write_split(keep.Curriculum("old", "new", 1.0, 8, 12, 11), tmp_path / "made")
    held_out, replayed, first = (
        [json.loads(line)["text"] for line in Path(sources[name][split]).read_text().splitlines()]
        for name, split in (("old", "validation"), ("old", "path"), ("first", "path"))
    )
    assert (len(held_out), len(replayed), len(first)) == (8, 12, 22)
    assert len({*held_out, *replayed}) == 20
    assert {*replayed} <= {text[:11] for text in first}
    assert not {*held_out} & {text[:11] for text in first}
    assert any(text >= "document 20" for text in replayed), "documents of both splits are mixed"


@pytest.mark.parametrize("arm", ["plain", "real", "self"])
def test_only_the_arm_of_real_rows_draws_old_data(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "write_split", lambda *_: {"tinystories": {"path": "a.jsonl", "validation": "b.jsonl"}})
    values, overrides = self_replay.options(arm, 0.5, 0, tmp_path)
    drawn = {each["name"] for stage in values["stages"] for each in stage["data"]}
    assert ("tinystories" in drawn) == (arm == "real")
    assert values["eval"]["held_out"] == ([] if arm == "real" else ["tinystories"])
    assert any("source: self" in each for each in overrides) == (arm == "self")


def test_the_ratio_of_two_means_has_an_interval() -> None:
    ratio, low, high = self_replay.fieller([1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0])
    assert ratio == pytest.approx(0.5)
    assert 0.46 < low < ratio < high < 0.54
    assert self_replay.fieller([1.0, 1.1], [0.3, -0.1])[1:] == (float("-inf"), float("inf"))
