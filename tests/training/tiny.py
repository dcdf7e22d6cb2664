"""Tiny trainers for tests: real data that needs no download, models of a few thousand parameters."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from holdfast.config import merge
from holdfast.execution import ExecutionSpec
from holdfast.execution.topology import TopologyConfig
from holdfast.training.jobs import config_classes
from holdfast.training.start import make_trainer

PRETRAIN: dict[str, Any] = {
    "training": {
        "batch_size": 8,
        "tokens": 8 * 32 * 20,
        "dataset": [
            {"name": "arithmetic", "rate": 0.75, "style": "PADDED"},
            {"name": "lists", "rate": 0.25, "style": "PADDED"},
        ],
        "validation_steps": 8,
    },
    "architecture": {"block_size": 32, "preset": "tiny", "n_layers": 2, "n_embd": 32, "n_head": 4},
    "logging": {"report_interval": 1, "checkpoint_interval": 8, "validation_interval": 10},
    "eval": {"evaluations": ["arithmetic"], "limit": 8},
}

CONTINUAL: dict[str, Any] = {
    "stages": [
        {"tokens": 8 * 32 * 8, "data": [{"name": "lists", "style": "PADDED"}]},
        {
            "tokens": 8 * 32 * 8,
            "data": [{"name": "arithmetic", "style": "PADDED"}],
            "beta": 0.5,
            "update_reference": True,
            "overlap": 0.5,
        },
    ],
    "training": {"batch_size": 8, "validation_steps": 8},
    "optimization": {"kl": {"estimator": "forward"}, "lr": 0.003},
    "architecture": PRETRAIN["architecture"],
    "logging": PRETRAIN["logging"],
    "eval": {"evaluations": ["arithmetic", "lists"], "limit": 8},
}


def options(job: str, values: dict[str, Any], *overrides: str) -> DictConfig:
    """The complete options of a job."""
    return merge(config_classes(job), values, list(overrides))


def trainer(job: str, values: dict[str, Any], folder: Path, *overrides: str, name: str = "run", **axes: int) -> Any:
    """A trainer that writes below a folder."""
    spec = ExecutionSpec.local(folder, name=name, topology=TopologyConfig(**axes))
    return make_trainer(job, options(job, values, *overrides), spec)
