"""Averaged gradient episodic memory, A-GEM (Chaudhry et al. 2019, arXiv 1812.00420).

The step follows the gradient g of new rows alone. Old rows only say where it must not go: where g·g_old < 0, the part
of g along g_old is taken out. Under Adam the update may still oppose g_old, since moments and scaling come after it;
records say in which steps it did.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, List, Optional

from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.methods.method import Method, MethodConfig
from holdfast.methods.refusals import StageFacts
from holdfast.registry import methods
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class AGEMConfig(MethodConfig):
    """Options of A-GEM."""

    stages: Optional[List[int]] = field(
        "methods/agem/stages",
        resume="unused",
        default=None,
        help="stages in which it acts (0-based); null = all from the second on",
        ge=0,
    )
    needs_old_gradients: ClassVar[bool] = True

    def check(self, about: StageFacts) -> None:
        """Without the loss of old rows there is no gradient of theirs."""
        if not about.draws_old:
            raise about.refusal(
                f"old rows in stage {about.stage}: it has neither replay nor a fade, so that there is nothing to hold",
                "set training/replay, or say in methods/agem/stages where it acts",
            )
        replay = about.options.stages.replay
        if replay is not None and replay.objective == "kl":
            raise ConfigError(
                "training/replay/objective",
                "kl",
                "ce or both beside agem, which takes the gradient of the cross-entropy of old rows",
            )


@methods.register("agem", config=AGEMConfig, help="take out of the gradient what would undo old rows (A-GEM)")
@dataclass(frozen=True)
class AGEM(Method):
    """It has no memory: the old rows of each step are its episodic memory."""

    config: AGEMConfig

    def gradients(self, memory: Tree, gradients: Tree, old_gradients: Tree | None) -> Tree:
        """The gradient g, or g − (g·g_old / ‖g_old‖²) g_old where they point apart."""
        import jax
        import jax.numpy as jnp

        from holdfast.methods.trees import dot

        along, square = dot(gradients, old_gradients), dot(old_gradients, old_gradients)
        share = along / jnp.maximum(square, 1e-30)

        def projected(new: "jax.Array", old: "jax.Array") -> "jax.Array":
            return jnp.where(along < 0, new - (share * old).astype(new.dtype), new)

        return jax.tree.map(projected, gradients, old_gradients)

    def measure(
        self,
        memory: Tree,
        gradients: Tree,
        old_gradients: Tree | None,
        taken: Tree,
        params: Tree,
    ) -> "dict[str, jax.Array]":
        """Whether the gradient was projected, and whether the step opposes the old rows' all the same; 0 or 1.

        Their means over steps are the shares of such steps. A step without old rows has neither.
        """
        import jax.numpy as jnp

        from holdfast.methods.trees import dot

        def flag(holds: "jax.Array") -> "jax.Array":
            return jnp.where(dot(old_gradients, old_gradients) > 0, holds.astype(jnp.float32), jnp.nan)

        return {
            "projected": flag(dot(gradients, old_gradients) < 0),
            "opposed": flag(dot(taken, old_gradients) > 0),
        }
