"""wandb offline and tensorboard, for real where they are installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.tracking import RunInfo, Tracker

SCRIPT = """
import sys
from pathlib import Path
from holdfast.tracking import RunInfo, Tracker
config = {"training": {"seed": 1}, "data/root": sys.argv[1] + "/places"}
info = RunInfo(Path(sys.argv[1]), name="try", id="same id", config=config)
with Tracker.open(["wandb"], info) as tracker:
    tracker.log("train", 1, 8, {"loss": 2.5, "rows": {"a": 1}})
    tracker.log("validation", 1, 8, {"loss": 2.0})
    assert tracker.sink("wandb") is not None
assert "wandb" in sys.modules
"""


@pytest.mark.extra
def test_wandb_offline_stays_inside_the_run_directory(tmp_path):
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    environment |= {"WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_DATA_DIR": str(tmp_path / "data")}
    run = tmp_path / "run"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(run)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "switched off" not in done.stderr
    files = list((run / "wandb").glob("offline-run-*-same-id/run-same-id.wandb"))
    assert files
    content = files[-1].read_bytes()
    assert b"train/loss" in content or b"train.loss" in content
    for place in (tmp_path, Path(sys.executable).parent, os.uname().nodename):  # what is synchronised tells no place
        assert str(place).encode() not in content
    assert not (tmp_path / "wandb").exists()


@pytest.mark.extra
def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    with Tracker.open(["tensorboard"], RunInfo(tmp_path)) as tracker:
        tracker.log("train", 1, 8, {"loss": 2.5, "grad_norm": None})
        tracker.log("message", values={"text": "no scalar"})
        tracker.flush()
    (file,) = (tmp_path / "tensorboard").glob("events.*")
    assert b"train/loss" in file.read_bytes()


def test_extras_are_imported_only_when_asked_for(tmp_path):
    code = (
        "import sys, json; from holdfast import registry; from holdfast.tracking import *; registry.trackers.names();"
        "print(json.dumps([m for m in ('wandb', 'tensorboardX', 'jax') if m in sys.modules]))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == []
