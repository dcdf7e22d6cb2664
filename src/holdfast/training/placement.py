"""Where the arrays of a state lie: copies of them, values beside them, and the weights of a reference."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from holdfast.execution.memory import check_host_memory, host_place, in_host_memory
from holdfast.types import Tree


def shardings_of(tree: Tree) -> Tree:
    """The sharding of every array of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def traced(tree: Tree) -> bool:
    """Whether shapes alone are traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def placed_like(value: jax.Array, like: Tree) -> jax.Array:
    """A value where another lies; while shapes alone are traced, the value itself."""
    return value if traced(like) else jax.device_put(value, like.sharding)


def built_like(make: Callable[[Tree], Tree], like: Tree) -> Tree:
    """A function whose results lie as a tree does; while shapes alone are traced, the function itself."""
    return make if traced(like) else jax.jit(make, out_shardings=shardings_of(like))


def copied(tree: Tree) -> Tree:
    """A copy of every array, placed as the original; steps donate theirs."""
    if traced(tree):
        return jax.tree.map(jnp.copy, tree)
    leaves, structure = jax.tree.flatten(tree)
    in_host = [in_host_memory(leaf) for leaf in leaves]
    made = [
        jax.device_put(leaf, leaf.sharding, may_alias=False) if host else None
        for leaf, host in zip(leaves, in_host, strict=True)
    ]
    rest = [leaf for leaf, host in zip(leaves, in_host, strict=True) if not host]
    kind = jax.tree.structure(rest)
    copies = iter(_copier(kind, tuple(leaf.sharding for leaf in rest))(rest))
    return jax.tree.unflatten(structure, [next(copies) if copy is None else copy for copy in made])


@functools.lru_cache(maxsize=16)
def _copier(structure: Any, shardings: tuple[Any, ...]) -> Tree:
    """The compiled copy of one kind of tree: every checkpoint makes one, and must not compile it again."""
    placed = jax.tree.unflatten(structure, shardings)
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)


@dataclass(frozen=True)
class ReferenceStore:
    """Where the weights of a reference are held between its forward passes, and in which type.

    Args:
        memory: `device`, or `host`: the model brings each weight to the device where it uses it.
        dtype: None: that of the parameters.
    """

    memory: str = "device"
    dtype: str | None = None

    def check(self, mesh: jax.sharding.Mesh) -> None:
        """Refuse devices that cannot read what is held."""
        if self.memory == "host":
            check_host_memory(mesh, "optimization/kl/reference_memory")

    def hold(self, weights: Tree) -> Tree:
        """A copy of some weights as they are held; while shapes alone are traced, wherever it is."""
        if self == AS_PARAMETERS:
            return copied(weights)
        if traced(weights):
            return self._typed(weights)
        return self.taken(weights if self.dtype is None else copied(weights))

    def taken(self, weights: Tree) -> Tree:
        """Weights that nobody else has, as they are held; in the host's memory that is a copy."""
        if self.dtype is not None and weights:
            weights = jax.jit(self._typed, out_shardings=shardings_of(weights))(weights)
        if self.memory == "device":
            return weights
        places = jax.tree.map(host_place, shardings_of(weights))
        return jax.tree.map(lambda leaf, at: jax.device_put(leaf, at, may_alias=False), weights, places)

    def shape(self, leaf: Tree) -> Tree:
        """A held weight as a shape with its place."""
        at = host_place(leaf.sharding) if self.memory == "host" else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, self.dtype or leaf.dtype, sharding=at)

    def _typed(self, weights: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype or leaf.dtype), weights)


AS_PARAMETERS = ReferenceStore()  # beside them, in their own type
