"""Config files on the command line: which job, which options."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import JOB_KEY, merge, read_yaml
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.training.resolve import ResolvedRun


@dataclass(frozen=True)
class JobConfig:
    """A job and its complete, checked options."""

    job: str
    cfg: DictConfig
    classes: list[type]

    def resolved(self) -> "ResolvedRun":
        """The whole run, checked; what is wrong is found before JAX is imported."""
        from holdfast.training.resolve import resolve

        return resolve(self.job, self.cfg)


def read_config(path: Path, overrides: list[str]) -> JobConfig:
    """The job that a config file is for, with its options and the overrides, validated as far as possible."""
    values = read_yaml(path)
    job = values.pop(JOB_KEY, None)
    rest = []
    for override in overrides:
        if override.startswith(f"{JOB_KEY}="):
            job = override.partition("=")[2]
        else:
            rest.append(override)
    if not isinstance(job, str):
        raise UserError(f"{path}: {JOB_KEY}: expected the name of a job: {', '.join(registry.jobs.names())}")
    return job_config(job, values, rest)


def job_config(job: str, values: dict[str, object], overrides: list[str]) -> JobConfig:
    """A job's options: defaults, then values, then overrides."""
    from holdfast.training.config import config_classes

    if job not in registry.jobs:
        registry.jobs.get(job, path=JOB_KEY)  # raises, with the nearest name
    classes = config_classes(job)
    return JobConfig(job, merge(classes, values, overrides), classes)


def read_run(
    path: Path,
    overrides: list[str],
    name: str,
    project: str,
    group: str,
    parent: str | None = None,
    init_from: str | None = None,
) -> "ResolvedRun":
    """The checked run that is to start; what is wrong is found before JAX is imported."""
    from holdfast.execution.names import check_name

    if parent and init_from:
        raise UserError("--from and --init-from: choose one, a shared past or the weights alone")
    for value, option in ((name, "--name"), (project, "--project"), (group, "--group")):
        check_name(value, option)
    return read_config(path, overrides).resolved()
