"""Checksums of arrays, computed where the arrays are: the same on every mesh and number of processes.

The bits of every element are mixed with its place and summed as whole numbers, which no order of summing can change.
For one place the mixing is one to one, so that a change of a single element always shows; two sums with other factors
leave a swap or a change of several elements a chance of 2^-64. They find accidents, not forgeries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.execution.memory import on_device
from holdfast.types import Tree


def bit_sums(array: jax.Array) -> jax.Array:
    """Two sums of mixed bits, (2,) unsigned."""
    bits = _words(array)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)

    def mixed(factor: int) -> jax.Array:
        value: jax.Array = (bits ^ (place * jnp.uint32(factor))) * jnp.uint32(0x85EBCA6B)
        value = (value ^ (value >> 15)) * jnp.uint32(0xC2B2AE35)
        return (value ^ (value >> 13)).sum(dtype=jnp.uint32)

    return jnp.stack([mixed(0x9E3779B1), mixed(0x85EBCA77)])


def _words(array: jax.Array) -> jax.Array:
    """The bits of every element as unsigned words of 32 bits; an element of 64 has two of them."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = min(jnp.dtype(array.dtype).itemsize * 8, 32)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def array_names(tree: Tree) -> list[str]:
    """The slash path of every array of a tree, in the order of its leaves."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def checksums(tree: Tree) -> dict[str, str]:
    """The checksum of every array of a tree, by its slash path; all processes of a run call this together.

    >>> import numpy as np
    >>> checksums({"a": np.float32([1, 2])}) == checksums({"a": np.float32([2, 1])})
    False
    """
    found = jax.device_get(_on(_mesh_of(tree), _sums)(tree))
    return {
        name: "".join(f"{number:08x}" for number in row.tolist())
        for name, row in zip(array_names(tree), found, strict=True)
    }


def not_finite(tree: Tree) -> list[str]:
    """The arrays of a tree that hold an infinity or no number, by their slash paths; all processes together."""
    found = jax.device_get(_on(_mesh_of(tree), _finite)(tree))
    return [name for name, fine in zip(array_names(tree), found.tolist(), strict=True) if not fine]


def _sums(tree: Tree) -> jax.Array:
    leaves = jax.tree.leaves(on_device(tree))
    return jnp.stack([bit_sums(jnp.asarray(leaf)) for leaf in leaves]) if leaves else jnp.zeros((0, 2), jnp.uint32)


def _finite(tree: Tree) -> jax.Array:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(on_device(tree))]
    flags = [jnp.isfinite(leaf).all() if jnp.issubdtype(leaf.dtype, jnp.inexact) else True for leaf in leaves]
    return jnp.array(flags, bool)


def _mesh_of(tree: Tree) -> Any:
    """The mesh that a tree's arrays lie on; None for arrays without one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


@functools.lru_cache(maxsize=8)
def _on(mesh: Any, function: Any) -> Any:
    """A compiled function whose result every device has; each checkpoint calls it, and must not compile it again."""
    return jax.jit(function, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
