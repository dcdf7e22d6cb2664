"""A job in a few lines, for notebooks.

with quick("gpt/train/pretrain", name="try") as job:
    job.config.training.batch_size = 8
    job.run()
job.results
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from holdfast import registry
from holdfast.config import build, merge
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.report.frames import Results


class QuickJob:
    """A job whose options can be set as attributes before it runs."""

    def __init__(self, job: str, name: str, project: str, group: str, root: Path) -> None:
        from holdfast.training.config import config_classes

        registry.jobs.config(job)  # an unknown job is an error here
        self.job = job
        self._classes = config_classes(job)
        self._place: Json = {"name": name, "project": project, "group": group, "root": root}
        self.config: DictConfig = build(*self._classes)

    @property
    def run_dir(self) -> Path:
        """Where the run's files are."""
        place = self._place
        return Path(place["root"]) / str(place["project"]) / str(place["group"]) / str(place["name"])

    def set(self, *overrides: str) -> None:
        """Set options as the command line does: `job.set("training.batch_size=8 optimization.lr=0.003")`.

        A value that holds spaces is an argument of its own: `job.set("stages.0.name=two words")`.
        """
        separate = [part for text in overrides for part in (text.split() if text.count("=") > 1 else [text.strip()])]
        self.config = self._merged(separate)

    def run(self) -> "Results":
        """Train to the end, or go on where an earlier run of that name stopped; returns the results.

        Raises:
            KeyboardInterrupt: the run was stopped; a checkpoint was written, and the same call goes on.
        """
        cfg = self._merged([])
        from holdfast.execution import ExecutionSpec
        from holdfast.report import write_report
        from holdfast.training.resolve import resolve
        from holdfast.training.run import start_run

        spec = ExecutionSpec(**self._place, on_results=functools.partial(write_report, pictures=None))
        if start_run(resolve(self.job, cfg), spec):
            raise KeyboardInterrupt(f"{self.run_dir}: stopped; the same call goes on")
        return self.results

    @property
    def results(self) -> "Results":
        """What the run has shown so far: a DataFrame that a notebook shows as sentence, matrix and curves."""
        from holdfast import results

        return results.load(self.run_dir)

    def _merged(self, overrides: list[str]) -> DictConfig:
        values = OmegaConf.to_container(self.config, resolve=False)
        assert isinstance(values, dict)
        return merge(self._classes, {str(key): value for key, value in values.items()}, overrides)


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
