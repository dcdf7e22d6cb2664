"""The options that every optimizer and schedule shares."""

from dataclasses import dataclass
from typing import List, Optional

from holdfast import registry
from holdfast.config import field


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the weights of the base stay as they are, and small matrices beside them are trained."""

    rank: int = field(
        "optimization/lora/rank",
        resume="branch",
        default=0,
        ge=0,
        le=2**16,
        help="rank of low-rank adapters on a frozen base; 0: train the model",
    )
    alpha: float = field(
        "optimization/lora/alpha",
        resume="branch",
        default=16.0,
        gt=0,
        le=1e6,
        help="adapters are scaled by alpha / rank when they are added",
    )
    targets: List[str] = field(
        "optimization/lora/targets",
        resume="branch",
        default_factory=list,
        help="projections with adapters: q, k, v, o, up, gate, down, or globs over names; empty: all of them",
    )


@dataclass(frozen=True)
class SamConfig:
    """Sharpness-aware minimisation around any optimizer: the gradient is taken a little uphill."""

    rho: float = field(
        "optimization/sam/rho",
        resume="branch",
        default=0.0,
        ge=0,
        le=10,
        help="how far uphill along the gradient a second gradient is taken, which the step follows; 0: off",
    )


@dataclass(frozen=True)
class OptimConfig:
    """Which optimizer and schedule to use, and what surrounds every optimizer: clipping and weight decay."""

    optimizer: Optional[str] = field("optimization/optimizer", default=None, help="optimizer; null: the job's own")
    schedule: Optional[str] = field(
        "optimization/schedule", default=None, help="learning-rate schedule; null: the job's own"
    )
    weight_decay: float = field(
        "optimization/weight_decay",
        default=0.1,
        ge=0,
        le=1000,
        help="decoupled decay of kernels and embeddings, times lr",
    )
    clip_norm: float = field(
        "optimization/clip_norm", default=1.0, ge=0, le=1e12, help="largest global gradient norm; 0: off"
    )
    final_lr_ratio: float = field(
        "optimization/final_lr_ratio",
        default=0.1,
        ge=0,
        le=1,
        help="learning rate at the end of decay, as a share of lr",
    )
    freeze: List[str] = field(
        "optimization/freeze",
        resume="branch",
        default_factory=list,
        help="parameters that stay as they are: globs over names, such as embed*, layers/mlp, layers/0-3/*",
    )
    lora: LoraConfig = LoraConfig()
    sam: SamConfig = SamConfig()

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            registry.optimizers.get(self.optimizer, path="optimization/optimizer")
        if self.schedule is not None:
            registry.schedules.get(self.schedule, path="optimization/schedule")
