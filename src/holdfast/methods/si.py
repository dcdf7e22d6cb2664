"""Synaptic intelligence (Zenke et al. 2017, arXiv 1703.04200).

While a stage is trained, ω −= g·Δθ adds up how much each weight's way has lowered the loss; at its end
Ω += ω / (Δ² + ξ), Δ being how far the weight went in the stage, and Σ Ω (θ − θ*)² holds it from then on. g is the
gradient of the cross-entropy alone before clipping, Δθ the step that was taken. As in the paper Ω may be negative,
where noise moved a weight against its gradient.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, List, Optional

from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.methods.method import Method, MethodConfig, StageData, State
from holdfast.methods.refusals import StageFacts
from holdfast.registry import methods
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax

SMALL = 0.1  # Δ² below this share of ξ: the damping decides, not the way


@dataclass(frozen=True)
class SIConfig(MethodConfig):
    """Options of synaptic intelligence."""

    weight: float = field(
        "methods/si/weight",
        resume="unused",
        default=1.0,
        help="weight of the penalty; try powers of ten",
        ge=0,
        le=1e12,
    )
    stages: Optional[List[int]] = field(
        "methods/si/stages",
        resume="unused",
        default=None,
        help="stages in which it observes and holds (0-based); null = all, the first too, which it only observes",
        ge=0,
    )
    xi: float = field(
        "methods/si/xi",
        resume="unused",
        default=1e-3,
        help="added to the squared way of a weight, so that what did not move does not count without bound",
        gt=0,
        le=1e3,
    )
    switched_on: ClassVar[str] = (
        "the parent did not observe how its weights moved, so that nothing is held before the next boundary (Ω = 0)"
    )

    def acts_in(self, stage: int) -> bool:
        """In all stages unless some are named: what is held in one was observed in those before."""
        return True if self.stages is None else stage in self.stages

    def check(self, about: StageFacts) -> None:
        """The gradient that it adds up must be that of the cross-entropy alone."""
        others = about.others_with("token_penalty")
        if about.beta > 0 or others:
            what = f"the anchor (beta {about.beta:g})" if about.beta > 0 else others[0]
            raise about.refusal(
                f"no penalty on tokens in stage {about.stage}, which has {what}: the gradient that si adds up would "
                "not be that of the cross-entropy alone",
                "set the penalty to 0 there, or say in methods/si/stages where si acts",
            )
        replay = about.options.stages.replay
        if about.curriculum.budgets_in(about.stage) and (replay is None or replay.objective != "ce"):
            raise ConfigError(
                "training/replay/objective",
                replay.objective if replay else "both",
                "ce beside si and keep: the KL that rows with a budget train by would be added up too",
            )
        if about.options.run.z_loss:
            raise ConfigError(
                "training/z_loss",
                about.options.run.z_loss,
                "0 beside si, which adds up the gradient of the cross-entropy alone",
            )
        if self.stages is not None and len(set(self.stages)) < 2:
            raise ConfigError(
                "methods/si/stages",
                list(self.stages),
                "at least two stages: one that is observed and a later one that is held",
                "null means all",
            )
        self._check_row()

    def _check_row(self) -> None:
        """How far a weight went is known from stage to stage alone, not across one that was not observed."""
        stages = sorted(self.stages or ())
        if stages and stages != list(range(stages[0], stages[-1] + 1)):
            raise ConfigError(
                "methods/si/stages",
                list(self.stages or ()),
                "stages in a row: across a stage that is not observed no way is known",
                f"write {list(range(stages[0], stages[-1] + 1))}, or null for all",
            )


@methods.register("si", config=SIConfig, help="hold the weights whose way lowered the loss: Σ Ω (θ − θ*)²")
@dataclass(frozen=True)
class SI(Method):
    """The memory is {path, importance, center}: ω of this stage, Ω of those before, the weights when it began."""

    config: SIConfig

    def init(self, params: Tree) -> Tree:
        """Nothing was observed yet."""
        from holdfast.methods import trees

        return {"path": trees.zeros(params), "importance": trees.zeros(params), "center": trees.copy(params)}

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """Ω with what the ended stage adds to it, a new ω, and the weights."""
        import jax
        import jax.numpy as jnp

        from holdfast.methods import trees

        def consolidated(memory: Tree, trained: Tree) -> Tree:
            def added(importance: "jax.Array", path: "jax.Array", center: "jax.Array", own: "jax.Array") -> "jax.Array":
                way = own.astype(jnp.float32) - center
                return importance + path / (jnp.square(way) + self.config.xi)

            return jax.tree.map(added, memory["importance"], memory["path"], memory["center"], trained)

        trained = state.trained()
        importance = jax.jit(consolidated)(memory, trained)
        return {"path": trees.zeros(trained), "importance": importance, "center": trees.copy(trained)}

    def observe(self, memory: Tree, gradients: Tree, taken: Tree, params: Tree) -> Tree:
        """The sum ω of the stage so far: ω − g·Δθ."""
        import jax
        import jax.numpy as jnp

        def added(path: "jax.Array", gradient: "jax.Array", moved: "jax.Array") -> "jax.Array":
            return path - gradient.astype(jnp.float32) * moved.astype(jnp.float32)

        return {**memory, "path": jax.tree.map(added, memory["path"], gradients, taken)}

    def parameter_penalty(self, memory: Tree, params: Tree, reference: Tree | None) -> "jax.Array":
        """Σ Ω (θ − θ*)²."""
        from holdfast.methods import trees

        return trees.weighted_distance(memory["importance"], memory["center"], params)

    def measure(
        self,
        memory: Tree,
        gradients: Tree,
        old_gradients: Tree | None,
        taken: Tree,
        params: Tree,
    ) -> "dict[str, jax.Array]":
        """Share of weights with Δ² far below ξ: for those Ω is ω / ξ, however far they went."""
        import jax
        import jax.numpy as jnp

        from holdfast.methods import trees

        def small(center: "jax.Array", own: "jax.Array", moved: "jax.Array") -> "jax.Array":
            way = own.astype(jnp.float32) + moved.astype(jnp.float32) - center
            return jnp.square(way) < SMALL * self.config.xi

        counted = jax.tree.map(small, memory["center"], params, taken)
        return {"damped": trees.total(counted) / trees.size(counted)}
