"""Forward KL, KL(reference ‖ policy): learning without forgetting, exact over the vocabulary."""

import jax
import jax.numpy as jnp

from holdfast.objectives.penalties.kinds import TokenPenalty


def value(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array) -> jax.Array:
    """Σ r (log r − log π), as a sum of terms r·δ + π − r with δ = log r − log π.

    The added π − r sum to 0, but with them no term is negative and a rounding error in a normaliser, which
    shifts all δ alike, cancels to first order: the sum stays exact where the two are close.

    >>> half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    >>> print(f"{value(quarter, half, jnp.array([0]))[0]:.4f}")
    0.1438
    """
    policy_CV, reference_CV = jnp.exp(policy_logp_CV), jnp.exp(reference_logp_CV)
    terms_CV = reference_CV * (reference_logp_CV - policy_logp_CV) + (policy_CV - reference_CV)
    return terms_CV.sum(axis=1)


def gradient(
    policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array, _value_C: jax.Array
) -> jax.Array:
    """π − r."""
    return jnp.exp(policy_logp_CV) - jnp.exp(reference_logp_CV)


PENALTY = TokenPenalty(value, gradient=gradient)
