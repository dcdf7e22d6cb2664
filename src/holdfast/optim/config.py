"""The options that every optimizer and schedule shares."""

from dataclasses import dataclass
from typing import Optional

from holdfast import registry
from holdfast.config import field


@dataclass(frozen=True)
class OptimConfig:
    """Which optimizer and schedule to use, and what surrounds every optimizer: clipping and weight decay."""

    optimizer: Optional[str] = field("optimization/optimizer", default=None, help="optimizer; null: the job's own")
    schedule: Optional[str] = field(
        "optimization/schedule", default=None, help="learning-rate schedule; null: the job's own"
    )
    weight_decay: float = field(
        "optimization/weight_decay", default=0.1, ge=0, help="decoupled decay of kernels and embeddings, times lr"
    )
    clip_norm: float = field("optimization/clip_norm", default=1.0, ge=0, help="largest global gradient norm; 0: off")
    final_lr_ratio: float = field(
        "optimization/final_lr_ratio", default=0.1, ge=0, le=1, help="learning rate after decay, as a share of lr"
    )

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            registry.optimizers.get(self.optimizer, path="optimization/optimizer")
        if self.schedule is not None:
            registry.schedules.get(self.schedule, path="optimization/schedule")
