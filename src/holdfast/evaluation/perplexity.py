"""Perplexity: the loss of held-out rows, in nats a token and in bits a byte, and divergence from a reference.

The rows are the first ones of the validation split, so that every evaluation of a run sees the same. Rows that are
mostly padding are cut to a few shorter widths, which changes no token's loss.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from holdfast.data.rows import IGNORE, RowArrays
from holdfast.data.sampling import DatasetStyle
from holdfast.evaluation.forward import Runner, few_widths
from holdfast.evaluation.scoring import Sums, row_sums
from holdfast.evaluation.sums import HeldOut
from holdfast.models.family import Model
from holdfast.types import Tree

NARROWEST = 32
MOST_WIDTHS = 4  # that one source is compiled for


class MeasuredRows(Protocol):
    """What is read of rows, as `holdfast.data.rows.Rows`."""

    @property
    def style(self) -> DatasetStyle: ...
    @property
    def block_size(self) -> int: ...
    def __len__(self) -> int: ...
    def rows(self, indices: Any) -> RowArrays: ...
    def target_bytes(self, y: Any) -> NDArray[np.int64]: ...
    def documents(self, index: int) -> range: ...


def held_out(
    runner: Runner,
    params: Tree,
    rows: MeasuredRows,
    *,
    limit: int | None = None,
    batch_size: int = 32,
    reference: Tree = None,
) -> HeldOut:
    """Measure the first rows of a source.

    Args:
        limit: how many rows; None is all.
        reference: parameters that divergences are measured against.
    """
    count = len(rows) if limit is None else min(limit, len(rows))
    sums = np.zeros((len(Sums._fields), count))
    num_bytes = np.zeros(count)
    for arrays, indices in _batches(runner, rows, count, batch_size):
        found = runner.call(padded_row_sums, (params, reference), (*arrays,))
        sums[:, indices] = np.stack(found)[:, : len(indices)]
        num_bytes[indices] = rows.target_bytes(arrays.y[: len(indices)])
    nll, tokens, kl_forward, kl_reverse, kl_tokens = sums
    # Rows that begin in one document go together. Whoever shares a document at all would be too strict: rows of a
    # stream overlap in a chain that makes the whole split one group.
    groups = np.array([rows.documents(index).start for index in range(count)], np.int64)
    return HeldOut(nll, tokens, num_bytes, groups, kl_forward, kl_reverse, kl_tokens)


def padded_row_sums(model: Model, params: tuple[Any, Any], *arrays: jax.Array) -> Sums:
    """`row_sums` of the arrays of a batch, for parameters of a model and of its reference (or None)."""
    return row_sums(model, params[0], RowArrays(*arrays), params[1])  # type: ignore[arg-type]  # traced


def _batches(
    runner: Runner, rows: MeasuredRows, count: int, batch_size: int
) -> Iterator[tuple[RowArrays, NDArray[np.int64]]]:
    """Rows in batches of fixed shapes, with masked rows at the end of the last; segments only where rows have some."""
    packed = rows.style is DatasetStyle.PACKED
    lengths = np.concatenate([_used(rows, part) for part in np.array_split(np.arange(count), -(-count // 256))])
    order = np.argsort(-lengths, kind="stable")
    num_batches = count // runner.rows(batch_size, int(lengths.max()), count)
    widths = few_widths(lengths.tolist(), min(max(num_batches // 2, 1), MOST_WIDTHS), NARROWEST)
    while len(order):
        width = min(next(width for width in widths if lengths[order[0]] <= width), rows.block_size)
        num_rows = runner.rows(batch_size, width, count)
        indices, order = order[:num_rows], order[num_rows:]
        cut = RowArrays(*(_fill(array[:, :width], num_rows) for array in rows.rows(indices)))
        cut.y[len(indices) :] = IGNORE
        yield cut if packed else cut._replace(segment_ids=None, positions=None), indices  # type: ignore[arg-type]  # None: one text a row


def _used(rows: MeasuredRows, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many positions of each row are not padding on the right."""
    if rows.style is DatasetStyle.PMD:
        return np.full(len(indices), rows.block_size)
    used: NDArray[np.int64] = rows.rows(indices).padding_mask.sum(1)
    return used


def _fill(array: NDArray[np.int32], num_rows: int) -> NDArray[np.int32]:
    filled = np.zeros((num_rows, array.shape[1]), np.int32)
    filled[: len(array)] = array
    return filled
