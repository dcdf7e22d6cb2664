"""Forward passes that evaluations share, and the mesh they run on.

A `Runner` holds a model, its mesh and the compiled functions, so that each shape is compiled once however often a
run is evaluated. Functions that it compiles take the parameters first and arrays of rows after them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from holdfast.execution.topology import Topology
from holdfast.models.axes import BATCH_AXES
from holdfast.models.family import Model
from holdfast.types import Tree

SMALLEST_WIDTH = 16
CPU_TOKENS = 2048  # of a batch; more leave the CPU's cache and take up to three times as long for each token


class Runner:
    """A model on a mesh.

    Args:
        model: the choice of model.
        topology: where parameters are; None is one device.
    """

    def __init__(self, model: Model, topology: Topology | None = None) -> None:
        self.model = model
        self.topology = topology
        self._compiled: dict[Any, Callable[..., Any]] = {}

    @property
    def row_multiple(self) -> int:
        """The number of rows in a batch must be a multiple of this."""
        return 1 if self.topology is None else self.topology.num_row_shards

    def rows(self, wanted: int, width: int, available: int) -> int:
        """How many rows of a width to compute at once: those wanted, fewer on a CPU, divisible over the mesh.

        Args:
            available: how many there are; no more rows are computed than the next power of two.
        """
        wanted = min(wanted, bucket(available, smallest=1))
        if jax.default_backend() == "cpu":
            wanted = min(wanted, max(1, CPU_TOKENS // width))
        return -(-wanted // self.row_multiple) * self.row_multiple

    def call(self, function: Callable[..., Any], params: Tree, arrays: Sequence[Any], **static: Any) -> Any:
        """Run `function(model, params, *arrays, **static)`, compiled; results are on the host.

        Args:
            params: the parameters, or several trees of them in a tuple.
            arrays: numpy arrays whose first axis is rows, or None.
            static: hashable settings; each combination is compiled by itself.
        """
        return jax.device_get(self.start(function, params, arrays, self._replicated(), **static))

    def start(
        self,
        function: Callable[..., Any],
        params: Tree,
        arrays: Sequence[Any],
        out_shardings: Any = None,
        **static: Any,
    ) -> Any:
        """As `call`, but results stay on the devices, and arrays may be there already."""
        key = (function, tuple(sorted(static.items())))
        if key not in self._compiled:
            bound = functools.partial(function, self.model, **static)
            self._compiled[key] = jax.jit(bound, out_shardings=out_shardings)
        if self.topology is None:
            return self._compiled[key](params, *arrays)
        with jax.set_mesh(self.topology.mesh):
            placed = [self._place(array) if isinstance(array, np.ndarray) else array for array in arrays]
            return self._compiled[key](params, *placed)

    def replicated_first(self, others: int) -> Any:
        """Shardings of a result whose first part every process can see whole; the other parts lie as they fall."""
        return None if self.topology is None else (self._replicated(), *([None] * others))

    def _replicated(self) -> NamedSharding | None:
        return None if self.topology is None else _sharding(self.topology)

    def _place(self, array: NDArray[Any]) -> jax.Array:
        """Rows over the mesh; every process holds all of them and gives its own devices their part."""
        assert self.topology is not None
        sharding = _sharding(self.topology, BATCH_AXES)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _sharding(topology: Topology, *axes: Any) -> NamedSharding:
    return NamedSharding(topology.mesh, PartitionSpec(*axes))


def bucket(length: int, largest: int | None = None, smallest: int = SMALLEST_WIDTH) -> int:
    """The width of rows that hold a length: a power of two, so that few shapes are compiled.

    >>> [bucket(n) for n in (1, 16, 17, 100)], bucket(100, largest=120)
    ([16, 16, 32, 128], 120)
    """
    width = max(smallest, 1 << (max(length, 1) - 1).bit_length())
    return width if largest is None else min(width, largest)


def few_widths(lengths: Sequence[int], most: int, unit: int = SMALLEST_WIDTH) -> list[int]:
    """At most so many widths, ascending multiples of a unit, for rows of these lengths with the least padding in all.

    >>> few_widths([3, 5, 9, 60, 100], most=2)
    [16, 112]
    """
    counts = Counter(-(-max(length, 1) // unit) * unit for length in lengths)
    sizes = sorted(counts)
    # best[i] = (padded total of the sizes before i, the widths chosen), with as many widths as rounds so far.
    best: list[tuple[int, list[int]] | None] = [(0, []), *([None] * len(sizes))]
    for _ in range(min(most, len(sizes))):
        following = list(best)
        for start, reached in enumerate(best):
            if reached is None:
                continue
            members = 0
            for end in range(start, len(sizes)):
                members += counts[sizes[end]]
                total = reached[0] + members * sizes[end]
                known = following[end + 1]
                if known is None or total < known[0]:
                    following[end + 1] = (total, [*reached[1], sizes[end]])
        best = following
    chosen = best[-1]
    assert chosen is not None
    return chosen[1]


def pad(rows: Sequence[Sequence[int]], num_rows: int, width: int, fill: int = 0) -> NDArray[np.int32]:
    """Rows of ids as one array, padded on the right and below.

    >>> pad([[1, 2], [3]], 3, 3).tolist()
    [[1, 2, 0], [3, 0, 0], [0, 0, 0]]
    """
    array = np.full((num_rows, width), fill, np.int32)
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array
