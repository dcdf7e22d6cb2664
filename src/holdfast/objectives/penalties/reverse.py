"""Reverse KL, KL(policy ‖ reference): keeps to what the reference would say, exact over the vocabulary."""

import jax
import jax.numpy as jnp

from holdfast.objectives.penalties import forward
from holdfast.objectives.penalties.kinds import TokenPenalty


def value(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """Σ π (log π − log r): forward KL with the roles exchanged, and as exact."""
    return forward.value(reference_logp_CV, policy_logp_CV, targets_C)


def gradient(
    policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array, value_C: jax.Array
) -> jax.Array:
    """π ⊙ (log π − log r − KL)."""
    return jnp.exp(policy_logp_CV) * (policy_logp_CV - reference_logp_CV - value_C[:, None])


PENALTY = TokenPenalty(value, gradient=gradient)
