"""A tracker hands events on; a sink that fails is named once, dropped, and never stops the others."""

import importlib.util
from pathlib import Path

import pytest

from holdfast import registry
from holdfast.config import build, configure
from holdfast.errors import UserError
from holdfast.tracking import Event, RunInfo, Sink, Tracker, TrackingConfig


class Memory(Sink):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def log(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Broken(Sink):
    def log(self, event: Event) -> None:
        raise OSError("disk\nfull")

    def close(self) -> None:
        raise OSError("still full")


def test_a_failing_sink_is_dropped_after_one_warning(capsys):
    memory = Memory()
    with Tracker({"broken": Broken(), "memory": memory}) as tracker:
        tracker.log("train", 1, 8, {"loss": 2.0})
        tracker.log("train", 2, 16, {"loss": 1.5})
        assert tracker.sink("broken") is None
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == ["warning: the tracker 'broken' failed and is switched off: OSError: disk full"]
    assert [event.step for event in memory.events] == [1, 2]
    assert memory.closed


def test_sinks_are_closed_when_the_run_fails():
    memory = Memory()
    with pytest.raises(KeyError), Tracker({"memory": memory}):
        raise KeyError("run")
    assert memory.closed


def test_a_sink_that_cannot_open_is_only_a_warning(tmp_path, monkeypatch, capsys):
    entries = dict(registry.trackers._entries)
    monkeypatch.setattr(registry.trackers, "_entries", entries)

    @registry.trackers.register("refusing")
    def refusing(info: RunInfo) -> Sink:
        raise ConnectionError("no route")

    with Tracker.open(["jsonl", "refusing"], RunInfo(tmp_path)) as tracker:
        tracker.log("train", 1, 8, {"loss": 2.0})
    assert "'refusing' failed" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_built_in_trackers_and_names():
    assert registry.trackers.names() == ["console", "jsonl", "mlflow", "tensorboard", "trackio", "wandb"]
    assert TrackingConfig(trackers=["jsonl"]).sink_names() == ["jsonl", "console"]
    tree = build(TrackingConfig)
    tree.logging.trackers = ["consol"]
    with pytest.raises(UserError, match=r"logging/trackers/0: .*did you mean 'console'"):
        configure(TrackingConfig, tree)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'holdfast\[wandb\]'"):
        TrackingConfig().sink_names(wandb=True)
    with pytest.raises(UserError, match=r"pip install 'holdfast\[tensorboard\]'"):
        Tracker.open(["tensorboard"], RunInfo(Path()))


def test_unknown_kinds_are_refused():
    with pytest.raises(AssertionError):
        Event("trian")


def test_stage_names_around_a_boundary():
    info = RunInfo(Path(), stages=((0, "a"), (4, "b"), (5, "c")))
    assert [info.stage_name(step) for step in (0, 1, 4, 5, 6, 100)] == ["a", "a", "a", "b", "c", "c"]
    assert RunInfo(Path()).stage_name(3) == ""
