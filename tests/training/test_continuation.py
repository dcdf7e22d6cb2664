"""Continuing a model that exists: one anchored stage, and datasets that are measured without being trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.analysis.export import export_run
from holdfast.analysis.plan import plan_run
from holdfast.errors import ConfigError, UserError
from holdfast.report import open_run, verdicts
from holdfast.report.compare import compare, print_comparison
from holdfast.report.page import render
from holdfast.report.summary import print_outcome
from holdfast.training.data import load_data
from holdfast.training.results import chosen_evaluator
from holdfast.training.run import write_run_files
from training import tiny
from training.killing import train_records

ABCD, ABCD_KL, KL = "continual/train/abcd", "continual/train/abcd_kl", "gpt/train/kl"
STAGE = {"tokens": 8 * 32 * 3, "data": [{"name": "arithmetic", "style": "PADDED"}]}
SHARED = {
    "architecture": tiny.PRETRAIN["architecture"],
    "logging": tiny.PRETRAIN["logging"],
    "eval": {"evaluations": ["arithmetic"], "limit": 8, "held_out": ["lists"]},
}
TRAINING = {"batch_size": 8, "validation_steps": 8}
LISTS = {"tokens": [STAGE["tokens"]], "dataset": [STAGE["data"]], **TRAINING}
ANCHOR = {"estimator": "forward"}


def section(**stage: Any) -> dict[str, Any]:
    """One stage in a `stages` section."""
    return {**SHARED, "stages": [{**STAGE, **stage}], "training": TRAINING, "optimization": {"kl": ANCHOR, "lr": 0.01}}


def lists(**kl: Any) -> dict[str, Any]:
    """One stage in the spec's lists."""
    return {**SHARED, "training": LISTS, "optimization": {"kl": {**ANCHOR, **kl}, "lr": 0.01}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Weights that exist: a trainer's initial ones, and the folder they were exported to."""
    folder = tmp_path_factory.mktemp("model")
    trainer = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, folder)
    write_run_files(trainer.resolved, trainer.spec.run_dir)
    trainer.save(Path("mine"))
    export_run(f"{trainer.spec.run_dir}@mine", folder / "model")
    return trainer, folder / "model"


