"""A study that is trained in seconds, for tests."""

from pathlib import Path
from typing import Any

import yaml

from holdfast.studies.study import Study, read_study

CONFIG: dict[str, Any] = {
    "job": "continual/train/abcd_kl",
    "stages": [
        {"name": "lists", "tokens": 2048, "data": [{"name": "lists", "style": "PADDED"}]},
        {"name": "arithmetic", "tokens": 1024, "data": [{"name": "arithmetic", "style": "PADDED"}]},
    ],
    "training": {"batch_size": 8, "validation_steps": 8, "validation": False},
    "optimization": {"lr": 0.003, "schedule": "constant"},
    "architecture": {"block_size": 32, "preset": "tiny", "n_layers": 1, "n_embd": 16, "n_head": 2},
    "eval": {"evaluations": []},
    "logging": {"report_interval": 1, "checkpoint_interval": 3, "trackers": []},
}

STUDY: dict[str, Any] = {
    "config": CONFIG,
    "old": ["lists"],
    "new": "arithmetic",
    "seeds": [0],
    "plain": {"rates": [0.1, 1], "early": [0.5], "interpolations": [0.5]},
    "arms": {
        "replay 25 %": {"set": ["training.replay={rate: 0.25}"]},
        "averaging": {"weights": "interpolated", "shares": [0.5]},
    },
}


def write_study(folder: Path, **changes: Any) -> Path:
    """The file of the study with some keys changed; None removes one."""
    values = {key: value for key, value in {**STUDY, **changes}.items() if value is not None}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def tiny(folder: Path, **changes: Any) -> Study:
    """The study, read."""
    return read_study(write_study(folder, **changes))
