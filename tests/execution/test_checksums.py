"""Checksums of arrays: any flipped bit and any swap shows, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.execution.checksums import bit_sums, checksums, not_finite
from holdfast.execution.topology import Topology

SUMS = jax.jit(bit_sums)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_every_flip_of_one_bit_changes_the_sum(dtype: str) -> None:
    array = np.asarray(jnp.arange(-6, 6).reshape(3, 4).astype(dtype))
    known, width = SUMS(array).tolist(), array.dtype.itemsize * 8
    for bit in range(array.size * width if dtype != "bool" else 0):
        data = bytearray(array.tobytes())
        data[bit // 8] ^= 1 << bit % 8
        changed = np.frombuffer(bytes(data), array.dtype).reshape(array.shape)
        assert SUMS(changed).tolist() != known, bit
    if dtype == "bool":
        assert SUMS(~array).tolist() != known


def test_swaps_and_changes_that_cancel_each_other_change_the_sum() -> None:
    values = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    flat, known = values.ravel(), SUMS(values).tolist()
    for first in range(0, 64, 7):
        for second in range(first + 1, 64, 5):
            swapped, moved = flat.copy(), flat.copy()
            swapped[[first, second]] = swapped[[second, first]]
            bits = moved.view(np.uint32)
            bits[first], bits[second] = bits[first] + 1, bits[second] - 1
            assert SUMS(swapped.reshape(8, 8)).tolist() != known
            assert SUMS(moved.reshape(8, 8)).tolist() != known
    assert SUMS(values.T).tolist() != known


def test_a_sum_does_not_depend_on_the_mesh_and_has_the_arrays_name() -> None:
    tree = {"params": {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4)}, "step": np.int32(3)}
    mesh = Topology.build().mesh
    placed = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    assert checksums(placed) == checksums(tree)
    assert list(checksums(tree)) == ["params/kernel", "step"]


def test_what_is_not_finite_is_named() -> None:
    tree = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([1.0]), "c": jnp.array(3), "d": jnp.array([-jnp.inf])}
    assert not_finite(tree) == ["a", "d"]
