"""Tiny trainers for tests: real data that needs no download, models of a few thousand parameters."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import DictConfig

from holdfast.config import merge
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.execution.topology import TopologyConfig
from holdfast.training import restore
from holdfast.training.config import config_classes
from holdfast.training.manifest import Progress
from holdfast.training.resolve import ResolvedRun, resolve
from holdfast.training.run import make_trainer

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


def resolved(job: str, values: dict[str, Any], *overrides: str) -> ResolvedRun:
    """A job with its options, resolved."""
    return resolve(job, options(job, values, *overrides))


def trainer(
    job: str,
    values: dict[str, Any],
    folder: Path,
    *overrides: str,
    name: str = "run",
    parent: str | None = None,
    **axes: int,
) -> Any:
    """A trainer that writes below a folder."""
    spec = ExecutionSpec.local(folder, name=name, topology=TopologyConfig(**axes))
    return make_trainer(resolved(job, values, *overrides), dataclasses.replace(spec, parent=parent))


def resume(trainer: Any, say: Any = print) -> Progress:
    """Put a trainer's state where its run goes on, as `run` does."""
    trainer.state, progress = restore.start(
        trainer.restorer, trainer.state, trainer.plan, trainer.triggers.tags, say, trainer.spec.parent
    )
    return progress


def continual(folder: Path, *overrides: str, name: str = "run", parent: str | None = None) -> Any:
    """A trainer of the two stages with an anchor."""
    return trainer("continual/train/abcd_kl", CONTINUAL, folder, *overrides, name=name, parent=parent)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def same_state(first: Any, second: Any) -> None:
    """Two trainers have the same arrays to the bit."""
    one, two = first.state.arrays(), second.state.arrays()
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def copy_until(whole: Any, folder: Path, step: int) -> None:
    """A run that was killed after a checkpoint."""
    target = folder / whole.spec.run_dir.relative_to(whole.spec.root)
    shutil.copytree(whole.spec.run_dir, target)
    for info in list_checkpoints(target / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)
