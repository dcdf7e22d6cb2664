"""A method in one file: online elastic weight consolidation (Kirkpatrick et al. 2017; Schwarz et al. 2018).

When a stage ends, the Fisher information of its rows says which weights mattered; the penalty
½ Σ F (θ − θ*)² then holds those weights near what they were.

    PYTHONPATH=examples/plugins holdfast --plugin online_ewc run my.yaml training.methods=[online_ewc]
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods import Method, MethodConfig, StageData

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class OnlineEWCConfig(MethodConfig):
    """Options of online EWC."""

    weight: float = field("methods/online_ewc/weight", default=1.0, help="weight of the penalty", ge=0, le=1e12)
    stages: Optional[List[int]] = field(
        "methods/online_ewc/stages", default=None, help="stages that are held (0-based); null = all from the second on"
    )
    rows: int = field(
        "methods/online_ewc/rows", default=64, help="rows of the ended stage that the Fisher is taken of", ge=1
    )
    decay: float = field("methods/online_ewc/decay", default=0.9, help="what is left of the older Fisher", ge=0, le=1)


@registry.methods.register("online_ewc", config=OnlineEWCConfig, help="hold the weights that mattered: ½ Σ F (θ − θ*)²")
@dataclass(frozen=True)
class OnlineEWC(Method):
    """The memory is {fisher, center}: the decayed sum of Fishers, and the weights when the last stage ended."""

    config: OnlineEWCConfig

    def init(self, params: Any) -> Any:
        """Nothing mattered yet."""
        import jax
        import jax.numpy as jnp

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return {"fisher": zeros, "center": zeros}

    def remember(self, memory: Any, state: Any, data: StageData) -> Any:
        """The Fisher of the stage that just ended, added to the decayed one, and its weights."""
        import jax
        import jax.numpy as jnp

        def fisher(older: Any, state: Any, rows: Any) -> Any:
            def add(total: Any, row: Any) -> Any:
                gradient = jax.grad(lambda params: state.log_likelihoods(params, row).sum())(state.trained())
                return jax.tree.map(lambda sum_, g: sum_ + jnp.square(g.astype(jnp.float32)), total, gradient), None

            # One row at a time: the Fisher is the mean of squared gradients, not the square of their mean.
            one_by_one = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, leaf.shape[-1]), rows)
            total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, older), one_by_one)
            tokens = jnp.maximum((rows.padding_mask > 0).sum(), 1)
            return jax.tree.map(lambda old, new: self.config.decay * old + new / tokens, older, total)

        found = jax.jit(fisher)(memory["fisher"], state, data.old(self.config.rows))
        center = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), state.trained())
        return {"fisher": found, "center": center}

    def parameter_penalty(self, memory: Any, params: Any, reference: Any) -> "jax.Array":
        """½ Σ F (θ − θ*)²."""
        import jax
        import jax.numpy as jnp

        def held(fisher: Any, center: Any, own: Any) -> Any:
            return 0.5 * (fisher * jnp.square(own.astype(jnp.float32) - center)).sum()

        parts = jax.tree.map(held, memory["fisher"], memory["center"], params)
        return jnp.stack(jax.tree.leaves(parts)).sum()
