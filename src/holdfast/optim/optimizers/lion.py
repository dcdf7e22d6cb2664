"""Lion (Chen et al. 2023): the sign of an interpolated momentum; wants a smaller lr and a larger decay than AdamW."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from holdfast.config import field
from holdfast.registry import optimizers

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class LionConfig:
    """Options of Lion."""

    beta1: float = field("optimization/lion/beta1", default=0.9, ge=0, lt=1, help="share of momentum in the update")
    beta2: float = field("optimization/lion/beta2", default=0.99, ge=0, lt=1, help="decay rate of the momentum")
    moment_dtype: Optional[str] = field(
        "optimization/lion/moment_dtype",
        default=None,
        choices=("float32", "bfloat16"),
        help="dtype of the momentum; null: the parameters' own",
    )


@optimizers.register("lion", config=LionConfig, help="sign of the momentum; half of AdamW's memory")
def lion(config: LionConfig) -> "optax.GradientTransformation":
    """The descent direction of Lion."""
    import optax

    return optax.lion(1.0, config.beta1, config.beta2, mu_dtype=config.moment_dtype, weight_decay=0.0)
