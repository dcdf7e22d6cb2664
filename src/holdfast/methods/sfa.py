"""Sequential fine-tuning with averaging (Kleiman et al. 2025, arXiv 2501.05559).

Every p·T steps of a stage of T, and at its end, θ ← β θ* + (1 − β) θ, θ* being the weights when the stage began. The
optimizer's moments stay.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast.config import field
from holdfast.methods.method import Method, MethodConfig, StageData, State
from holdfast.methods.refusals import StageFacts, refuse_adapters
from holdfast.registry import methods
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class SFAConfig(MethodConfig):
    """Options of averaging."""

    stages: Optional[List[int]] = field(
        "methods/sfa/stages",
        resume="unused",
        default=None,
        help="stages in which it averages (0-based); null = all from the second on",
        ge=0,
    )
    period: float = field(
        "methods/sfa/period",
        resume="unused",
        default=0.25,
        help="steps between averages, as a share of the stage's; its last step always has one",
        gt=0,
        le=1,
    )
    beta: float = field(
        "methods/sfa/beta",
        resume="unused",
        default=0.5,
        help="share of the weights at the stage's start in an average; 0 = none",
        ge=0,
        le=1,
    )

    def check(self, about: StageFacts) -> None:
        """It averages weights, not adapters."""
        refuse_adapters(about, "the average of two adapters is not the adapter of the averaged weights")


@methods.register("sfa", config=SFAConfig, help="average the weights with those of the stage's start, now and then")
@dataclass(frozen=True)
class SFA(Method):
    """The memory is the weights when the stage began."""

    config: SFAConfig

    def init(self, params: Tree) -> Tree:
        """The weights as they are."""
        from holdfast.methods import trees

        return trees.copy(params)

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The weights as they are now."""
        return self.init(state.trained())

    def weights(self, memory: Tree, params: Tree, reference: Tree | None, step: "jax.Array") -> Tree:
        """The average β θ* + (1 − β) θ, as θ + β (θ* − θ): what has not moved stays as it is to the bit."""
        import jax
        import jax.numpy as jnp

        beta = self.config.beta
        if beta == 0:
            return params
        position = self.position(step)
        every = self.config.period * position.num_steps
        # The multiples are rounded, not the period: with a rounded one a stage of 101 steps would end on two averages.
        due = (jnp.round(jnp.round(position.step / every) * every) == position.step) | (
            position.step == position.num_steps
        )

        def averaged(start: "jax.Array", own: "jax.Array") -> "jax.Array":
            wide = own.astype(jnp.float32)
            return jnp.where(due, (wide + beta * (start - wide)).astype(own.dtype), own)

        return jax.tree.map(averaged, memory, params)
