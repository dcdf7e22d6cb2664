"""A job in a few lines, for notebooks.

with quick("gpt/train/pretrain", name="try") as job:
    job.config.training.batch_size = 8
    job.run()
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from holdfast import registry
from holdfast.config import build, merge


class QuickJob:
    """A job whose options can be set as attributes before it runs."""

    def __init__(self, job: str, name: str, project: str, group: str, root: Path) -> None:
        from holdfast.training.jobs import config_classes

        registry.jobs.config(job)  # an unknown job is an error here
        self.job = job
        self._classes = config_classes(job)
        self._place: dict[str, Any] = {"name": name, "project": project, "group": group, "root": root}
        self.config: DictConfig = build(*self._classes)

    @property
    def run_dir(self) -> Path:
        """Where the run's files are."""
        place = self._place
        return Path(place["root"]) / str(place["project"]) / str(place["group"]) / str(place["name"])

    def run(self) -> Any:
        """Train to the end, or go on where an earlier run of that name stopped; returns the exit code."""
        values = OmegaConf.to_container(self.config, resolve=False)
        assert isinstance(values, dict)
        cfg = merge(self._classes, {str(key): value for key, value in values.items()})
        from holdfast.report import write_report
        from holdfast.training.check import checked
        from holdfast.training.start import start_run

        checked(self.job, cfg)
        return start_run(self.job, cfg, **self._place, on_results=write_report)


@contextlib.contextmanager
def quick(
    job: str,
    name: str = "quick",
    *,
    project: str = "general",
    group: str = "default",
    root: Path | str = Path("runs"),
) -> Iterator[QuickJob]:
    """A job by name, with its default options to be changed before `run()`."""
    yield QuickJob(job, name, project, group, Path(root))
