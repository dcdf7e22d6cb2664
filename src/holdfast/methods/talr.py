"""Weights by the model's probability of a token, at a temperature that follows the batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods.method import BatchWeights, Method
from holdfast.methods.weighing import WeighingConfig, counted_tokens, median
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch


@dataclass(frozen=True)
class TALRConfig(WeighingConfig):
    """Options of token-adaptive loss reweighting."""

    floor: float = field(
        "methods/talr/floor", default=0.01, help="smallest weight of a token; 1 = plain training", gt=0, le=1
    )
    stages: Optional[List[int]] = field(
        "methods/talr/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )
    weighs_by = "policy"


@registry.methods.register("talr", config=TALRConfig, help="each token's loss times p^(1/t), t the batch's median loss")
@dataclass(frozen=True)
class TALR(Method):
    """Token-adaptive loss reweighting (arXiv 2509.20758), not renormalised."""

    config: TALRConfig

    def batch_weights(self, memory: Tree, nll: "jax.Array", batch: "Batch") -> BatchWeights:
        """max(p^(1/τ), floor), τ the median over the batch's rows of their mean token loss."""
        import jax.numpy as jnp

        counted = counted_tokens(batch)
        tokens = counted.sum(axis=-1)
        means = jnp.where(counted, nll, 0).sum(axis=-1) / jnp.maximum(tokens, 1)
        temperature = jnp.maximum(median(means, tokens > 0), 1e-6)
        return BatchWeights(jnp.clip(jnp.exp(-nll / temperature), self.config.floor, 1))
