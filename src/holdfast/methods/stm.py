"""Leave out what the old model finds hard: those tokens move it most."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods.method import BatchWeights, Method
from holdfast.methods.weighing import WeighingConfig, counted_tokens, ordered
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch


@dataclass(frozen=True)
class STMConfig(WeighingConfig):
    """Options of selective token masking."""

    perplexity: Optional[float] = field(
        "methods/stm/perplexity",
        default=2.5,
        help="tokens above this perplexity under the snapshot leave the loss; null = none do, which is plain training",
        ge=1,
        le=1e30,
    )
    quantile: Optional[float] = field(
        "methods/stm/quantile",
        default=None,
        help="instead: this share of a batch's tokens stays, the easiest under the snapshot; null = off",
        gt=0,
        le=1,
    )
    stages: Optional[List[int]] = field(
        "methods/stm/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )
    needs_reference = True
    weighs_by = "reference"


@registry.methods.register("stm", config=STMConfig, help="tokens that the snapshot finds hard leave the loss")
@dataclass(frozen=True)
class STM(Method):
    """Selective token masking (arXiv 2501.14315): perplexity above 2.5, so probability below 0.4, is left out."""

    config: STMConfig

    def batch_weights(self, memory: Tree, nll: "jax.Array", batch: "Batch") -> BatchWeights:
        """1 for what stays, 0 for what leaves the loss and its divisor."""
        import jax.numpy as jnp

        counted = counted_tokens(batch)
        if self.config.quantile is not None:
            values, count = ordered(nll, counted)
            last = jnp.ceil(self.config.quantile * count).astype(jnp.int32) - 1
            stays = nll <= values[jnp.clip(last, 0, jnp.maximum(count - 1, 0))]
        elif self.config.perplexity is not None:
            stays = nll <= math.log(self.config.perplexity)
        else:
            stays = jnp.ones_like(counted)
        return BatchWeights(stays.astype(jnp.float32), stays)
