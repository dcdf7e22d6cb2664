"""The results of a run reach the sinks that show them, and none of them can stop a run."""

import json
from pathlib import Path

import pytest

from fake_runs import FakeRun
from holdfast.report import write_report
from holdfast.tracking import RunInfo, Tracker
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import Sink


class Kept(Sink):
    """Keeps what it is told; or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.told = fails, []

    def log(self, event: Event) -> None:
        pass

    def summarize(self, step, results, pictures) -> None:
        if self.fails:
            raise RuntimeError("no network")
        self.told.append((step, results["tasks"], sorted(pictures)))


class Plain(Sink):
    """A sink that was written before there were summaries."""

    def log(self, event: Event) -> None:
        pass


def test_results_and_pictures_reach_every_sink(tmp_path: Path, capsys) -> None:
    run = FakeRun(tmp_path, stages=2, probes=False).go()
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss.png").write_bytes(b"")
    good, bad = Kept(), Kept(fails=True)
    tracker = Tracker({"bad": bad, "plain": Plain(), "good": good})
    tracker.summarize(run.total_steps, tmp_path)
    assert good.told == [(run.total_steps, ["mnli", "stories"], ["loss"])]
    assert tracker.sink("bad") is None
    assert "no network" in capsys.readouterr().err


def test_without_results_nothing_is_told(tmp_path: Path) -> None:
    kept = Kept()
    Tracker({"kept": kept}).summarize(1, tmp_path)
    assert kept.told == []


def test_pictures_are_written_where_a_tracker_shows_them(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, stages=2, probes=False)
    write_report(run.go().path, pictures=None)
    assert not (tmp_path / "figures").exists()
    config = (tmp_path / "config.yaml").read_text()
    assert "tensorboard: false" in config
    (tmp_path / "config.yaml").write_text(config.replace("tensorboard: false", "tensorboard: true"))
    write_report(tmp_path, pictures=None)
    assert (tmp_path / "figures" / "loss.png").exists()


@pytest.mark.extra
def test_tensorboard_holds_matrix_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run = FakeRun(tmp_path, stages=2, probes=False).go()
    write_report(tmp_path)
    with Tracker.open(["tensorboard"], RunInfo(tmp_path)) as tracker:
        tracker.summarize(run.total_steps, tmp_path)
        assert tracker.sink("tensorboard") is not None
    [events] = list((tmp_path / "tensorboard").iterdir())
    data = events.read_bytes()
    assert json.loads((tmp_path / "results.json").read_text())["metrics"]
    for name in (b"results/nll/forgetting", b"matrix/accuracy", b"report/loss", b"\x89PNG"):
        assert name in data
