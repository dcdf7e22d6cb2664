"""Files of a run as others may have left them: read in one pass, thinned, made to fit."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign.looks import tried
from benchmarks.campaign.malformed import KNOWN, damaged, damages

from fake_runs import FakeRun
from holdfast.report import open_run, records
from holdfast.report.page import render
from holdfast.report.records import halved, parse, parse_yaml, read_records
from holdfast.report.series import Column

SLICE = (
    "lock is a pipe", "metrics.jsonl has every bad line", "config.yaml has other sections", "evaluations are pipes",
    "a matrix of other sizes", "config.yaml repeats itself", "config.yaml is nested in dashes", "a manifest is a pipe",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FakeRun(tmp_path_factory.mktemp("runs") / "good", stages=2, steps=12, probes=False).go().path


def train(step: int, **values: Any) -> Any:
    return {"kind": "train", "step": step, "tokens": 8 * step, "seconds": {"compute": 0.5}, "skipped": 1, **values}


def write(path: Path, lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("name", SLICE)
def test_damaged_runs_are_shown_or_refused_in_a_line(good: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(good, tmp_path / "good")
    damaged(good, tmp_path / "bad", KNOWN[name])
    assert [found for found in tried(tmp_path / "good", tmp_path / "bad") if not found[2]] == []


@pytest.mark.slow
def test_all_damaged_runs_are_shown_or_refused_in_a_line(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "good")
    failed = []
    for name, damage in itertools.islice(damages(), len(KNOWN) + 40):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        damaged(good, tmp_path / "bad", damage)
        failed += [(name, *found) for found in tried(tmp_path / "good", tmp_path / "bad") if not found[2]]
    assert failed == []


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", [train(1), "no record", "[1]", '{"kind": "train"}', train(2), "{"])
    path.write_text(path.read_text() + '{"torn": ')
    found = read_records(path)
    assert [record["step"] for record in found.records] == [1, 2]
    assert (found.num_bad, found.first_bad) == (4, 2)
    assert "4 lines" in found.problem


def test_a_line_without_an_end_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK", 64)
    monkeypatch.setattr(records, "LONGEST", 256)
    found = read_records(write(tmp_path / "metrics.jsonl", [train(1), "x" * 3000, train(2)]))
    assert [record["step"] for record in found.records] == [1, 2]
    assert (found.num_bad, found.first_bad) == (1, 2)


def test_thinned_records_keep_sums_and_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT", {"train": 50, "validation": 50, "evaluation": 5})
    lines = [train(step, loss=9.0 if step == 777 else 1.0 + step % 7, memory=step) for step in range(1, 2001)]
    points = [
        {"kind": "evaluation", "step": step, "tokens": 8 * step, "row": step if step < 20 else None, "scores": {}}
        for step in range(300)
    ]
    found = read_records(write(tmp_path / "metrics.jsonl", [*lines, *points]))
    kept = [record for record in found.records if record["kind"] == "train"]
    assert len(kept) <= 100
    assert sum(record["seconds"]["compute"] for record in kept) == 1000.0
    assert sum(record["skipped"] for record in kept) == 2000
    assert max(record["memory"] for record in kept) == 2000
    assert {record["loss"] for record in kept} >= {1.0, 9.0}
    assert (kept[0]["step"], kept[-1]["step"]) == (1, 2000)
    rows = [record["row"] for record in found.records if record["kind"] == "evaluation" and "row" in record]
    assert rows == list(range(20))


def test_short_runs_are_read_whole(good: Path) -> None:
    lines = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    found = read_records(good / "metrics.jsonl")
    key = lambda record: (record["step"], record["kind"], record.get("at", ""))  # noqa: E731
    dropped = [{name: value for name, value in line.items() if value is not None} for line in lines]
    assert [{name: value for name, value in record.items() if value is not None}
            for record in sorted(found.records, key=key)] == sorted(dropped, key=key)  # fmt: skip


def test_long_files_are_sampled_and_say_so(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PARSED", 100)
    run = tmp_path / "long"
    shutil.copytree(good, run)
    others = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' not in line]
    write(run / "metrics.jsonl", [*(train(step, loss=2.0, rows={"stories": 8}) for step in range(1, 1001)), *others])
    opened = open_run(run)
    assert opened.every > 1
    assert abs(sum(record["seconds"]["compute"] for record in opened.kind("train")) / 500 - 1) < 0.05
    assert opened.kind("train")[-1]["step"] == 1000
    assert f"1 of {opened.every} train records" in render(opened)
    brief = open_run(run, curves=False)
    assert [record["step"] for record in brief.kind("train")] == [1, 1000]
    assert len(brief.points) == len(opened.points)


def test_values_of_other_types_count_as_not_measured() -> None:
    line = {"kind": "evaluation", "step": 3.0, "scores": {"a": {"nll": "x", "accuracy": None}, "b": 3}, "row": "1"}
    assert parse(json.dumps(line)) == {
        "kind": "evaluation",
        "step": 3,
        "tokens": 0,
        "scores": {"a": {"accuracy": None}, "b": {}},
    }
    assert parse('{"kind": "train", "step": 1, "loss": 1e999, "stage": -1}') == {
        "kind": "train", "step": 1, "tokens": 0, "loss": None,
    }  # fmt: skip


def test_halving_keeps_the_first_and_the_last() -> None:
    kept = halved([train(step, loss=float(step)) for step in range(103)])
    assert (kept[0]["step"], kept[-1]["step"]) == (0, 102)
    assert len(kept) <= 28


def test_configs_as_no_run_writes_them_are_not_parsed() -> None:
    assert parse_yaml(b"a: {b: [1, 2]}") == {"a": {"b": [1, 2]}}
    for text in (b"[" * 50_000, b"- " * 50_000, b"{a: " * 50_000, b"a: &x [1]\nb: [*x]\n", b"a: [", b"\xff\xfe\x00"):
        assert parse_yaml(text) is None


def test_a_column_forgets_what_a_resumed_run_takes_again() -> None:
    column = Column()
    for step in (1, 2, 3, 2, 3, 4):
        column.add(8 * step, step, 10 * step)
    assert list(column.step) == [1, 2, 3, 4]
