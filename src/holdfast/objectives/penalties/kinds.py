"""What a penalty is: a distance between the model and a frozen reference, of tokens or of parameters.

JAX is named in types alone, so that penalties can be listed without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class TokenPenalty:
    """A penalty on each token's distribution; C tokens of a chunk, V vocabulary.

    Args:
        value: (policy_logp_CV, reference_logp_CV, targets_C) -> value_C, in float32. Targets are valid indices.
        tokens: which tokens it is averaged over: those of the loss, or those of the penalty's own mask.
        gradient: (policy_logp_CV, reference_logp_CV, targets_C, value_C) -> gradient of each value on the
            policy's logits, (C, V). None: derived from `value` by automatic differentiation.
    """

    value: "Callable[[jax.Array, jax.Array, jax.Array], jax.Array]"
    tokens: Literal["loss", "penalty"] = "penalty"
    gradient: "Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None" = None


@dataclass(frozen=True)
class ParameterPenalty:
    """A penalty on the parameters themselves.

    Args:
        value: (params, reference_params) -> scalar, differentiable in the first.
    """

    value: "Callable[[Any, Any], jax.Array]"
