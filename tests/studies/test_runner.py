"""Working through a study: shared pasts once, nothing twice, the same rows however it was interrupted."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holdfast.errors import RunError, UserError
from holdfast.execution.files import write_json
from holdfast.studies import runner
from holdfast.studies.records import COLUMNS, RESULTS, read_rows
from holdfast.studies.runner import Progress, work
from studies.tiny_study import CONFIG, STUDY, tiny, write_study
from training.killing import environment

ARMS = STUDY["arms"]
SELF = {"set": ["training.replay={rate: 0.25, source: self}"]}


def silent(_: str) -> None:
    pass


def finish(study_folder: Path, out: Path, **changes: Any) -> Progress:
    """A study that is worked through in this process."""
    progress = Progress(tiny(study_folder, **changes), out)
    assert work(progress, silent) == 0
    return progress


def copied(progress: Progress, folder: Path) -> Path:
    """The runs of a study in another place."""
    return Path(shutil.copytree(progress.out, folder / "copied"))


def trained_steps(folder: Path) -> int:
    """Steps that were recorded in the folders of all runs, without those that a branch took over."""
    total = 0
    for path in folder.glob("*/metrics.jsonl"):
        steps = {
            record["step"] for record in map(json.loads, path.read_text().splitlines()) if record["kind"] == "train"
        }
        parent = json.loads((path.parent / "study.json").read_text())["parent"]
        total += len(steps) - (8 if parent else 0)
    return total


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Progress:
    """The study, uninterrupted: plain at 2 rates, replay, and an average that needs no run."""
    return finish(tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("runs"))


def test_the_first_stage_of_a_seed_is_trained_once(whole: Progress) -> None:
    runs = sorted(path.parent.name for path in whole.folder.glob("*/results.json"))
    assert runs == ["plain-x0.1-s0", "plain-x1-s0", "replay-25-x1-s0"]
    assert trained_steps(whole.folder) == 8 + 3 * 4


def test_rows_have_plains_rates_early_stops_and_interpolations(whole: Progress) -> None:
    rows = read_rows(whole.results)
    assert tuple(rows[0]) == COLUMNS

    def points(arm: str) -> set[tuple[str, str, str]]:
        return {(row["learning_rate"], row["strength"], row["steps"]) for row in rows if row["arm"] == arm}

    assert points("plain") == {
        (rate, *rest) for rate in ("0.0003", "0.003") for rest in (("", "2"), ("", "4"), ("0.5", "4"))
    }
    assert points("before") == {("", "", "0")}
    assert points("averaging") == {("0.003", "0.5", "4")}
    assert points("replay 25 %") == {("0.003", "", "2"), ("0.003", "", "4")}
    assert {row["task"] for row in rows} == {"lists"}
    replayed = next(row for row in rows if row["arm"] == "replay 25 %")
    assert (replayed["extra_rows"], replayed["new_tokens"], replayed["total_tokens"]) == ("8", "768", "1024")


def test_documents_weighed_by_their_bytes_are_the_loss_of_the_run(whole: Progress) -> None:
    rows = [row for row in read_rows(whole.results) if row["arm"] == "replay 25 %"]
    last = [row for row in rows if row["steps"] == "4"]
    results = json.loads((whole.folder / "replay-25-x1-s0" / "results.json").read_text())
    scores = results["points"][-1]["scores"]
    assert len({row["document"] for row in last}) == len(last) > 1
    weights = [float(row["bytes"]) for row in last]
    mean = sum(float(row["old"]) * weight for row, weight in zip(last, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(scores["lists"]["bits_per_byte"], rel=1e-6)
    assert float(last[0]["new"]) == pytest.approx(scores["arithmetic"]["bits_per_byte"], rel=1e-6)


def test_a_finished_study_trains_nothing_and_one_more_seed_and_arm_only_what_is_new(
    whole: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(runner, "_train", lambda _, run, __: begun.append(run.name) or 130)
    assert work(Progress(tiny(tmp_path), whole.out), silent) == 0
    assert begun == []
    more = {"seeds": [0, 2], "arms": {"self": SELF, **ARMS}}
    assert work(Progress(tiny(tmp_path, **more), whole.out), silent) == 130
    assert begun == ["self-x1-s0"]
    new = {run.name for run in Progress(tiny(tmp_path, **more), whole.out).look().pending}
    assert new == {"self-x1-s0", "plain-x1-s2", "plain-x0.1-s2", "replay-25-x1-s2", "self-x1-s2"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arms": {**ARMS, "replay 25 %": {"set": ["training.replay={rate: 0.5}"]}}}, "arms/replay 25 %: "),
        (
            {"arms": {**ARMS, "averaging": {**ARMS["averaging"], "set": ["training.z_loss=0.1"]}}},
            "arms/averaging: ",
        ),
        ({"config": {**CONFIG, "optimization": {"lr": 0.003, "schedule": "constant", "clip_norm": 0.5}}}, "plain: "),
    ],
)  # fmt: skip
def test_a_changed_arm_under_an_old_name_is_refused(whole: Progress, tmp_path: Path, changes: Any, told: str) -> None:
    before = whole.results.read_bytes()
    with pytest.raises(UserError) as caught:
        Progress(tiny(tmp_path, **changes), whole.out).look()
    assert f"tiny.yaml: {told}" in str(caught.value)
    assert "another name" in str(caught.value)
    assert whole.results.read_bytes() == before


def test_what_is_changed_is_named(whole: Progress, tmp_path: Path) -> None:
    arms = {**ARMS, "replay 25 %": {"set": ["training.replay={rate: 0.5}"]}}
    with pytest.raises(UserError, match=r"training/replay/rate: was 0.25, is 0.5"):
        Progress(tiny(tmp_path, arms=arms), whole.out).look()


def test_results_that_a_file_has_are_not_run_again(whole: Progress, tmp_path: Path) -> None:
    (tmp_path / "known.csv").write_bytes(whole.results.read_bytes())
    progress = Progress(tiny(tmp_path, results="known.csv"), tmp_path / "runs")
    assert work(progress, silent) == 0
    assert not [*progress.folder.glob("*/config.yaml")]
    assert progress.results.read_bytes() == whole.results.read_bytes()


def test_what_branches_from_a_run_that_only_a_file_remembers_has_it_trained_again(
    whole: Progress, tmp_path: Path
) -> None:
    (tmp_path / "known.csv").write_bytes(whole.results.read_bytes())
    state = Progress(tiny(tmp_path, results="known.csv", arms={**ARMS, "self": SELF}), tmp_path / "runs").look()
    assert {run.name for run in state.pending} == {"plain-x1-s0", "self-x1-s0"}


def test_a_run_whose_parent_was_deleted_owns_no_past_that_it_took_over(whole: Progress, tmp_path: Path) -> None:
    out = copied(whole, tmp_path)
    shutil.rmtree(out / "study" / "tiny" / "plain-x1-s0")
    state = Progress(tiny(tmp_path, arms={**ARMS, "self": SELF}), out).look()
    assert {run.name: run.parent for run in state.pending} == {"plain-x1-s0": None, "self-x1-s0": "plain-x1-s0"}


def test_a_run_that_fails_is_named_and_the_others_go_on(
    whole: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fail(_: Progress, run: Any, __: Any) -> int:
        if run.cell.seed == 7:
            raise RunError("the loss was not finite")
        raise AssertionError("everything else is finished")

    monkeypatch.setattr(runner, "_train", fail)
    assert work(Progress(tiny(tmp_path, seeds=[0, 7]), whole.out), said.append) == 1
    assert "plain-x1-s7: failed: the loss was not finite" in said
    assert any(line.startswith("plain-x0.1-s7: not run") for line in said)


def test_a_past_whose_checkpoints_are_gone_is_named_instead_of_waited_for(whole: Progress, tmp_path: Path) -> None:
    out, said = copied(whole, tmp_path), []
    shutil.rmtree(out / "study" / "tiny" / "plain-x1-s0" / "checkpoints")
    assert work(Progress(tiny(tmp_path, arms={**ARMS, "self": SELF}), out), said.append) == 1
    assert said == ["self-x1-s0: not run: the past that it shares, of plain-x1-s0, is not there"]


def test_weights_are_interpolated_with_those_that_arms_begin_with(tmp_path: Path) -> None:
    """Also where a run shares more than that with the run that it branches from."""
    progress = Progress(tiny(tmp_path), tmp_path)
    for name, parent, stage in (("a", None, 0), ("b", "a", 1), ("c", "b", 2)):
        write_json(progress.folder / name / runner.MADE_WITH, {"parent": parent, "branch_stage": stage, "digest": ""})
    assert {runner.beginning(progress, name) for name in "abc"} == {f"{progress.folder / 'a'}@boundary_1"}


def test_the_exit_code_of_a_kept_budget_counts_as_finished() -> None:
    assert 3 in runner.DONE


@pytest.mark.slow
def test_a_configuration_is_chosen_on_the_selection_seeds_and_judged_on_others(whole: Progress, tmp_path: Path) -> None:
    """Seeds 1 and 2 have the runs of seed 0, so that nothing is trained: shares of weights are the grid."""
    out = copied(whole, tmp_path)
    (out / "study" / "tiny" / "results.csv").unlink()
    for name in ("plain-x1", "plain-x0.1"):
        for seed in (1, 2):
            shutil.copytree(out / "study" / "tiny" / f"{name}-s0", out / "study" / "tiny" / f"{name}-s{seed}")
    arms = {"averaging": {"weights": "interpolated", "shares": [0.2, 0.9]}}
    progress = finish(tmp_path, out, seeds={"selection": [1, 2], "judging": [0]}, arms=arms)
    rows = [row for row in read_rows(progress.results) if row["arm"] == "averaging"]
    chosen = progress.look().chosen["averaging"]
    assert {row["strength"] for row in rows if row["seed"] == "1"} == {"0.2", "0.9"}
    assert {row["strength"] for row in rows if row["seed"] == "0"} == {f"{chosen.strength:g}"}
    assert {row["seed"]: row["role"] for row in rows} == {"1": "selection", "2": "selection", "0": ""}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_a_study_that_is_killed_again_and_again_ends_with_the_same_rows(
    whole: Progress, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, workers: int
) -> None:
    chance, killed, done = Random(workers), 0, None
    command = [sys.executable, "-m", "holdfast", "study", "run", str(write_study(tmp_path)), "--out", str(tmp_path)]
    command += ["--workers", str(workers)]
    env = environment(tmp_path_factory.getbasetemp() / "cache")
    while done != 0:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if killed < 4:
            time.sleep(chance.uniform(3, 9))
            process.send_signal(signal.SIGKILL)
            killed += 1
        _, errors = process.communicate()
        done = process.returncode
        assert done in (0, -signal.SIGKILL), errors.decode()[-2000:]
    folder = tmp_path / "study" / "tiny"
    assert (folder / RESULTS).read_bytes() == whole.results.read_bytes()
    assert trained_steps(folder) == trained_steps(whole.folder)
