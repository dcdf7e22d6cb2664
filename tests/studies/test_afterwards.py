"""What finished runs are asked afterwards: how soon the old comes back, how far they went on new data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.studies import afterwards, runner
from holdfast.studies.afterwards import answer_files
from holdfast.studies.graph import Cell
from holdfast.studies.records import COLUMNS, costs_file, read_rows, read_table
from holdfast.studies.results import read_results
from holdfast.studies.runner import Progress, work
from holdfast.studies.study import Choice
from holdfast.studies.verdict import judge_rows
from studies.tiny_study import STUDY, tiny

EMA = {"set": ["training.ema=0.5"], "weights": "ema"}
ASKED: dict[str, Any] = {"relearn": {"steps": 6, "every": 2}, "drift": True}


def silent(_: str) -> None:
    pass


def arms(**more: Any) -> dict[str, Any]:
    return {**STUDY["arms"], "EMA": EMA, **more}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Progress, list[str]]:
    """The results of a study that asked nothing, and the same study asked afterwards, without another step."""
    folder, out = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("runs")
    first = Progress(tiny(folder, arms=arms(), bounds=["joint"]), out)
    assert work(first, silent) == 0
    before = first.results.read_bytes()
    said: list[str] = []
    progress = Progress(tiny(folder, arms=arms(), bounds=["joint"], **ASKED), out)
    assert work(progress, said.append) == 0
    return before, progress, said


@pytest.mark.slow
def test_runs_that_are_finished_are_asked_and_their_results_stay_what_they_were(
    both: tuple[bytes, Progress, list[str]],
) -> None:
    before, progress, said = both
    assert all(line.endswith("relearn and drift") for line in said)
    assert len(said) == 5, "plain at two rates, replay, the average of plain's weights, the running average"
    lines = progress.results.read_text().splitlines()
    cut = [line.rsplit(",", len(afterwards.COLUMNS))[0] for line in lines]
    assert "\n".join(cut) + "\n" == before.decode()
    assert lines[0] == ",".join((*COLUMNS, *afterwards.COLUMNS))


@pytest.mark.slow
def test_only_the_ends_of_judged_runs_have_answers(both: tuple[bytes, Progress, list[str]]) -> None:
    rows = read_rows(both[1].results)
    asked = {(row["arm"], row["strength"], row["steps"]) for row in rows if row["new_kl"]}
    assert asked == {
        ("plain", "", "4"),
        ("replay 25 %", "", "4"),
        ("averaging", "0.5", "4"),
        ("EMA", "", "4"),
    }
    assert {bool(row["relearn_steps"]) == bool(row["relearned"]) == bool(row["new_kl"]) for row in rows} == {True}


@pytest.mark.slow
def test_slower_runs_go_less_far_and_halfway_back_is_nearer(both: tuple[bytes, Progress, list[str]]) -> None:
    rows = read_rows(both[1].results)
    far = {(row["arm"], row["learning_rate"]): float(row["new_kl"]) for row in rows if row["new_kl"]}
    assert 0 < far["plain", "0.0003"] < far["averaging", "0.003"] < far["plain", "0.003"]
    assert len({*far.values()}) == len(far)


@pytest.mark.slow
def test_the_losses_of_relearning_begin_where_the_run_ended(both: tuple[bytes, Progress, list[str]]) -> None:
    progress = both[1]
    for arm, weights in (("replay 25 %", "weights"), ("EMA", "ema")):
        run = next(run for run in progress.look().runs if run.cell.arm == arm)
        path = answer_files(progress.study.config, progress.folder / run.name, run.cell)["relearn"]
        told = json.loads(path.read_text())
        points = json.loads((progress.folder / run.name / "results.json").read_text())["points"]
        point = points[-1] if weights == "weights" else points[-1]["ema"]
        assert told["old"]["0"] == pytest.approx(point["scores"]["lists"]["bits_per_byte"], rel=1e-6)
        begun = next(point for point in points if point["step"] == 8)
        assert told["level"] == pytest.approx(begun["scores"]["lists"]["bits_per_byte"], rel=1e-6)
        assert told["back"] == (told["old"][str(told["steps"])] <= told["level"])
        assert told["steps"] in (0, 2, 4, 6)
        assert told["back"] or told["steps"] == 6


@pytest.mark.slow
def test_what_was_answered_is_not_asked_again_and_other_settings_are(
    both: tuple[bytes, Progress, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = both[1]
    monkeypatch.setattr(runner, "_train", lambda _, run, __: run.name and 130)
    assert work(Progress(tiny(tmp_path, arms=arms(), bounds=["joint"], **ASKED), progress.out), silent) == 0
    more = {**ASKED, "relearn": {"steps": 8, "every": 2}}
    assert work(Progress(tiny(tmp_path, arms=arms(), bounds=["joint"], **more), progress.out), silent) == 130


@pytest.mark.slow
def test_a_verdict_shows_the_answers_beside_its_words(both: tuple[bytes, Progress, list[str]]) -> None:
    found = judge_rows(read_results(both[1].results)).measured.arms["replay 25 %"].beside
    assert {"relearn_steps", "relearned", "new_kl", "step_seconds"} <= {*found}


@pytest.mark.slow
def test_results_that_only_a_file_has_keep_their_answers_and_costs(
    both: tuple[bytes, Progress, list[str]], tmp_path: Path
) -> None:
    known = tmp_path / "known.csv"
    shutil.copy(both[1].results, known)
    shutil.copy(costs_file(both[1].results), costs_file(known))
    study = tiny(tmp_path, arms=arms(), bounds=["joint"], results="known.csv", **ASKED)
    progress = Progress(study, tmp_path / "runs")
    assert work(progress, silent) == 0
    assert progress.results.read_bytes() == both[1].results.read_bytes()
    costs = read_table(costs_file(known))
    assert costs == read_table(costs_file(progress.results)) == read_table(costs_file(both[1].results))
    assert all(float(row["seconds"]) > 0 and "core" in row["machine"] for row in costs)


def test_bounds_and_selection_seeds_are_not_asked(tmp_path: Path) -> None:
    config = tiny(tmp_path, seeds={"selection": [1], "judging": [0]}, **ASKED).config
    assert [*answer_files(config, tmp_path, Cell("plain", Choice(), 0))] == ["relearn", "drift"]
    assert not answer_files(config, tmp_path, Cell("plain", Choice(), 1))
    assert not answer_files(config, tmp_path, Cell("joint", Choice(), 0))


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"relearn/every: got 0, expected at least 1"):
        tiny(tmp_path, relearn={"steps": 6, "every": 0})
