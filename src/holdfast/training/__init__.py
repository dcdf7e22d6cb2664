"""Trainers: the spec's classes. Names are imported when first used, so that options can be read without JAX."""

import importlib
from typing import Any

_HOMES = {
    "ABCDBaseTrainer": "abcd",
    "ABCDKLDivergenceTrainer": "abcd",
    "BaseTrainer": "base",
    "KLDivergenceTrainer": "kl_divergence",
    "KLDivergenceTrainState": "state",
    "TrainState": "state",
    "ABCDConfig": "config",
    "ABCDKLConfig": "config",
    "BaseTrainerConfig": "config",
    "KLConfig": "config",
    "KLDivergenceTrainerConfig": "config",
    "PenaltyConfig": "config",
    "RunConfig": "config",
    "StagesConfig": "config",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