@pytest.fixture(scope="module")
def continued(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of one stage that is held to the model it begins with."""
    values = lists(betas=[1.0], reference_update_stages=[0])
    values["architecture"] = {"block_size": 32, "from": str(model[1])}
    made = tiny.trainer(ABCD_KL, values, tmp_path_factory.mktemp("continued"))
    made.run()
    return made


def test_the_reference_is_the_model_that_the_run_begins_with(continued: Any, model: tuple[Any, Path]) -> None:
    jax.tree.map(np.testing.assert_array_equal, continued.state.reference, model[0].state.params)
    records = train_records(continued.spec.run_dir)
    assert [record["beta"] for record in records] == [1.0] * 3
    assert records[0]["penalty"] == pytest.approx(0, abs=1e-6)
    assert records[-1]["penalty"] > 1e-4


def test_what_is_held_out_is_a_column_without_a_stage(continued: Any) -> None:
    results = json.loads((continued.spec.run_dir / "results.json").read_text())
    assert (results["tasks"], results["homes"]) == (["arithmetic", "lists"], [1, None])
    column = [row[1] for row in results["matrix"]["bits_per_byte"]]
    assert [value > 0 for value in column] == [True, True], "before training and after the only stage"
    validations = [json.loads(line) for line in (continued.spec.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all("lists" not in line["losses"] for line in validations if line["kind"] == "validation")
    page = render(open_run(continued.spec.run_dir))
    assert "lists" in page[page.index("matrix_bits_per_byte") :]


def test_what_was_known_before_and_is_only_measured_is_judged(
    continued: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the model began with it; the tiny model knows nothing, so that the bar is lowered."""
    run = open_run(continued.spec.run_dir)
    assert [each.task for each in verdicts.verdicts(run)] == ["arithmetic"]
    monkeypatch.setattr(verdicts, "KNOWN", 10.0)
    (found,) = (each for each in verdicts.verdicts(run) if each.task == "lists")
    assert run.matrix is not None
    first, last = (row[1] for row in run.matrix.measures["bits_per_byte"])
    assert (found.before, found.now, found.home) == (first, last, "")
    assert found.change == pytest.approx(last - first)
    assert found.interval is not None
    assert found.interval[0] <= found.change <= found.interval[1]
    assert found.word == ("forgotten" if found.interval[0] > 0 else "known before")
    print_outcome(continued.spec.run_dir)
    shutil.copytree(continued.spec.run_dir, tmp_path / "other")
    print_comparison(compare([continued.spec.run_dir, tmp_path / "other"]))
    assert capsys.readouterr().out.count("lists") > 2


def test_a_checkpoint_is_evaluated_on_what_is_held_out(continued: Any) -> None:
    everything = chosen_evaluator(continued.resolved, continued.topology, None)
    assert sorted(everything.rows) == ["arithmetic", "lists"]
    assert list(chosen_evaluator(continued.resolved, continued.topology, ["lists"]).rows) == ["lists"]


def test_the_plan_names_what_is_measured(continued: Any) -> None:
    plan = plan_run(continued.resolved)
    assert plan["held_out"] == ["lists"]
    assert not plan["warnings"]


def test_held_out_rows_that_are_trained_on_are_a_leak(tmp_path: Path) -> None:
    texts = [f"line {number}: a text of its own, long enough to be looked for {number**3}" for number in range(64)]
    for name in ("trained", "other"):
        (tmp_path / f"{name}.txt").write_text("\n".join(name + text for text in texts))
    source = {"path": str(tmp_path / "trained.txt"), "sample_by": "line"}
    other = {**source, "path": str(tmp_path / "other.txt"), "validation": source["path"]}
    values = section(beta=0.5, update_reference=True)
    values["stages"][0]["data"] = [{"name": "trained", "style": "PMD"}]
    values["data"] = {"sources": {"trained": source, "looked_at": other}}
    values["eval"] = {"evaluations": [], "held_out": ["looked_at"]}
    run = tiny.resolved(ABCD_KL, values)
    with pytest.raises(UserError, match="looked_at"):
        load_data(run.curriculum, run.options.data, run.tokenizer, measured=run.held_out, progress=False)


@pytest.mark.parametrize(
    ("job", "values"),
    [
        (ABCD_KL, lists(betas=[0.5], reference_update_stages=[0])),
        (ABCD_KL, section(beta=0.5, update_reference=True)),
    ],
)
def test_one_anchored_stage_may_be_written_either_way(job: str, values: dict[str, Any]) -> None:
    run = tiny.resolved(job, values)
    assert run.curriculum.snapshot_steps() == {0: 0}
    assert run.curriculum.beta_at(0) == 0.5
    assert run.anchors_to_fresh_weights, "without a model only --init-from makes sense of it, and `plan` says so"


def test_the_two_stage_job_continues_a_model_in_one(model: tuple[Any, Path]) -> None:
    values = {**lists(beta=0.5), "architecture": {"block_size": 32, "from": str(model[1])}}
    run = tiny.resolved(KL, values)
    assert run.curriculum.snapshot_steps() == {0: 0}
    assert not run.anchors_to_fresh_weights
    with pytest.raises(ConfigError, match=r"training/tokens: got \[768\], expected 2 stages, or one"):
        tiny.resolved(KL, lists(beta=0.5))


@pytest.mark.parametrize(
    ("job", "values", "overrides", "message"),
    [
        (ABCD_KL, lists(betas=[0.5], reference_update_stages=[]), [], "training/tokens: .* at least 2 stages, or one"),
        (ABCD_KL, section(beta=0.5), [], "stages: .* at least 2 stages, or one"),
        (ABCD, {**SHARED, "training": LISTS}, [], "training/tokens: .* at least 2 stages, or one"),
        (ABCD_KL, section(beta=0.5, update_reference=True), ["optimization.kl.on=old"], "optimization/kl/on"),
        (ABCD, {**SHARED, "training": {**LISTS, "methods": ["dft"]}}, [], "methods/dft/stages: .*set it to \\[0\\]"),
        (ABCD_KL, section(beta=0.5, update_reference=True), ["training.replay={}"], "training/replay: "),
        (ABCD_KL, section(beta=0.5, update_reference=True), ["eval.held_out=[list]"], "eval/held_out/0: .*'lists'"),
        (ABCD_KL, section(beta=0.5, update_reference=True), ["eval.held_out=[lists,lists]"], "eval/held_out/1"),
    ],
)
def test_what_makes_no_sense_is_refused(job: str, values: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.resolved(job, values, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.1.overlap=0"], r"optimization/kl/on: got 'old', expected batch: stage 1 has a beta and no old rows"),
        (["training.replay={objective: ce}"], "optimization/kl/on: got 'old', expected batch beside training/replay"),
        (["stages.1.overlap=0", "optimization.kl.estimator=nll_difference"], None),
        (["stages.1.overlap=0", "stages.1.beta=0"], None),
        (["stages.1.overlap=0", "training.replay={}"], None),
        ([], None),
    ],
)
def test_a_penalty_on_old_rows_needs_some(overrides: list[str], message: str | None) -> None:
    every = ("optimization.kl.on=old", *overrides)
    if message is None:
        tiny.resolved(ABCD_KL, tiny.CONTINUAL, *every)
        return
    with pytest.raises(UserError, match=message):
        tiny.resolved(ABCD_KL, tiny.CONTINUAL, *every)


def test_what_is_trained_on_has_its_column_already() -> None:
    run = tiny.resolved(ABCD_KL, section(beta=0.5, update_reference=True), "eval.held_out=[arithmetic,lists]")
    assert run.held_out == ("lists",)
