"""Stateless pseudo-random permutations, so that any position of a shuffled order can be asked for directly."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(*parts: object) -> int:
    """A 64-bit key folded from a seed and names; equal parts give equal keys on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    # The finaliser of splitmix64: every input bit reaches every output bit.
    values = (values + key) * _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a keyed permutation of `range(size)` sends the indices.

    A Feistel network over the next even power of two, walked along its cycles until it lands below `size`.

    >>> sorted(permute(np.arange(10), 10, key_of(0, "rows")).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    round_keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]
    values = np.asarray(indices).astype(np.uint64)
    pending = np.ones(values.shape, bool)
    with np.errstate(over="ignore"):
        while pending.any():
            left, right = values[pending] >> half_bits, values[pending] & mask
            for round_key in round_keys:
                left, right = right, left ^ (_mix(right, round_key) & mask)
            values[pending] = (left << half_bits) | right
            pending = values >= np.uint64(size)
    return values.astype(np.int64)
