"""What is quieter than a kill: flipped bits, edited manifests, lost records. Named, and mended from what agrees."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from holdfast.errors import RunError, UserError
from holdfast.execution import faults
from holdfast.execution.checkpoints import (
    DamagedCheckpointError,
    find_checkpoint,
    list_checkpoints,
    unusable_checkpoints,
    write_manifest,
)
from holdfast.training import loop
from holdfast.training.results import ResultsRecorder
from holdfast.training.triggers import Measurement
from training import tiny
from training.killing import losses
from training.tiny import continual, copy_until, same_state

PROBES = ("eval.probe_interval=2", "eval.probe_window=2")


@pytest.fixture
def copy(whole: Any, tmp_path: Path) -> Path:
    """The folder of a finished run of its own."""
    copy_until(whole, tmp_path, 16)
    return tmp_path / "general" / "default" / "run"


def resumed(run_dir: Path) -> tuple[Any, list[str]]:
    """A trainer whose state is where the run of a folder goes on, and what that said."""
    said: list[str] = []
    trainer = continual(run_dir.parents[2], *PROBES)
    tiny.resume(trainer, said.append)
    return trainer, said


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_no_flipped_bit_of_a_checkpoints_arrays_is_trained_on(copy: Path, whole: Any) -> None:
    """Each is noticed, or changes nothing."""
    trainer = continual(copy.parents[2], *PROBES)
    info, chance, noticed = find_checkpoint(copy / "checkpoints", "16"), random.Random(0), 0
    files = sorted(path for path in (info.path / "state").rglob("*") if path.is_file() and path.stat().st_size)
    for _ in range(12):
        path = chance.choices(files, [file.stat().st_size for file in files])[0]
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)
        try:
            trainer.state = trainer.restorer.load(trainer.state, info)
        except DamagedCheckpointError:
            noticed += 1
        else:
            same_state(trainer, whole)
        flip(path, bit)
    assert noticed >= 8
    trainer.state = trainer.restorer.load(trainer.state, info)
    same_state(trainer, whole)


def test_a_run_with_a_damaged_newest_checkpoint_ends_as_it_would_have(copy: Path, whole: Any) -> None:
    files = sorted((copy / "checkpoints" / "16" / "state" / "ocdbt.process_0" / "d").iterdir())
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size * 4)
    trainer, said = resumed(copy)
    assert any(line.startswith("checkpoint 16 cannot be read and is skipped: ") for line in said), said
    assert "resumed at step 10 of 16" in said
    assert (copy / "checkpoints" / "unreadable-16").is_dir()
    trainer.run()
    same_state(trainer, whole)
    assert losses(copy) == losses(whole.spec.run_dir)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another score": lambda m: m["points"][-1]["scores"]["lists"].update(nll=0.5),
    "another length": lambda m: m.update(metrics_length=m["metrics_length"] - 1),
    "another step": lambda m: m.update(step=15),
    "no seal": lambda m: m.pop("seal"),
    "no checksums": lambda m: m.pop("checksums"),
    "a key less": lambda m: m.pop("plan"),
    "a list for an object": lambda m: m.update(config=[]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_manifest_is_noticed_and_the_checkpoint_before_is_taken(edit: Any, copy: Path) -> None:
    path = copy / "checkpoints" / "16" / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    assert "16" in unusable_checkpoints(copy / "checkpoints")
    with pytest.raises(UserError, match="newest checkpoint, 16, cannot be used"):
        find_checkpoint(copy / "checkpoints", "latest")
    _, said = resumed(copy)
    assert any(line.startswith("checkpoint 16 is skipped: ") for line in said), said
    assert "resumed at step 10 of 16" in said


def without_checksums(run_dir: Path, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Make the checkpoints those of the version before, and edit the newest."""
    for info in list_checkpoints(run_dir / "checkpoints"):
        manifest = {name: value for name, value in info.manifest.items() if name not in ("seal", "checksums")}
        manifest.pop("metrics_digest")
        if info.step == 16:
            edit(manifest)
        (info.path / "manifest" / "metadata").write_text(json.dumps(manifest))


OLD_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {name}": lambda m, name=name: m.pop(name) for name in ("format", "points", "mesh", "best", "config")},
    "a text for a number": lambda m: m.update(metrics_length="12"),
    "a point without scores": lambda m: m["points"][0].pop("scores"),
    "points of numbers": lambda m: m.update(points=[1, 2]),
}


@pytest.mark.parametrize("edit", OLD_EDITS.values(), ids=OLD_EDITS)
def test_a_manifest_without_seal_and_with_a_wrong_part_does_not_end_the_run(edit: Any, copy: Path) -> None:
    without_checksums(copy, edit)
    _, said = resumed(copy)
    assert any(line.startswith("checkpoint 16 ") and "skipped" in line for line in said), said
    assert "resumed at step 10 of 16" in said


def test_a_run_of_the_version_before_goes_on_and_says_once_that_it_cannot_be_checked(copy: Path, whole: Any) -> None:
    without_checksums(copy)
    for step in (10, 16):
        (copy / "checkpoints" / str(step)).rename(copy.parent / f"gone-{step}")
    trainer, said = resumed(copy)
    assert [line for line in said if "cannot be checked" in line] == [
        "note: the checkpoint was made by an earlier version, without checksums: it cannot be checked"
    ]
    trainer.run()
    same_state(trainer, whole)
    _, said = resumed(copy)
    assert not any("cannot be checked" in line for line in said)


def cut(path: Path) -> None:
    """To the length at checkpoint 10 and a line more."""
    length = find_checkpoint(path.parent / "checkpoints", "10").manifest["metrics_length"]
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n", length) + 1])


