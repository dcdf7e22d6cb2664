"""Exact resuming: crashes, damaged checkpoints, branches, and runs of earlier versions."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.errors import UserError
from holdfast.execution import processes
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.training import loop, probes, restore
from holdfast.training.compile import CompiledSteps, place
from holdfast.training.manifest import SEMANTICS
from holdfast.training.state import TrainState
from training.killing import losses
from training.tiny import continual, copy_until, records, same_state


@pytest.mark.parametrize("crash", [8, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 7, 9, 10, 16))])
def test_a_crash_after_any_step_changes_nothing(crash: int, whole: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Step 8 is the boundary: its checkpoint is written, and the stage not yet entered."""
    after = loop.TrainLoop.after

    def crashing(self: loop.TrainLoop, step: int) -> None:
        after(self, step)
        if step == crash:
            self.store.wait()
            raise RuntimeError("crash")

    overrides = ("eval.probe_interval=2", "eval.probe_window=2")
    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainLoop, "after", crashing)
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
    settle = loop.TrainLoop.settle

    def crashing(self: loop.TrainLoop) -> None:
        settle(self)
        if int(self.trainer.state.step) == 2:
            self.store.wait()
            raise RuntimeError("crash")

    overrides = ("training.evaluate=false", "training.validation=false")
    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainLoop, "settle", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            continual(tmp_path, *overrides).run()
    assert [info.step for info in list_checkpoints(tmp_path / "general" / "default" / "run" / "checkpoints")] == [0]
    resumed = continual(tmp_path, *overrides)
    resumed.run()
    assert sorted(losses(resumed.spec.run_dir)) == list(range(1, 17))


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


def test_a_branch_shares_its_parents_past(whole: Any, tmp_path: Path) -> None:
    branch = continual(
        tmp_path,
        "eval.probe_interval=2",
        "eval.probe_window=2",
        "stages.1.beta=0.0",
        "stages.1.update_reference=false",
        name="branch",
        parent=f"{whole.spec.run_dir}@boundary_1",
    )
    branch.run()
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
    probes = ("eval.probe_interval=2", "eval.probe_window=2")
    branch = continual(tmp_path, *probes, name="branch", parent=f"{parent}@boundary_1")
    with pytest.raises(UserError, match="cannot be taken over"):
        branch.run()


def test_weights_alone_start_a_new_run(whole: Any, tmp_path: Path) -> None:
    fresh = continual(tmp_path, name="fresh")
    weights = fresh.restorer.weights(list_checkpoints(whole.checkpoint_dir)[-1])
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


def as_an_earlier_version_saved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints without the arrays and the facts that this version added."""
    arrays, manifest_of = TrainState.arrays, loop.manifest_of

    def old_arrays(self: Any) -> dict[str, Any]:
        return {name: array for name, array in arrays(self).items() if name != "kl_mean"}

    def old_manifest(*args: Any, **kwargs: Any) -> dict[str, Any]:
        new = manifest_of(*args, **kwargs)
        return {name: value for name, value in new.items() if name not in ("semantics", "cores")}

    monkeypatch.setattr(TrainState, "arrays", old_arrays)
    monkeypatch.setattr(loop, "manifest_of", old_manifest)


BUDGET = (
    "optimization.kl.target=0.02",
    "optimization.kl.on=old",
    "training.replay={rate: 0.1, from: [lists]}",
    "logging.penalty_probe=true",
    "training.evaluate=false",
)


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with a KL budget on old rows, begun by an earlier version and finished by this one; and what that said."""
    folder = tmp_path_factory.mktemp("budgeted")
    after = loop.TrainLoop.after

    def crashing(self: loop.TrainLoop, step: int) -> None:
        after(self, step)
        if step == 12:
            self.settle()
            self.checkpoint(step, ())
            self.store.wait()
            raise RuntimeError("crash")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TrainLoop, "after", crashing)
        as_an_earlier_version_saved_it(patch)
        with pytest.raises(RuntimeError, match="crash"):
            continual(folder, *BUDGET).run()
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(map(str, words))))
        trainer = continual(folder, *BUDGET)
        trainer.run()
    return trainer, said


def test_a_run_of_an_earlier_version_is_finished_and_says_what_differs(budgeted: Any) -> None:
    trainer, said = budgeted
    assert trainer.done
    assert "resumed at step 12 of 16" in said
    assert not [line for line in said if "cannot be read" in line or "skipped" in line or "changed since" in line]
    (note,) = [line for line in said if line.startswith("note: this run was begun with an earlier version")]
    assert "the last step of a decay has the final learning rate" in note
    assert "optimization/kl/target is a ceiling" in note
    assert "muon" not in note
    assert not list(trainer.checkpoint_dir.glob("*broken*"))
    assert all(info.path.name.isdigit() for info in list_checkpoints(trainer.checkpoint_dir))
    newest = list_checkpoints(trainer.checkpoint_dir)[-1].manifest
    assert newest["semantics"] == SEMANTICS
    assert newest["cores"] == processes.visible_cores()


def test_penalties_that_were_not_measured_are_null(budgeted: Any) -> None:
    trainer, _ = budgeted
    found = records(trainer.spec.run_dir, "train")
    assert [record["step"] for record in found] == list(range(1, 17))
    seen = set()
    for record, following in zip(found, [*found[1:], None], strict=True):
        old = record["step"] > 8 and record["rows"]["lists"] > 0
        seen.add((record["step"] > 8, old))
        assert (record["penalty"] is not None) == old, record["step"]
        if following and record["step"] not in (8, 16) and record["step"] > 8:
            assert (following["beta"] != record["beta"]) == old, "beta moves where a KL was measured, and only there"
        if record["step"] <= 9 or not old:
            assert record["penalty_cosine"] is None, "no penalty, none measured, or right after the snapshot"
        else:
            assert -1 <= record["penalty_cosine"] <= 1
    assert seen == {(False, False), (True, True), (True, False)}, "all three kinds of steps occurred"
    assert {"cores"} <= records(trainer.spec.run_dir, "stage")[0].keys()


def test_the_penalty_cosine_belongs_to_its_own_step(budgeted: Any) -> None:
    """Step 13 again, from the checkpoint of step 12: its cosine is the recorded one to the last bit."""
    finished, _ = budgeted
    trainer = continual(finished.spec.root, *BUDGET)
    trainer.load(Path("12"))
    assert np.asarray(trainer.state.kl_mean).tolist() == [0.0, 0.0], "an array that was not saved has its initial value"
    found = {record["step"]: record["penalty_cosine"] for record in records(finished.spec.run_dir, "train")}
    batch = place(trainer.batches[12], trainer.topology.mesh, trainer.batch_shape[1])
    steps = CompiledSteps(trainer.train_step, trainer.val_step, trainer.topology.mesh, 0)
    cosine = float(steps.probe(trainer.state, batch, (probes.penalty_cosine,))["penalty_cosine"])
    assert found[13] == (None if np.isnan(cosine) else cosine)


def test_a_resume_with_other_cores_says_that_the_last_bits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"semantics": SEMANTICS, "config": {}}
    now = processes.visible_cores()
    assert now == len(os.sched_getaffinity(0))
    assert restore._notes({**known, "cores": now}) == []
    assert restore._notes(known) == [], "earlier versions did not record it"
    (line,) = restore._notes({**known, "cores": now + 1})
    assert line == f"note: {now} visible core{'s' if now != 1 else ''}, {now + 1} when the checkpoint was made: " + (
        "results may differ in the last bits"
    )
