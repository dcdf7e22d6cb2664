"""Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv 1612.00796), online (Schwarz et al. 2018, 1805.06370).

½ Σ F (θ − θ*)²: weights that the Fisher information F of the ended stage's rows calls important stay near what they
were. Online: one F for all stages, F ← γ F + F_new, and θ* of the last boundary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast.config import field
from holdfast.methods.method import Method, MethodConfig, StageData, State
from holdfast.methods.refusals import StageFacts, refuse_first_stage
from holdfast.registry import methods
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch


@dataclass(frozen=True)
class EWCConfig(MethodConfig):
    """Options of EWC."""

    weight: float = field(
        "methods/ewc/weight",
        resume="unused",
        default=1.0,
        help="weight of the penalty; try powers of ten",
        ge=0,
        le=1e12,
    )
    stages: Optional[List[int]] = field(
        "methods/ewc/stages",
        resume="unused",
        default=None,
        help="stages that are held (0-based); null = all from the second on",
        ge=0,
    )
    rows: int = field(
        "methods/ewc/rows",
        resume="unused",
        default=256,
        help="rows of the ended stage that the Fisher is taken of, one gradient each",
        ge=1,
        le=10**9,
    )
    labels: str = field(
        "methods/ewc/labels",
        resume="unused",
        default="sampled",
        help="targets of these rows: sampled from the model (the true Fisher), or the data's (the empirical one)",
        choices=("sampled", "data"),
    )
    gamma: float = field(
        "methods/ewc/gamma",
        resume="unused",
        default=0.9,
        help="what is left of the Fisher of earlier boundaries",
        ge=0,
        le=1,
    )
    normalise: bool = field(
        "methods/ewc/normalise",
        resume="unused",
        default=False,
        help="scale the Fisher of each boundary to mean 1, so that weights compare between models",
    )

    def check(self, about: StageFacts) -> None:
        """Nothing is old before the first stage."""
        refuse_first_stage(about)


@methods.register("ewc", config=EWCConfig, help="hold the weights that mattered: ½ Σ F (θ − θ*)²")
@dataclass(frozen=True)
class EWC(Method):
    """The memory is {fisher, center}: the decayed sum of Fishers, and the weights at the last boundary."""

    config: EWCConfig

    def init(self, params: Tree) -> Tree:
        """Nothing mattered yet."""
        from holdfast.methods import trees

        return {"fisher": trees.zeros(params), "center": trees.zeros(params)}

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The Fisher of the stage that just ended added to what is left of the older one, and its weights."""
        import jax

        from holdfast.methods import trees

        gamma = self.config.gamma

        def added(older: Tree, state: State, rows: "Batch", key: "jax.Array") -> Tree:
            return jax.tree.map(lambda old, new: gamma * old + new, older, self.fisher(state, rows, key))

        found = jax.jit(added)(memory["fisher"], state, data.old(self.config.rows), data.key("ewc"))
        return {"fisher": found, "center": trees.copy(state.trained())}

    def fisher(self, state: State, rows: "Batch", key: "jax.Array") -> Tree:
        """Squared gradients of each row's summed log-likelihood, their sum divided by all tokens of the rows."""
        import jax
        import jax.numpy as jnp

        from holdfast.methods import trees

        trained = state.trained()

        def add(sums: Tree, item: Tree) -> Tree:
            index, row = item
            if self.config.labels == "sampled":
                row = state.sampled(row, jax.random.fold_in(key, index))
            gradient = jax.grad(lambda params: state.log_likelihoods(params, row).sum())(trained)
            return jax.tree.map(lambda sum_, g: sum_ + jnp.square(g.astype(jnp.float32)), sums, gradient), None

        # One row at a time: the Fisher is the mean of squared gradients, not the square of their mean.
        one_by_one = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, leaf.shape[-1]), rows)
        sums, _ = jax.lax.scan(add, trees.zeros(trained), (jnp.arange(one_by_one.x.shape[0]), one_by_one))
        tokens = jnp.maximum(((rows.padding_mask > 0) & (rows.y >= 0)).sum(), 1)
        found = jax.tree.map(lambda sum_: sum_ / tokens, sums)
        if not self.config.normalise:
            return found
        mean = jnp.maximum(trees.total(found) / trees.size(found), 1e-30)
        return jax.tree.map(lambda leaf: leaf / mean, found)

    def parameter_penalty(self, memory: Tree, params: Tree, reference: Tree | None) -> "jax.Array":
        """½ Σ F (θ − θ*)²."""
        from holdfast.methods import trees

        return 0.5 * trees.weighted_distance(memory["fisher"], memory["center"], params)
