"""AdamW (Loshchilov & Hutter 2019), with the second-moment rate that language models are trained with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from holdfast.config import field
from holdfast.registry import optimizers

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class AdamWConfig:
    """Options of AdamW."""

    beta1: float = field("optimization/adamw/beta1", default=0.9, ge=0, lt=1, help="decay rate of the first moment")
    beta2: float = field("optimization/adamw/beta2", default=0.95, ge=0, lt=1, help="decay rate of the second moment")
    epsilon: float = field("optimization/adamw/epsilon", default=1e-8, gt=0, help="added to the root second moment")
    moment_dtype: Optional[str] = field(
        "optimization/adamw/moment_dtype",
        default=None,
        choices=("float32", "bfloat16"),
        help="dtype of the first moment; null: the parameters' own",
    )


@optimizers.register("adamw", config=AdamWConfig, help="Adam with decoupled weight decay")
def adamw(config: AdamWConfig) -> "optax.GradientTransformation":
    """The descent direction of Adam."""
    import optax

    return optax.adam(1.0, config.beta1, config.beta2, config.epsilon, mu_dtype=config.moment_dtype)
