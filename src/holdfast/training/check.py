"""Check a whole configuration before anything is built; nothing here imports JAX."""

from typing import Any

from omegaconf import DictConfig

from holdfast import registry
from holdfast.training.blueprint import Blueprint, draw
from holdfast.training.curricula import curriculum_for
from holdfast.training.settings import Settings


def checked(job: str, cfg: DictConfig) -> Blueprint[Any]:
    """The blueprint of a job with these options; what is wrong is a UserError that names its path."""
    config = registry.jobs.config(job)
    assert config is not None, f"the job {job} was registered without a config class"
    settings: Settings[Any] = Settings.read(config, cfg)
    return draw(settings, curriculum_for(settings))
