"""Budgets in whole runs: records, certificate, results and report; in a branch; exact after a stop; on own samples."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from benchmarks.keep import fresh_drift
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import UserError
from holdfast.report import write_report
from training import killing, tiny

JOB = "continual/train/abcd_kl"
FIRST, STEPS = 40, 96  # of the two stages
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 16 * 32 * FIRST, "data": [{"name": "lists", "style": "PMD"}]},
        {"tokens": 16 * 32 * STEPS, "data": [{"name": "arithmetic", "style": "PMD"}]},
    ],
    "training": {
        "batch_size": 16,
        "validation_steps": 64,
        "validation": False,
        "replay": {"rate": 0.5, "objective": "kl"},
    },
    "optimization": {"lr": 0.003, "schedule": "constant"},
    "eval": {"evaluations": []},
    "logging": {"report_interval": 1, "checkpoint_interval": 40, "validation_interval": 100, "rolling_checkpoints": 9},
    "keep": {"lists": 0.3},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("kept"))
    made.run()
    return made


def test_a_run_says_how_its_budget_was_steered_and_kept(kept: Any) -> None:
    run_dir = kept.spec.run_dir
    train = killing.train_records(run_dir)
    assert all("keep" not in record for record in train[:FIRST])
    multipliers = [record["keep"]["lists"]["multiplier"] for record in train[FIRST:]]
    assert multipliers[0] == 1
    assert len(set(multipliers)) > STEPS / 2
    assert int(kept.state.keep["lists"]["rows"]) == 8 * STEPS // 10
    results = json.loads((run_dir / "results.json").read_text())
    (budget,) = results["keep"]["budgets"]
    (proved,) = results["keep"]["certificates"]
    judged = budget["judged"]
    matrix = results["matrix"]["bits_per_byte"]
    column = results["tasks"].index("lists")
    assert judged["rise"] == pytest.approx(matrix[2][column] - matrix[1][column], abs=1e-6)
    assert judged["low"] < judged["rise"] < judged["high"]
    assert (budget["limit"], budget["since"], judged["on"]) == (0.3, FIRST, "held-out data")
    assert proved["control"]["lists"]["rise"] == pytest.approx(judged["rise"], abs=0.3)
    assert tiny.records(run_dir, "certificate")[0]["alpha"] == proved["alpha"]
    write_report(run_dir, pictures=False)
    page = (run_dir / "report.html").read_text()
    assert 'id="budgets"' in page
    assert "multiplier of old rows" in page
    assert "Budget " in page


def test_the_losses_that_a_budget_counts_from_are_those_at_the_boundary(kept: Any) -> None:
    """The difference of the first control row is of one step's change alone."""
    stored = np.asarray(kept.state.keep["lists"]["reference"])
    source = next(key for key in kept.plan.sources if key.name == "lists")
    count = kept.plan.control.size(source, 1)
    assert (stored[:count] > 0).all()
    assert (stored[count:] == 0).all()
    first = next(r["keep"]["lists"]["difference"] for r in killing.train_records(kept.spec.run_dir)[FIRST:]
                 if r["keep"]["lists"]["difference"] is not None)  # fmt: skip
    assert abs(first) < 1


def test_a_stopped_run_goes_on_to_the_same_end(kept: Any, tmp_path: Path) -> None:
    tiny.copy_until(kept, tmp_path, FIRST + 80)
    resumed = tiny.trainer(JOB, VALUES, tmp_path)
    resumed.run()
    tiny.same_state(resumed, kept)
    first, second = (json.loads((each.spec.run_dir / "results.json").read_text())["keep"] for each in (kept, resumed))
    assert first == second


