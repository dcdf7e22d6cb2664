"""Optimizers and learning-rate schedules, by name; importing this package does not import JAX."""

from holdfast.optim.build import Optimizer, build_optimizer, decay_mask, state_shardings
from holdfast.optim.config import OptimConfig
from holdfast.optim.schedules import (
    PiecewiseSchedule,
    Schedule,
    ScheduleContext,
    Segment,
    build_schedule,
    learning_rates,
    piecewise,
    scaled,
)

__all__ = [
    "OptimConfig",
    "Optimizer",
    "PiecewiseSchedule",
    "Schedule",
    "ScheduleContext",
    "Segment",
    "build_optimizer",
    "build_schedule",
    "decay_mask",
    "learning_rates",
    "piecewise",
    "scaled",
    "state_shardings",
]
