"""What a subclass overrides is obeyed by plan, run, resume, eval and report."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from holdfast.analysis.plan import plan_run
from holdfast.cli.eval import eval_command
from holdfast.errors import UserError
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.methods.dft import ASFT, DFT, ASFTConfig, DFTConfig
from holdfast.report import write_report
from holdfast.report.timeline import read_curriculum
from holdfast.training.resolve import read_options, resolve_options
from holdfast.training.runs import open_run
from training import own_trainer, tiny
from training.killing import train_records

JOB = "own/train/everything"
VALUES = {key: value for key, value in tiny.CONTINUAL.items() if key != "eval"} | {"eval": {"evaluations": ["lists"]}}
STAGES = tiny.CONTINUAL["stages"]
VALUES["stages"] = [{k: v for k, v in stage.items() if k != "overlap"} for stage in STAGES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("own"))
    trainer.run()
    return trainer


def test_the_plan_asks_the_class() -> None:
    plan = plan_run(tiny.resolved(JOB, VALUES))
    assert plan["fades"][0]["overlap_tokens"] > 0, "the class's own curriculum fades"
    assert plan["steps"]["learning_rate"] == pytest.approx([own_trainer.OWN_RATE] * plan["total_steps"])
    assert plan["estimated_memory"]["optimizer"] == 0, "plain gradient descent remembers nothing"
    assert any("overrides batch()" in warning for warning in plan["warnings"])
    assert plan["methods"] == {"half": [1]}


def test_the_run_trains_with_all_of_them(whole: Any) -> None:
    records = train_records(whole.spec.run_dir)
    assert [record["learning_rate"] for record in records] == pytest.approx([own_trainer.OWN_RATE] * len(records))
    assert whole.resolved.curriculum.fade_steps(0)[0] < whole.resolved.curriculum.stage_start(1)
    assert int(whole.state.memory["half"]["seen"]) == whole.resolved.curriculum.total_steps - 8
    results = json.loads((whole.spec.run_dir / "results.json").read_text())
    assert {task for point in results["points"] for task in point["scores"]} == {"lists"}
    manifest = list_checkpoints(whole.checkpoint_dir)[-1].manifest
    assert manifest["memory"] == ["half"]


def test_the_loop_trains_on_batch(whole: Any, tmp_path: Path) -> None:
    """Another order of rows in a batch gives the same loss but for rounding; a masked batch another one."""

    class Masked(own_trainer.OwnTrainer):
        def batch(self, slice: str = "train", step: int | None = None) -> Any:
            planned = super().batch(slice, step)
            kept = planned.y.copy()
            kept[:, : kept.shape[1] // 2] = -1
            return planned._replace(y=kept)

    trainer = tiny.trainer(JOB, VALUES, tmp_path)
    trainer.__class__ = Masked
    trainer.run()
    ours, theirs = train_records(trainer.spec.run_dir), train_records(whole.spec.run_dir)
    assert ours[0]["loss"] != theirs[0]["loss"]


def test_a_resumed_run_comes_to_the_same_end(whole: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(whole.spec.run_dir, run_dir)
    for info in list_checkpoints(run_dir / "checkpoints")[-1:]:
        shutil.rmtree(info.path)
    resumed = tiny.trainer(JOB, VALUES, tmp_path)
    resumed.run()
    for one, two in zip(jax.tree.leaves(resumed.state.arrays()), jax.tree.leaves(whole.state.arrays()), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_eval_and_report_ask_the_class(whole: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = whole.spec.run_dir
    eval_command(run_dir, as_json=True)
    assert set(json.loads(capsys.readouterr().out)) == {"lists"}
    assert open_run(run_dir).resolved().curriculum == whole.resolved.curriculum
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert read_curriculum(JOB, config) == whole.resolved.curriculum
    page = write_report(run_dir).read_text()
    assert "overrides <code>batch()</code>" in page


class Anchored(own_trainer.OwnTrainer):
    """Has methods that no option lists, of which one looks back."""

    MORE = False

    @classmethod
    def methods(cls, options: Any) -> Any:
        more = {"dft": DFT(DFTConfig())} if cls.MORE else {}
        return {"asft": ASFT(ASFTConfig()), **more}


class Crowded(Anchored):
    """Has two that cannot be together."""

    MORE = True


def test_methods_that_a_class_declares_are_checked_and_have_their_snapshot() -> None:
    values = {**VALUES, "stages": [{k: v for k, v in stage.items() if k in ("tokens", "data")} for stage in STAGES]}
    options = read_options("continual/train/abcd_kl", tiny.options("continual/train/abcd_kl", values))
    curriculum = options.trainer.curriculum(options)
    found = resolve_options("continual/train/abcd_kl", options, curriculum, Anchored)
    assert found.curriculum.snapshot_steps() == {8: 1}
    with pytest.raises(UserError, match="training/methods: got 'asft', expected no dft beside it"):
        resolve_options("continual/train/abcd_kl", options, curriculum, Crowded)
