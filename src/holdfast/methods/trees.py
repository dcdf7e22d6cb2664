"""What methods that hold weights do with trees of parameters. Imported inside their hooks, since it imports JAX."""

import math

import jax
import jax.numpy as jnp

from holdfast.types import Tree


def zeros(params: Tree) -> Tree:
    """Zeros in float32 of the parameters' shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def copy(params: Tree) -> Tree:
    """The parameters in float32, in arrays of their own: steps use up those they are given."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def total(tree: Tree) -> jax.Array:
    """The sum of all numbers of a tree, in float32.

    >>> float(total({"a": jnp.ones((2, 3)), "b": jnp.ones(4)}))
    10.0
    """
    return jnp.stack([leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(tree)]).sum()


def dot(one: Tree, other: Tree) -> jax.Array:
    """The inner product of two trees, in float32.

    >>> float(dot({"a": jnp.full(2, 3.0)}, {"a": jnp.full(2, 0.5)}))
    3.0
    """
    return total(jax.tree.map(lambda a, b: a.astype(jnp.float32) * b.astype(jnp.float32), one, other))


def size(tree: Tree) -> int:
    """How many numbers a tree has."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def weighted_distance(weights: Tree, center: Tree, params: Tree) -> jax.Array:
    """Σ w (θ − θ*)², in float32."""

    def held(weight: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
        return weight * jnp.square(own.astype(jnp.float32) - old)

    return total(jax.tree.map(held, weights, center, params))