def alter(path: Path) -> None:
    """A number in the last line that checkpoint 16 knows."""
    length = find_checkpoint(path.parent / "checkpoints", "16").manifest["metrics_length"]
    data = bytearray(path.read_bytes())
    start = data.rindex(b"\n", 0, length - 1)
    at = next(place for place in range(start, length) if data[place : place + 1].isdigit())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def garble(path: Path) -> None:
    """A line that is no JSON."""
    length = find_checkpoint(path.parent / "checkpoints", "16").manifest["metrics_length"]
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\n", 0, length - 1) + 1] = 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, alter, garble])
def test_lost_or_altered_records_are_named_and_made_again(damage: Any, copy: Path, whole: Any) -> None:
    damage(copy / "metrics.jsonl")
    trainer, said = resumed(copy)
    (line,) = [line for line in said if line.startswith("checkpoint 16 is skipped: ")]
    assert "metrics.jsonl" in line
    assert "resumed at step 10 of 16" in said
    if damage is cut:  # one whole run is enough
        trainer.run()
        same_state(trainer, whole)
        assert losses(copy) == losses(whole.spec.run_dir)


def test_records_that_agree_with_no_checkpoint_are_named_and_the_newest_state_is_kept(copy: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    trainer, said = resumed(copy)
    assert int(trainer.state.step) == 16
    (line,) = [line for line in said if line.startswith("warning: ")]
    assert "metrics.jsonl is missing" in line
    assert "records of steps up to 16 are lost" in line


def test_a_branch_from_a_run_without_records_says_so(copy: Path, tmp_path: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    said: list[str] = []
    branch = continual(tmp_path, *PROBES, name="branch", parent=f"{copy}@boundary_1")
    tiny.resume(branch, said.append)
    assert any("the branch lacks records" in line for line in said)


def test_weights_that_are_not_finite_are_not_saved_and_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = loop.TrainLoop.advance

    def poisoned(self: loop.TrainLoop, step: int, batch: Any) -> None:
        """A step after which the weights are not numbers any more, although its loss was one."""
        advance(self, step, batch)
        state = self.trainer.state
        self.trainer.state = state.replace(params=jax.tree.map(lambda leaf: leaf * jnp.inf, state.params))

    monkeypatch.setattr(loop.TrainLoop, "advance", poisoned)
    trainer = continual(tmp_path, "training.evaluate=false", "training.max_skipped_steps=99")
    with pytest.raises(RunError, match=r"the weights are not finite \(.*the checkpoint of step 0 is good"):
        trainer.run()
    assert [info.step for info in list_checkpoints(trainer.checkpoint_dir)] == [0]


def test_a_last_measurement_that_is_not_finite_ends_with_an_error(copy: Path) -> None:
    info = find_checkpoint(copy / "checkpoints", "16")
    points = [*info.manifest["points"][:-1], {**info.manifest["points"][-1], "not_finite": ["lists nll"]}]
    write_manifest(info.path, {**info.manifest, "points": points})
    with pytest.raises(RunError, match="what was measured is not finite: lists nll"):
        continual(copy.parents[2], *PROBES).run()


def test_scores_that_are_not_finite_are_marked_in_their_point(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = continual(copy.parents[2], *PROBES)
    progress = tiny.resume(trainer)
    recorder = ResultsRecorder(trainer.resolved, copy, trainer.evaluator, (), progress)
    evaluator = recorder.evaluator
    assert evaluator is not None
    good = evaluator.probe(trainer.state.params, None)
    bad = {
        name: dataclasses.replace(result, measures={**result.measures, "nll": float("inf")})
        for name, result in good.items()
    }
    monkeypatch.setattr(evaluator, "evaluate", lambda *_: bad)
    recorder.measure(trainer.state, 16, Measurement(("final",), 2))
    assert progress.points[-1]["not_finite"] == [f"{name} nll" for name in bad]
    with pytest.raises(RunError, match="not finite"):
        recorder.check_finite()


def test_a_crash_leaves_temporary_files_that_the_next_run_removes(copy: Path) -> None:
    leftovers = [copy / ".config.yaml.ab12cd_x", copy / "evaluations" / "8" / ".sums.json.k2_81abc"]
    kept = [copy / ".hidden", copy / "evaluations" / ".notes.txt"]
    for path in (*leftovers, *kept):
        path.write_text("half")
    continual(copy.parents[2], *PROBES).run()
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in kept)


def test_no_path_of_this_machine_is_in_a_checkpoint(whole: Any) -> None:
    root = str(whole.spec.root).encode()
    found = [path for path in whole.checkpoint_dir.rglob("*") if path.is_file() and root in path.read_bytes()]
    assert found == []


def test_points_of_the_program_do_nothing_unless_asked() -> None:
    assert faults._hook is None
    passed: list[str] = []
    faults.set_hook(passed.append)
    try:
        faults.fault_point("start")
    finally:
        faults.set_hook(None)
    assert passed == ["start"]
    assert loop.fault_point is faults.fault_point


def test_an_altered_file_of_an_evaluation_is_named_and_a_tokenizer_written_again(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums, (tokenizer,) = copy / "evaluations" / "8" / "sums.json", (copy / "tokenizer").iterdir()
    good = tokenizer.read_bytes()
    flip(sums, 100)
    flip(tokenizer, 100)
    continual(copy.parents[2], *PROBES).run()
    said = capsys.readouterr().out
    assert f"warning: {sums} was altered or is gone" in said
    assert f"{tokenizer} was altered or is gone: the tokenizer is written again" in said
    assert tokenizer.read_bytes() == good
