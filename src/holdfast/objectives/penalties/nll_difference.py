"""The spec's estimator: the policy's NLL minus the reference's, on the tokens of the loss.

Its gradient is that of the cross-entropy whatever the reference is, so it only scales the loss by 1 + β, and it
is negative as soon as the policy beats the reference. It is kept for what it is; `forward` and `reverse` anchor.
"""

import jax
import jax.numpy as jnp

from holdfast.objectives.penalties.kinds import TokenPenalty


def value(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """log r(target) − log π(target).

    >>> half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    >>> print(f"{value(half, quarter, jnp.array([0]))[0]:.4f}")
    -0.6931
    """
    difference_CV = reference_logp_CV - policy_logp_CV
    return jnp.take_along_axis(difference_CV, targets_C[:, None], axis=1)[:, 0]


def gradient(
    policy_logp_CV: jax.Array, _reference_logp_CV: jax.Array, targets_C: jax.Array, _value_C: jax.Array
) -> jax.Array:
    """π − onehot(target)."""
    vocabulary = jnp.arange(policy_logp_CV.shape[1])
    return jnp.exp(policy_logp_CV) - (vocabulary == targets_C[:, None])


PENALTY = TokenPenalty(value, tokens="loss", gradient=gradient)
