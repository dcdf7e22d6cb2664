"""Stochastic gradient descent, with momentum when asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.config import field
from holdfast.registry import optimizers

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class SGDConfig:
    """Options of gradient descent."""

    momentum: float = field("optimization/sgd/momentum", default=0.0, ge=0, lt=1, help="decay rate of past gradients")
    nesterov: bool = field("optimization/sgd/nesterov", default=False, help="look ahead along the momentum")


@optimizers.register("sgd", config=SGDConfig, help="gradient descent, with optional momentum")
def sgd(config: SGDConfig) -> "optax.GradientTransformation":
    """The descent direction of gradient descent; momentum sums plain gradients, so the learning rate stays outside."""
    import optax

    return optax.chain(
        optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity(), optax.scale(-1.0)
    )
