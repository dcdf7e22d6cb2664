"""Continual-learning trainers over any number of datasets, A → B → C → D, with fades between them."""

from typing import Any, Generic, Optional, TypeVar

from holdfast.curriculum import FadeConfig
from holdfast.optim import Schedule
from holdfast.training.base import BaseTrainer
from holdfast.training.config import ABCDConfig, ABCDKLConfig
from holdfast.training.kl_divergence import KLDivergenceTrainer

C = TypeVar("C", bound=ABCDConfig)
CKL = TypeVar("CKL", bound=ABCDKLConfig)
M = TypeVar("M")

__all__ = ["ABCDBaseTrainer", "ABCDConfig", "ABCDKLConfig", "ABCDKLDivergenceTrainer", "FadeConfig"]


class ABCDBaseTrainer(BaseTrainer[C, M], Generic[C, M]):
    """Standard continual learning with optional gradual fade between datasets.

    When `fade.overlap > 0`, adjacent dataset segments overlap so that the model transitions gradually rather
    than hard-switching at boundaries.
    """

    CONFIG: type[Any] = ABCDConfig

    @classmethod
    def schedule(cls) -> Optional[str | Schedule]:
        """Warm-up, stable, decay, stable."""
        return "wsds"


class ABCDKLDivergenceTrainer(KLDivergenceTrainer[CKL, M], Generic[CKL, M]):
    """Multi-stage continual-learning trainer with per-stage KL penalties.

    - Any number of stages (≥ 2).
    - Per-stage `beta` values control KL penalty strength (0 = off).
    - `reference_update_stages` specifies at which stage boundaries the reference policy snapshot is refreshed.
    - Optional gradual fade between adjacent datasets via `FadeConfig`.
    """

    CONFIG: type[Any] = ABCDKLConfig

    @classmethod
    def schedule(cls) -> Optional[str | Schedule]:
        """Warm-up, stable, decay, stable."""
        return "wsds"
