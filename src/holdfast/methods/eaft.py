"""Weights by how undecided the model is: a token that it is sure of, right or wrong, counts little."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods.method import Method
from holdfast.methods.weighing import WeighingConfig
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class EAFTConfig(WeighingConfig):
    """Options of entropy-adaptive fine-tuning."""

    alpha: float = field(
        "methods/eaft/alpha", default=1.0, help="exponent of the entropy's share; 0 = plain training", ge=0, le=100
    )
    top: int = field(
        "methods/eaft/top", default=20, help="likeliest tokens that the entropy is taken of", ge=2, le=2**24
    )
    stages: Optional[List[int]] = field(
        "methods/eaft/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )


@registry.methods.register("eaft", config=EAFTConfig, help="each token's loss times the entropy of the model there")
@dataclass(frozen=True)
class EAFT(Method):
    """Entropy-adaptive fine-tuning (arXiv 2601.02151), divided by tokens and not by the sum of weights."""

    config: EAFTConfig

    def token_weights(
        self, memory: Tree, logp: "jax.Array", reference_logp: "jax.Array | None", targets: "jax.Array"
    ) -> "jax.Array":
        """(H / ln K)^alpha, H the entropy of the K likeliest tokens, whose probabilities are made to sum to 1."""
        import jax
        import jax.numpy as jnp

        top = min(self.config.top, logp.shape[1])
        likeliest_CK = jax.nn.log_softmax(jax.lax.top_k(logp, top)[0], axis=1)
        entropy_C = -(jnp.exp(likeliest_CK) * likeliest_CK).sum(axis=1)
        return jnp.clip(entropy_C / math.log(top), 0, 1) ** self.config.alpha
