"""Whole runs of tiny trainers: files, exact resuming, changed plans, branches, faults."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.config import configuration
from holdfast.errors import RunError, UserError
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.report import open_run
from holdfast.training import BaseTrainer, loop, resume
from holdfast.training.compiling import Steps, abstract_batch, abstract_state, lower_train
from training import tiny
from training.killing import losses


def continual(folder: Path, *overrides: str, name: str = "run") -> Any:
    return tiny.trainer("continual/train/abcd_kl", tiny.CONTINUAL, folder, *overrides, name=name)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def same_state(first: Any, second: Any) -> None:
    one, two = first.state.arrays(), second.state.arrays()
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, tmp_path_factory.mktemp("pretrain"))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted continual run."""
    trainer = continual(tmp_path_factory.mktemp("whole"), "eval.probe_interval=2", "eval.probe_window=2")
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
        assert record["learning_rate"] == pytest.approx(float(pretrained.learning_rate(record["step"] - 1)))


def test_checkpoints_carry_tags_and_old_rolling_ones_are_gone(pretrained: Any) -> None:
    infos = list_checkpoints(pretrained.checkpoint_dir)
    tags = {info.step: info.tags for info in infos}
    assert tags[0] == ["boundary_0"]
    assert "final" in tags[20]
    assert 8 not in tags
    assert infos[-1].manifest["metrics_length"] <= (pretrained.spec.run_dir / "metrics.jsonl").stat().st_size


def test_a_finished_run_says_so(pretrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pretrained.spec.run_dir / "metrics.jsonl").read_bytes()
    again = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, pretrained.spec.root)
    again.run()
    assert "finished" in capsys.readouterr().out
    assert (pretrained.spec.run_dir / "metrics.jsonl").read_bytes() == before


def test_the_matrix_is_measured_before_the_next_datasets_first_row(whole: Any) -> None:
    points = json.loads((whole.spec.run_dir / "results.json").read_text())["points"]
    rows = {point["row"]: point["step"] for point in points if point["row"] is not None}
    start, end = whole.stages.fade_steps(0)
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


