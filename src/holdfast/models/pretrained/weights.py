"""Where the numbers of our parameters stand in the tensors of other programs.

A family has a table from our parameter paths (`layers/attention/q/kernel`) to a `Weight` each. The same entry reads
and writes, any part of it, so that a device's shard takes only its own rows and columns from the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LAYERS = "layers/"


class Tensors(Protocol):
    """Named tensors on disk, read in parts."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor and its shape."""

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A part of a tensor."""


@dataclass(frozen=True)
class Weight:
    """One of our parameters in a stored tensor.

    Args:
        name: of the tensor; `{}` stands for the layer.
        transposed: a matrix is stored (out, in), ours are (in, out).
        places: for each of our outputs its place on the tensor's output axis; None where they are the same.
        num_places: length of the tensor's output axis, where it holds more than this parameter.
        may_be_longer: the first axis may be longer than ours, the rest is left out (learned positions).
    """

    name: str
    transposed: bool = False
    places: NDArray[np.int64] | None = None
    num_places: int | None = None
    may_be_longer: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape where ours (of one layer) is `shape`."""
        if self.num_places is not None:
            shape = (*shape[:-1], self.num_places)
        return shape[::-1] if self.transposed else shape

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape holds a parameter of ours."""
        expected = self.stored_shape(shape)
        if self.may_be_longer and len(stored) == len(expected):
            return stored[0] >= expected[0] and stored[1:] == expected[1:]
        return stored == expected

    def read(self, tensors: Tensors, layer: int | None, index: tuple[slice, ...]) -> Array:
        """A part of our parameter; `index` has a start and a stop for every axis."""
        chosen = None
        if self.places is not None:
            chosen = self.places[index[-1]]
            low, high = int(chosen.min()), int(chosen.max()) + 1
            index = (*index[:-1], slice(low, high))
            # Neighbours in order are a plain range already.
            chosen = None if np.array_equal(chosen, np.arange(low, high)) else chosen - low
        name = self.name if layer is None else self.name.format(layer)
        part = tensors.read(name, index[::-1] if self.transposed else index)
        part = part.T if self.transposed else part
        return part if chosen is None else part[..., chosen]

    def write(self, stored: Array, ours: Array) -> None:
        """Put our parameter where it stands in a tensor."""
        target = stored.T if self.transposed else stored
        if self.places is None:
            target[...] = ours
        else:
            target[..., self.places] = ours


def thirds(part: int, heads: int, size: int) -> NDArray[np.int64]:
    """Places of q (0), k (1) or v (2) where each head's three parts of that size stand side by side.

    >>> thirds(1, heads=2, size=2).tolist()
    [2, 3, 8, 9]
    """
    blocks = np.arange(heads * 3 * size).reshape(heads, 3, size)
    return blocks[:, part].reshape(-1)


def halves(heads: int, head_dim: int, rotated: int) -> NDArray[np.int64]:
    """Places of each head's channels in the order of halves, for heads whose rotated pairs are neighbours.

    >>> halves(heads=1, head_dim=6, rotated=4).tolist()
    [0, 2, 1, 3, 4, 5]
    """
    one = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, head_dim)])
    places: NDArray[np.int64] = (np.arange(heads)[:, None] * head_dim + one).reshape(-1)
    return places
