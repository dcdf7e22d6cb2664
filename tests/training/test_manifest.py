"""May this configuration go on from that checkpoint: edited plans, options that are new, appended stages."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.execution import processes
from holdfast.execution.checkpoints import list_checkpoints, write_manifest
from holdfast.report import open_run
from holdfast.training import loop, manifest
from holdfast.training.manifest import check_same, digest_of, shared_facts
from training import tiny
from training.tiny import continual, copy_until


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
    tiny.resume(longer, lines.append)
    assert int(longer.state.step) == 8
    assert any("stages" in line for line in lines)


def test_a_checkpoint_from_before_an_option_had_its_default(whole: Any, tmp_path: Path) -> None:
    copy_until(whole, tmp_path, 8)
    probes = ("eval.probe_interval=2", "eval.probe_window=2")
    for info in list_checkpoints(tmp_path / "general" / "default" / "run" / "checkpoints"):
        manifest = {**info.manifest, "config": dict(info.manifest["config"])}
        del manifest["config"]["training/ema"], manifest["config"]["training/z_loss"]
        write_manifest(info.path, manifest)
    with pytest.raises(UserError, match=r"training/z_loss: was 0\.0, is 0\.1"):
        continual(tmp_path, *probes, "training.z_loss=0.1").run()
    lines: list[str] = []
    tiny.resume(continual(tmp_path, *probes), lines.append)
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
    monkeypatch.setattr(loop.TrainLoop, "enter", lambda self, step: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        longer.run()
    tags = {info.step: set(info.tags) for info in list_checkpoints(run_dir / "checkpoints")}
    before = {info.step: set(info.tags) for info in list_checkpoints(whole.checkpoint_dir)}
    assert tags == {**before, 16: before[16] - {"final"} | {"boundary_2"}}
    assert not json.loads((run_dir / "results.json").read_text())["finished"]
    assert not open_run(run_dir).finished
    again = continual(tmp_path, *probes)  # and the appended stage taken back
    tiny.resume(again)
    assert {info.step: set(info.tags) for info in list_checkpoints(run_dir / "checkpoints")} == before


def test_processes_that_were_given_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One host with a stale config, another version or plug-in; where files lie may differ."""
    first = tiny.resolved("continual/train/abcd_kl", tiny.CONTINUAL)
    place = {"--name": "run"}

    def others(run: Any, place: dict[str, str]) -> None:
        """Process 0 is the first run, process 1 the other one."""
        theirs = {**shared_facts(first), "--name": "run"}
        answers = [[digest_of(theirs)], [theirs]]
        monkeypatch.setattr(processes, "gather", lambda value: [*answers.pop(0), value])
        check_same(run, place)

    others(
        tiny.resolved("continual/train/abcd_kl", tiny.CONTINUAL, f"data.cache={tmp_path}", f"data.root={tmp_path}"),
        place,
    )
    lr = tiny.resolved("continual/train/abcd_kl", tiny.CONTINUAL, "optimization.lr=0.3")
    with pytest.raises(UserError, match=r"process 1 .*\n  optimization/lr: 0\.003 in process 0, 0\.3 here\n"):
        others(lr, place)
    with pytest.raises(UserError, match="--name: 'run' in process 0, 'other' here"):
        others(first, {"--name": "other"})
    for name in ("the version of holdfast", "--plugin mine"):
        monkeypatch.setattr(manifest, "shared_facts", lambda run, name=name: {**shared_facts(run), name: "0.0.0"})
        with pytest.raises(UserError, match=name):
            others(first, place)
