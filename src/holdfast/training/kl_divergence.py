"""KL divergence trainer: stage 1 is plain pretraining, stage 2 adds a penalty against the stage-1 policy.

The spec's penalty, `nll_difference`, is the difference in per-token NLL between the current model and the
reference on the same batch. `optimization/kl/estimator` chooses exact KL divergences instead.
"""

from typing import Any, Generic, Tuple, TypeVar

from holdfast.training.base import BaseTrainer
from holdfast.training.config import KLConfig, KLDivergenceTrainerConfig, RunOptions
from holdfast.training.state import KLDivergenceTrainState, TrainState

C = TypeVar("C", bound=KLDivergenceTrainerConfig)
M = TypeVar("M")

__all__ = ["KLConfig", "KLDivergenceTrainState", "KLDivergenceTrainer", "KLDivergenceTrainerConfig"]


class KLDivergenceTrainer(BaseTrainer[C, M], Generic[C, M]):
    """Two-stage trainer with KL-divergence penalty.

    - Stage 1: standard language-model pretraining (cross-entropy only).
    - Stage 2: pretraining loss plus `beta * KL(policy || reference)` where the reference policy is a frozen
      snapshot taken at the stage boundary.
    """

    CONFIG: type[Any] = KLDivergenceTrainerConfig
    STATE: type[TrainState] = KLDivergenceTrainState

    @classmethod
    def penalties(cls, options: RunOptions) -> Tuple[str, ...]:
        """The estimator that the options name."""
        return (options.penalty.estimator,)