@pytest.mark.parametrize("crash", [1, 7, 8, 9, 10, 16])
def test_a_crash_after_any_step_changes_nothing(crash: int, whole: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Step 8 is the boundary: its checkpoint is written, and the stage not yet entered."""
    duties = loop.Session.duties

    def crashing(self: loop.Session, step: int) -> None:
        duties(self, step)
        if step == crash:
            self.store.wait()
            raise RuntimeError("crash")

    overrides = ("eval.probe_interval=2", "eval.probe_window=2")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Session, "duties", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            continual(tmp_path, *overrides).run()
    resumed = continual(tmp_path, *overrides)
    resumed.run()
    assert losses(resumed.spec.run_dir) == losses(whole.spec.run_dir)
    same_state(resumed, whole)
    matrices = [json.loads((t.spec.run_dir / "results.json").read_text())["matrix"] for t in (resumed, whole)]
    assert matrices[0] == matrices[1]


def test_a_crash_before_the_first_rolling_checkpoint_starts_from_step_0(tmp_path: Path, monkeypatch: Any) -> None:
    """Without evaluations the checkpoint of step 0 holds no results, and is there all the same."""
    settle = loop.Session.settle

    def crashing(self: loop.Session) -> None:
        settle(self)
        if int(self.trainer.state.step) == 2:
            self.store.wait()
            raise RuntimeError("crash")

    overrides = ("training.evaluate=false", "training.validation=false")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Session, "settle", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            continual(tmp_path, *overrides).run()
    assert [info.step for info in list_checkpoints(tmp_path / "general" / "default" / "run" / "checkpoints")] == [0]
    resumed = continual(tmp_path, *overrides)
    resumed.run()
    assert sorted(losses(resumed.spec.run_dir)) == list(range(1, 17))


def copy_until(whole: Any, folder: Path, step: int) -> None:
    """A run that was killed after a checkpoint."""
    target = folder / whole.spec.run_dir.relative_to(whole.spec.root)
    shutil.copytree(whole.spec.run_dir, target)
    for info in list_checkpoints(target / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)


def test_a_corrupt_newest_checkpoint_is_skipped_by_name(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_until(whole, tmp_path, 16)
    run_dir = tmp_path / "general" / "default" / "run"
    for file in (run_dir / "checkpoints" / "16" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"broken")
    resumed = continual(tmp_path, "eval.probe_interval=2", "eval.probe_window=2")
    resumed.run()
    said = capsys.readouterr().out
    assert "checkpoint 16 cannot be read and is skipped" in said
    assert "resumed at step 10" in said
    assert losses(run_dir) == losses(whole.spec.run_dir)
    same_state(resumed, whole)


def test_the_future_may_be_edited_and_the_past_may_not(whole: Any, tmp_path: Path) -> None:
    copy_until(whole, tmp_path, 8)
    probes = ("eval.probe_interval=2", "eval.probe_window=2")
    for override, path in [
        ("stages.0.tokens=1792", "stages/0/tokens"),
        ("training.seed=1", "training/seed"),
        ("optimization.lr=0.001", "optimization/lr"),
        ("stages.0.data.0.name=arithmetic", "stages/0/data/0/name"),
    ]:
        with pytest.raises(UserError, match=path):
            continual(tmp_path, *probes, override).run()
    longer = continual(tmp_path, *probes, "stages.1.tokens=3072", "stages.1.beta=0.3", "logging.report_interval=2")
    lines: list[str] = []
    resume.start(longer, lines.append)
    assert int(longer.state.step) == 8
    assert any("stages" in line for line in lines)


def test_a_checkpoint_from_before_an_option_had_its_default(whole: Any, tmp_path: Path) -> None:
    copy_until(whole, tmp_path, 8)
    probes = ("eval.probe_interval=2", "eval.probe_window=2")
    for info in list_checkpoints(tmp_path / "general" / "default" / "run" / "checkpoints"):
        manifest = {**info.manifest, "config": dict(info.manifest["config"])}
        del manifest["config"]["training/ema"], manifest["config"]["training/z_loss"]
        (info.path / "manifest" / "metadata").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"training/z_loss: was 0\.0, is 0\.1"):
        continual(tmp_path, *probes, "training.z_loss=0.1").run()
    lines: list[str] = []
    resume.start(continual(tmp_path, *probes), lines.append)
    assert lines == ["resumed at step 8 of 16"]


def test_the_end_of_a_run_to_which_a_stage_is_appended_becomes_a_boundary(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_until(whole, tmp_path, 16)
    more = {"tokens": 8 * 32 * 2, "data": [{"name": "lists", "style": "PADDED"}], "overlap": 0.0}
    values = {**tiny.CONTINUAL, "stages": [*tiny.CONTINUAL["stages"], more]}
    probes = ("eval.probe_interval=2", "eval.probe_window=2")
    run_dir = tmp_path / "general" / "default" / "run"
    assert open_run(run_dir).finished
    longer = tiny.trainer("continual/train/abcd_kl", values, tmp_path, *probes)
    monkeypatch.setattr(loop.Session, "enter", lambda self, step: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        longer.run()
    tags = {info.step: set(info.tags) for info in list_checkpoints(run_dir / "checkpoints")}
    before = {info.step: set(info.tags) for info in list_checkpoints(whole.checkpoint_dir)}
    assert tags == {**before, 16: before[16] - {"final"} | {"boundary_2"}}
    assert not json.loads((run_dir / "results.json").read_text())["finished"]
    assert not open_run(run_dir).finished
    again = continual(tmp_path, *probes)  # and the appended stage taken back
    resume.start(again, print)
    assert {info.step: set(info.tags) for info in list_checkpoints(run_dir / "checkpoints")} == before


def test_a_branch_shares_its_parents_past(whole: Any, tmp_path: Path) -> None:
    branch = continual(
        tmp_path,
        "eval.probe_interval=2",
        "eval.probe_window=2",
        "stages.1.beta=0.0",
        "stages.1.update_reference=false",
        name="branch",
    )
    loop.run(branch, parent=f"{whole.spec.run_dir}@boundary_1")
    mine, theirs = losses(branch.spec.run_dir), losses(whole.spec.run_dir)
    assert [mine[step] for step in range(1, 9)] == [theirs[step] for step in range(1, 9)]
    assert mine[12] != theirs[12]
    results = [json.loads((t.spec.run_dir / "results.json").read_text())["matrix"]["nll"] for t in (branch, whole)]
    assert results[0][:2] == results[1][:2]


def test_a_branch_that_cannot_be_taken_over_is_an_error(whole: Any, tmp_path: Path) -> None:
    copy_until(whole, tmp_path, 16)
    parent = tmp_path / "general" / "default" / "run"
    for file in (parent / "checkpoints" / "8" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"broken")
    branch = continual(tmp_path, "eval.probe_interval=2", "eval.probe_window=2", name="branch")
    with pytest.raises(UserError, match="cannot be taken over"):
        loop.run(branch, parent=f"{parent}@boundary_1")


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


def test_weights_alone_start_a_new_run(whole: Any, tmp_path: Path) -> None:
    fresh = continual(tmp_path, name="fresh")
    weights = resume.load_weights(fresh, list_checkpoints(whole.checkpoint_dir)[-1])
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(whole.state.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_reference_can_come_from_another_run(whole: Any, tmp_path: Path) -> None:
    trainer = continual(
        tmp_path,
        f"optimization.kl.reference_from={whole.spec.run_dir}@final",
        "stages.0.beta=0.1",
        "stages.1.update_reference=false",
        "training.evaluate=false",
    )
    trainer.run()
    for a, b in zip(jax.tree.leaves(trainer.state.reference), jax.tree.leaves(whole.state.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert records(trainer.spec.run_dir, "train")[0]["penalty"] > 0


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    from holdfast.execution.files import run_lock

    trainer = continual(tmp_path)
    with run_lock(trainer.spec.run_dir), pytest.raises(UserError, match="another process"):
        trainer.run()


def test_a_run_that_is_never_finite_stops_with_a_good_checkpoint(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        "gpt/train/pretrain", tiny.PRETRAIN, tmp_path, "training.max_skipped_steps=3", "training.evaluate=false"
    )
    trainer.state = trainer.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, trainer.state.params))
    with pytest.raises(RunError, match="3 steps in a row"):
        trainer.run()
    assert records(trainer.spec.run_dir, "train")[0]["loss"] is None


def test_there_is_one_compiled_step_for_each_stage_kind(whole: Any) -> None:
    steps = Steps(whole)
    state, kinds = whole.state, set()
    for stage in (0, 1):
        reference = state.params if stage else None
        kinds.add((whole.objective_at(stage), reference is not None))
    assert len(kinds) == 2
    assert whole.objective_at(1) is whole.objective_at(1)
    assert steps.num_compiled == 0


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
        return lower_train(trainer, state, batch, key).as_text().count("dot_general")

    def shapes(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

    batch = abstract_batch(whole, (1, 8))
    without = products(plain, shapes(plain.state), abstract_batch(plain, (1, 8)))
    first_stage = whole.state.replace(objective=whole.objective_at(0), reference=None)
    assert products(whole, shapes(first_stage), batch) == without
    assert products(whole, abstract_state(whole), batch) > without


def test_the_plan_counts_what_the_run_draws(whole: Any) -> None:
    from holdfast.training.check import checked
    from holdfast.training.forecast import forecast

    plan = forecast("continual/train/abcd_kl", checked("continual/train/abcd_kl", whole.settings.cfg))
    for record in records(whole.spec.run_dir, "train"):
        at = record["step"] - 1
        assert record["rows"] == {name: rows[at] for name, rows in plan["steps"]["rows"].items()}
        assert record["learning_rate"] == pytest.approx(plan["steps"]["learning_rate"][at], rel=1e-5)
        assert plan["steps"]["beta"][at] == pytest.approx(record["beta"])
