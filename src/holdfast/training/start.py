"""Start a job by name: devices, compilation cache, trainer, run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import configuration, configure
from holdfast.data.config import DataConfig
from holdfast.execution import ExecutionSpec, TopologyConfig, processes
from holdfast.training import loop
from holdfast.training.stopping import Interrupted


def start_run(
    job: str,
    cfg: DictConfig,
    *,
    name: str,
    project: str,
    group: str,
    root: Path,
    parent: str | None = None,
    init_from: str | None = None,
    on_results: Callable[[Path], object] | None = None,
) -> int:
    """Run a job to its end; returns the exit code, above 128 when a signal stopped it."""
    use_compilation_cache(cfg)
    with processes.together():
        topology = configure(TopologyConfig, cfg)
        spec = ExecutionSpec.local(root, name=name, project=project, group=group, topology=topology)
        trainer = make_trainer(job, cfg, spec)
    try:
        loop.run(trainer, parent=parent, init_from=init_from, on_results=on_results)
    except Interrupted as stopped:
        if processes.is_first():
            print(stopped)
        return 128 + stopped.signal_number
    return 0


def make_trainer(job: str, cfg: DictConfig, spec: ExecutionSpec) -> Any:
    """The trainer of a job, built from a tree of options."""
    with configuration(cfg):
        return registry.jobs.get(job)(spec)


def use_compilation_cache(cfg: DictConfig) -> None:
    """Keep compiled steps in the cache folder, so that a second start is quick."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # flags are made at run time
        folder = configure(DataConfig, cfg).cache_path() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
