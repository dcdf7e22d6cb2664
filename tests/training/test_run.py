"""Whole runs of tiny trainers: files, records, faults, and what is compiled."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from holdfast.config import configuration
from holdfast.errors import RunError, UserError
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.training import BaseTrainer
from holdfast.training.compile import abstract_batch, trace_train
from holdfast.training.initial import abstract_stage
from holdfast.training.loop import TrainLoop
from holdfast.training.state import learning_rate, objective_at
from training import tiny
from training.tiny import continual, records


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, tmp_path_factory.mktemp("pretrain"))
    trainer.run()
    return trainer


def test_a_trainer_needs_a_topology() -> None:
    with configuration(tiny.options("gpt/train/pretrain", tiny.PRETRAIN)), pytest.raises(AssertionError):
        BaseTrainer(ExecutionSpec(name="run"))


def test_a_run_leaves_the_files_of_the_contract(pretrained: Any) -> None:
    run_dir = pretrained.spec.run_dir
    assert pretrained.done
    for name in ("config.yaml", "metrics.jsonl", "results.json", "lock", "checkpoints"):
        assert (run_dir / name).exists(), name
    results = json.loads((run_dir / "results.json").read_text())
    assert results["stages"] == ["train"]
    assert results["tasks"] == ["arithmetic", "lists"]
    assert len(results["matrix"]["nll"]) == 2
    assert results["matrix"]["nll"][1][0] < results["matrix"]["nll"][0][0]
    assert results["matrix"]["accuracy"][1][1] is None
    assert results["finished"] is True


def test_train_records_are_of_each_step_once(pretrained: Any) -> None:
    found = records(pretrained.spec.run_dir, "train")
    assert [record["step"] for record in found] == list(range(1, 21))
    for record in found:
        assert record["tokens"] == record["step"] * 8 * 32
        assert {"loss", "ce", "penalty", "beta", "learning_rate", "grad_norm", "rows"} <= record.keys()
        counts = pretrained.plan.counts_at(record["step"] - 1)
        assert record["rows"] == {source.name: count for source, count in counts.items()}
        assert record["learning_rate"] == pytest.approx(float(learning_rate(pretrained.resolved)(record["step"] - 1)))


def test_checkpoints_carry_tags_and_old_rolling_ones_are_gone(pretrained: Any) -> None:
    infos = list_checkpoints(pretrained.checkpoint_dir)
    tags = {info.step: info.tags for info in infos}
    assert tags[0] == ["boundary_0"]
    assert "final" in tags[20]
    assert 8 not in tags
    assert infos[-1].manifest["metrics_length"] <= (pretrained.spec.run_dir / "metrics.jsonl").stat().st_size


def test_the_first_line_names_the_attention_that_was_taken(pretrained: Any) -> None:
    said: list[str] = []
    loop = SimpleNamespace(
        run=pretrained.resolved,
        trainer=pretrained,
        mesh=pretrained.topology.mesh,
        curriculum=pretrained.resolved.curriculum,
        recorder=SimpleNamespace(leaks=()),
        tracker=SimpleNamespace(message=said.append),
    )
    TrainLoop.announce(cast(TrainLoop, loop))
    assert said[0].endswith("rows on each of 1 shards, attention: plain formula in chunks")


def test_a_finished_run_says_so(pretrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pretrained.spec.run_dir / "metrics.jsonl").read_bytes()
    again = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, pretrained.spec.root)
    again.run()
    assert "finished" in capsys.readouterr().out
    assert (pretrained.spec.run_dir / "metrics.jsonl").read_bytes() == before


def test_the_matrix_is_measured_before_the_next_datasets_first_row(whole: Any) -> None:
    points = json.loads((whole.spec.run_dir / "results.json").read_text())["points"]
    rows = {point["row"]: point["step"] for point in points if point["row"] is not None}
    start, end = whole.resolved.curriculum.fade_steps(0)
    assert rows == {0: 0, 1: start, 2: 16}
    for record in records(whole.spec.run_dir, "train"):
        assert record["step"] > start or record["rows"]["arithmetic"] == 0
    at = {point["step"]: point["at"] for point in points}
    assert at[8] == "boundary_1"
    assert at[end] == "fade_end_1"
    assert list(at.values()).count("probe") >= 1
    after = [point for point in points if point["step"] > 8]
    assert all(point["scores"]["lists"]["kl_forward"] is not None for point in after)


def test_stage_records_tell_where_the_run_was(whole: Any) -> None:
    stages = records(whole.spec.run_dir, "stage")
    assert [(s["step"], s["stage"], s["reference_updated"]) for s in stages] == [(0, 0, False), (8, 1, True)]
    assert {"processes", "devices", "mesh"} <= stages[0].keys()


def test_the_reference_is_the_parameters_of_the_boundary(whole: Any, tmp_path: Path) -> None:
    at_boundary = continual(whole.spec.root, "eval.probe_interval=2", "eval.probe_window=2")
    at_boundary.load(Path("boundary_1"))
    assert int(at_boundary.state.step) == 8
    assert at_boundary.state.reference is None
    for a, b in zip(jax.tree.leaves(at_boundary.state.params), jax.tree.leaves(whole.state.reference), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_penalty_that_only_rescales_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = continual(
        tmp_path,
        "optimization.kl.estimator=nll_difference",
        "logging.penalty_probe=true",
        "training.evaluate=false",
        "logging.report_interval=8",
    )
    trainer.run()
    said = capfd.readouterr().err
    assert "nll_difference has the gradient of plain training" in said
    assert "is parallel to the cross-entropy's" in said
    assert records(trainer.spec.run_dir, "train")[-1]["penalty_cosine"] == pytest.approx(1.0, abs=1e-5)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    from holdfast.execution.files import run_lock

    trainer = continual(tmp_path)
    with run_lock(trainer.spec.run_dir), pytest.raises(UserError, match="another process"):
        trainer.run()


def test_a_run_that_is_never_finite_stops_with_a_good_checkpoint(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        "gpt/train/pretrain", tiny.PRETRAIN, tmp_path, "training.max_skipped_steps=3", "training.evaluate=false"
    )
    trainer.state = trainer.state.replace(
        params=jax.tree.map(lambda leaf: leaf * np.float32(1e30), trainer.state.params)
    )
    with pytest.raises(RunError, match="3 steps in a row"):
        trainer.run()
    assert records(trainer.spec.run_dir, "train")[0]["skipped"] == 1


def test_there_is_one_compiled_step_for_each_stage_kind(whole: Any) -> None:
    assert objective_at(whole.resolved, 0) != objective_at(whole.resolved, 1)
    assert objective_at(whole.resolved, 1) is objective_at(whole.resolved, 1)


def test_a_stage_without_penalty_compiles_to_plain_training(whole: Any, tmp_path: Path) -> None:
    """As many matrix products as the trainer without any penalty, and fewer than a stage with one."""
    values = {
        **tiny.CONTINUAL,
        "stages": [{**s, "beta": 0.0, "update_reference": False} for s in tiny.CONTINUAL["stages"]],
    }
    values = {key: value for key, value in values.items() if key != "optimization"}
    plain = tiny.trainer("continual/train/abcd", values, tmp_path)

    def products(trainer: Any, state: Any, batch: Any) -> int:
        key = jax.random.key(0)
        lowered = trace_train(trainer.train_step, trainer.topology.mesh, state, batch, key).lower()
        return lowered.as_text().count("dot_general")

    def shapes(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

    def batch_of(trainer: Any) -> Any:
        return abstract_batch(trainer.resolved, trainer.topology.mesh, (1, 8))

    without = products(plain, shapes(plain.state), batch_of(plain))
    first_stage = whole.state.replace(objective=objective_at(whole.resolved, 0), reference=None)
    assert products(whole, shapes(first_stage), batch_of(whole)) == without
    assert products(whole, abstract_stage(whole.state, whole.resolved, 1), batch_of(whole)) > without


def test_the_plan_counts_what_the_run_draws(whole: Any) -> None:
    from holdfast.analysis.plan import plan_run

    plan = plan_run(whole.resolved)
    for record in records(whole.spec.run_dir, "train"):
        at = record["step"] - 1
        assert record["rows"] == {name: rows[at] for name, rows in plan["steps"]["rows"].items()}
        assert record["learning_rate"] == pytest.approx(plan["steps"]["learning_rate"][at], rel=1e-5)
        assert plan["steps"]["beta"][at] == pytest.approx(record["beta"])