@pytest.mark.slow
def test_a_branch_of_a_run_without_a_budget_has_one(kept: Any, tmp_path: Path) -> None:
    """Rows of the shared past are the same, so that the branch ends where the whole run does."""
    free = ("training.replay.objective=both", f"stages.1.tokens={16 * 32}")
    plain = tiny.trainer(JOB, {**VALUES, "keep": {}}, tmp_path, *free, name="plain")
    plain.run()
    parent = f"{plain.spec.run_dir}@boundary_1"
    branch = tiny.trainer(JOB, VALUES, tmp_path, name="branch", parent=parent)
    branch.run()
    tiny.same_state(branch, kept)


def test_a_budget_that_was_used_cannot_change(kept: Any, tmp_path: Path) -> None:
    tiny.copy_until(kept, tmp_path, FIRST + 80)
    for change in ("keep.lists=0.1", "keep.certify=true"):
        with pytest.raises(UserError, match="another past"):
            tiny.resume(tiny.trainer(JOB, VALUES, tmp_path, change))


def test_certify_steps_back_to_what_is_proved(kept: Any, tmp_path: Path) -> None:
    tiny.copy_until(kept, tmp_path, FIRST)
    made = tiny.trainer(JOB, VALUES, tmp_path, "keep.certify=true", "keep.lists=0.0001")
    made.run()
    (proved,) = tiny.records(made.spec.run_dir, "certificate")
    assert proved["alpha"] < 1
    assert proved["applied"]
    assert proved["control"]["lists"]["rise"] <= 0.0001


@pytest.mark.slow
def test_own_samples_have_a_budget_of_their_own(tmp_path: Path) -> None:
    replay = "training.replay={source: self, rate: 0.5, objective: kl}"
    made = tiny.trainer(JOB, {**VALUES, "keep": {"self": 0.05}}, tmp_path, replay)
    made.run()
    results = json.loads((made.spec.run_dir / "results.json").read_text())["keep"]
    (budget,) = results["budgets"]
    assert "no statement about any dataset" in budget["judged"]["note"]
    assert budget["judged"]["low"] > 0, "a divergence"
    last = killing.train_records(made.spec.run_dir)[-1]["keep"]["self"]
    # The running mean lags behind what all control samples show at the end, but is in the same unit.
    assert 0.2 < budget["judged"]["rise"] / last["difference"] < 5
    assert last["multiplier"] != 1
    assert fresh_drift(made) == pytest.approx(budget["judged"]["rise"], rel=0.5), "samples that steered nothing agree"


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end_on_four_devices(tmp_path: Path) -> None:
    config = tmp_path / "keep.yaml"
    config.write_text(yaml.safe_dump({"job": JOB, **VALUES, "keep": {"lists": 5.0}}))
    env = killing.environment(tmp_path / "cache", devices=4)
    env["PYTHONPATH"] = str(Path(sys.modules["holdfast"].__file__ or "").parents[1])
    mesh = ("topology.data=2", "topology.fsdp=2")
    short = (f"stages.0.tokens={32 * 32 * 4}", f"stages.1.tokens={32 * 32 * 44}", "training.batch_size=32")
    extra = (*mesh, *short, "training.evaluate=false", "logging.checkpoint_interval=10")
    whole = killing.finish(config, tmp_path / "whole", env, *extra)
    run_dir = tmp_path / "stopped" / "general" / "default" / "run"
    process = killing.start(config, tmp_path / "stopped", env, *extra)
    killing.wait_for(process, run_dir, 25)
    process.kill()
    process.communicate()
    killing.finish(config, tmp_path / "stopped", env, *extra)
    killing.assert_identical(whole, run_dir)


@pytest.mark.slow
def test_a_broken_budget_is_an_exit_code_also_of_a_finished_run(tmp_path: Path) -> None:
    config = tmp_path / "keep.yaml"
    config.write_text(
        yaml.safe_dump(
            {"job": JOB, **VALUES, "keep": {"lists": 1e-6}, "optimization": {"lr": 0.03, "schedule": "constant"}}
        )
    )
    command = ["run", str(config), "--out", str(tmp_path / "runs")]
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 3, done.output
        assert "Budget broken: lists +" in done.output
    assert "this run is finished" in done.output
