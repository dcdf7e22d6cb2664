"""`holdfast study`: plan, status, and how mistakes end."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.study import _waves
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.studies.graph import Graph
from holdfast.studies.records import COST_COLUMNS, FINISHED, write_rows
from holdfast.studies.runner import MADE_WITH
from studies.tiny_study import tiny, write_study


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["study", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_plan_shows_runs_shared_steps_and_what_is_chosen_later(tmp_path: Path) -> None:
    arms = {
        "averaging": {"weights": "interpolated", "shares": [0.2, 0.9]},
        "replay": {"set": ["training.replay={rate: 0.25}"]},
    }
    path = write_study(tmp_path, seeds={"selection": [8, 9], "judging": [0, 1]}, arms=arms)
    shown = said("plan", str(path), "--out", str(tmp_path / "runs"))
    assert "10 runs, 72 steps; one by one from scratch 120: × 0.60" in shown
    assert "of: averaging (2)" in shown
    assert "left: 10 runs, 72 steps; how long they take is told after the first" in shown
    assert not (tmp_path / "runs").exists()


def test_the_plan_tells_how_long_is_left_by_the_clocks_of_what_was_run(tmp_path: Path) -> None:
    study = tiny(tmp_path, arms={"replay": {"set": ["training.replay={rate: 0.25}"]}})
    costs = {"arm": "plain", "learning_rate": "0.003", "seconds": "20", "step_seconds": "0.5", "run": "plain-x1-s0"}
    folder = study.folder(tmp_path / "runs")
    write_rows(folder / "costs.csv", [dict.fromkeys(COST_COLUMNS, "") | {**costs, "seed": "0"}], COST_COLUMNS)
    shown = said("plan", str(study.path), "--out", str(tmp_path / "runs"))
    # 20 steps and, of the run of 12 steps in 20 s, 14 s that are no step's for each of 3 runs.
    assert "left: 3 runs, 20 steps, about 1 min at 0.500 s a step and 14.0 s a run in one process" in shown


def test_status_names_what_is_missing_and_where_results_will_be(tmp_path: Path) -> None:
    shown = said("status", str(write_study(tmp_path)), "--out", str(tmp_path / "runs"))
    assert "tiny: 0 of 3 runs are finished" in shown
    assert "replay-25-x1-s0" in shown
    assert "holdfast board" in shown


def test_a_finished_run_that_is_asked_for_more_is_not_counted_as_steps_to_train(tmp_path: Path) -> None:
    study = tiny(tmp_path, drift=True)
    graph = Graph(study)
    run = graph.runs(graph.judging({}))[0]
    folder = study.folder(tmp_path / "runs") / run.name
    write_json(folder / MADE_WITH, {"digest": run.digest, "parent": None, "branch_stage": 0})
    write_json(folder / FINISHED, {"finished": True})
    shown = said("plan", str(study.path), "--out", str(tmp_path / "runs"))
    assert "left: 2 runs, 8 steps" in shown
    assert "1 finished runs are to be measured afterwards" in shown
    assert "to be measured" in said("status", str(study.path), "--out", str(tmp_path / "runs"))


def test_a_mistake_in_the_study_is_a_user_error(tmp_path: Path) -> None:
    path = write_study(tmp_path, old=[])
    with pytest.raises(UserError, match="old: got"):
        CliRunner().invoke(app, ["study", "run", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            ["--only", "replay-s0"],
            "tiny.yaml: --only: got 'replay-s0', expected the name of a run, such as replay-25-x1",
        ),
        (["--only", "plain-x1-s0", "--workers", "2"], "--only: not with --workers or --slurm"),
        (["--only", "plain-x1-s0", "--slurm"], "--only: not with --workers or --slurm"),
    ],
)
def test_names_of_runs_that_are_none_or_without_effect_are_refused(tmp_path: Path, more: list[str], named: str) -> None:
    path = write_study(tmp_path)
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(
            app, ["study", "run", str(path), "--out", str(tmp_path / "r"), *more], catch_exceptions=False
        )
    assert named in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_jobs_of_an_array_wait_for_those_they_branch_from(tmp_path: Path) -> None:
    graph = Graph(tiny(tmp_path, seeds=[0, 1]))
    runs = graph.runs(graph.judging({}))
    first, second = _waves(runs)
    assert {run.name for run in first} == {"plain-x1-s0", "plain-x1-s1"}
    assert {run.parent for run in second} == {run.name for run in first}
    assert len(first) + len(second) == len(runs)
    assert _waves(second) == [second], "a parent that is there already is not waited for"
