"""Half the squared distance between the parameters and the reference's: holds weights rather than answers."""

from typing import Any

import jax
import jax.numpy as jnp

from holdfast.objectives.penalties.kinds import ParameterPenalty


def value(params: Any, reference: Any) -> jax.Array:
    """½ Σ (params − reference)², in float32; its gradient is params − reference.

    >>> float(value({"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([1.0, 1.0])}))
    2.0
    """

    def half_square(new: jax.Array, old: jax.Array) -> jax.Array:
        difference = new.astype(jnp.float32) - jax.lax.stop_gradient(old).astype(jnp.float32)
        return 0.5 * jnp.square(difference).sum()

    return jnp.stack(jax.tree.leaves(jax.tree.map(half_square, params, reference))).sum()


PENALTY = ParameterPenalty(value)
