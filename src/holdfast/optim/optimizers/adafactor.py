"""Adafactor (Shazeer & Stern 2018): second moments of a matrix from its row and column sums.

Optax scales by the learning rate before it scales by the parameter's size; without momentum the two
commute, so the direction needs no learning rate. Momentum would average scaled updates and is left out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.config import field
from holdfast.registry import optimizers

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class AdafactorConfig:
    """Options of Adafactor."""

    decay_rate: float = field(
        "optimization/adafactor/decay_rate", default=0.8, gt=0, lt=1, help="second-moment rate is 1 - step^-decay_rate"
    )
    clip_threshold: float = field(
        "optimization/adafactor/clip_threshold", default=1.0, ge=0, help="largest RMS of a parameter's update; 0: off"
    )
    parameter_scale: bool = field(
        "optimization/adafactor/parameter_scale",
        default=True,
        help="scale updates by the parameter's RMS; lr is then relative (try 0.01)",
    )
    min_dim_size_to_factor: int = field(
        "optimization/adafactor/min_dim_size_to_factor", default=128, ge=1, help="smaller matrices are not factored"
    )
    epsilon: float = field("optimization/adafactor/epsilon", default=1e-30, gt=0, help="added to squared gradients")


@optimizers.register("adafactor", config=AdafactorConfig, help="factored second moments; almost no optimizer memory")
def adafactor(config: AdafactorConfig) -> "optax.GradientTransformation":
    """The descent direction of Adafactor."""
    import optax

    return optax.adafactor(
        learning_rate=None,
        min_dim_size_to_factor=config.min_dim_size_to_factor,
        decay_rate=config.decay_rate,
        multiply_by_parameter_scale=config.parameter_scale,
        clipping_threshold=config.clip_threshold or None,
        eps=config.epsilon,
    )
