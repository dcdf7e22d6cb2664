"""`holdfast profile` prints where the time goes and leaves no run behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.profile import profile_command
from holdfast.errors import ConfigError
from holdfast.training import base
from training.tiny import CONTINUAL

JOB = "continual/train/abcd_kl"


def config(folder: Path) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"job": JOB, **CONTINUAL}))
    return path


def test_it_says_where_the_time_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    searched: list[Any] = []
    choose = base.choose_micro_batch

    def noted(*arguments: Any) -> Any:
        searched.append(choose(*arguments))
        return searched[-1]

    monkeypatch.setattr(base, "choose_micro_batch", noted)
    profile_command(config(tmp_path), ["training.per_device_batch_size=-1"], steps=1)
    said = capsys.readouterr().out
    for words in (
        "compiled step",
        "data: wait",
        "host: the loop",
        "tokens/s",
        "of the matrix-product peak",
        "compiling",
    ):
        assert words in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "profiles"]
    assert sorted(path.name for path in (tmp_path / "profiles" / "mine").iterdir()) == [
        "perfetto_trace.json.gz",
        "profile.json",
    ]
    # The search for a micro-batch has compiled the step, so its time is part of what compiling took.
    told = json.loads((tmp_path / "profiles" / "mine" / "profile.json").read_text())
    assert told["compile"] >= searched[0].seconds > 0


def test_a_mistake_is_named_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="training/batch_size"):
        profile_command(config(tmp_path), ["training.batch_size=0"])
    assert not (tmp_path / "profiles").exists()
