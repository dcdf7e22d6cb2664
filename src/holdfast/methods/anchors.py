"""Anchors to a frozen reference: the spec's `nll_difference`, exact forward and reverse KL, and L2 distance.

All are weighted by the stage's beta. The exact ones are over the whole vocabulary; C tokens of a chunk, V vocabulary.
"""

import jax
import jax.numpy as jnp

from holdfast.methods.method import ParameterPenalty, TokenPenalty
from holdfast.types import Tree


def nll_difference(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """log r(target) − log π(target): the policy's NLL minus the reference's, on the tokens of the loss.

    Its gradient is that of the cross-entropy whatever the reference is, so it only scales the loss by 1 + β, and it is
    negative as soon as the policy beats the reference. It is kept for what it is; `forward` and `reverse` anchor.

    >>> half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    >>> print(f"{nll_difference(half, quarter, jnp.array([0]))[0]:.4f}")
    -0.6931
    """
    difference_CV = reference_logp_CV - policy_logp_CV
    return jnp.take_along_axis(difference_CV, targets_C[:, None], axis=1)[:, 0]


def nll_difference_gradient(
    policy_logp_CV: jax.Array, _reference_logp_CV: jax.Array, targets_C: jax.Array, _value_C: jax.Array
) -> jax.Array:
    """π − onehot(target)."""
    vocabulary = jnp.arange(policy_logp_CV.shape[1])
    return jnp.exp(policy_logp_CV) - (vocabulary == targets_C[:, None])


def forward_kl(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array) -> jax.Array:
    """KL(reference ‖ policy) = Σ r (log r − log π), as a sum of terms r·δ + π − r with δ = log r − log π.

    Learning without forgetting. The added π − r sum to 0, but with them no term is negative and a rounding error in a
    normaliser, which shifts all δ alike, cancels to first order: the sum stays exact where the two are close.

    >>> half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    >>> print(f"{forward_kl(quarter, half, jnp.array([0]))[0]:.4f}")
    0.1438
    """
    policy_CV, reference_CV = jnp.exp(policy_logp_CV), jnp.exp(reference_logp_CV)
    terms_CV = reference_CV * (reference_logp_CV - policy_logp_CV) + (policy_CV - reference_CV)
    return terms_CV.sum(axis=1)


def forward_kl_gradient(
    policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array, _value_C: jax.Array
) -> jax.Array:
    """π − r."""
    return jnp.exp(policy_logp_CV) - jnp.exp(reference_logp_CV)


def reverse_kl(policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """KL(policy ‖ reference) = Σ π (log π − log r): forward KL with the roles exchanged, and as exact."""
    return forward_kl(reference_logp_CV, policy_logp_CV, targets_C)


def reverse_kl_gradient(
    policy_logp_CV: jax.Array, reference_logp_CV: jax.Array, _targets_C: jax.Array, value_C: jax.Array
) -> jax.Array:
    """π ⊙ (log π − log r − KL)."""
    return jnp.exp(policy_logp_CV) * (policy_logp_CV - reference_logp_CV - value_C[:, None])


def half_squared_distance(params: Tree, reference: Tree) -> jax.Array:
    """½ Σ (params − reference)², in float32; its gradient is params − reference. Holds weights rather than answers.

    >>> float(half_squared_distance({"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([1.0, 1.0])}))
    2.0
    """

    def half_square(new: jax.Array, old: jax.Array) -> jax.Array:
        difference = new.astype(jnp.float32) - jax.lax.stop_gradient(old).astype(jnp.float32)
        return 0.5 * jnp.square(difference).sum()

    return jnp.stack(jax.tree.leaves(jax.tree.map(half_square, params, reference))).sum()


NLL_DIFFERENCE = TokenPenalty(nll_difference, tokens="loss", gradient=nll_difference_gradient)
FORWARD = TokenPenalty(forward_kl, gradient=forward_kl_gradient)
REVERSE = TokenPenalty(reverse_kl, gradient=reverse_kl_gradient)
L2_REFERENCE = ParameterPenalty(half_squared_distance)
