"""Perplexity: the loss of held-out rows, in nats a token and in bits a byte, and divergence from a reference.

The rows are the first ones of the validation split, so that every evaluation of a run sees the same. Rows that are
mostly padding are cut to a few shorter widths, which changes no token's loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from holdfast.data.rows import IGNORE, RowArrays, Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.evaluation import statistics
from holdfast.evaluation.forward import Runner, few_widths
from holdfast.evaluation.scoring import Sums, row_sums
from holdfast.models.config import ModelSpec

NARROWEST = 32
MOST_WIDTHS = 4  # that one source is compiled for

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """What was measured on some rows: sums by row, in the order of the rows."""

    indices: NDArray[np.int64]
    nll: Floats
    tokens: Floats
    num_bytes: Floats  # of text that the counted targets stand for
    groups: NDArray[np.int64]  # the document in which each row begins
    kl_forward: Floats
    kl_reverse: Floats
    kl_tokens: Floats

    def measures(self) -> dict[str, float | None]:
        """The figures: token-weighted NLL, bits per byte, mean divergences; None where nothing was measured."""
        return {
            "nll": _ratio(self.nll, self.tokens),
            "bits_per_byte": statistics.bits_per_byte(float(self.nll.sum()), int(self.num_bytes.sum())),
            "kl_forward": _ratio(self.kl_forward, self.kl_tokens),
            "kl_reverse": _ratio(self.kl_reverse, self.kl_tokens),
        }

    def intervals(self, seed: int = 0) -> dict[str, tuple[float, float]]:
        """Bootstrap intervals of the figures, resampling groups of rows; none for fewer than two groups."""
        pairs = {
            "nll": (self.nll, self.tokens, 1.0),
            "bits_per_byte": (self.nll, self.num_bytes, np.log(2)),
            "kl_forward": (self.kl_forward, self.kl_tokens, 1.0),
            "kl_reverse": (self.kl_reverse, self.kl_tokens, 1.0),
        }
        found: dict[str, tuple[float, float]] = {}
        for name, (tops, bottoms, unit) in pairs.items():
            counted = bottoms > 0
            if len(np.unique(self.groups[counted])) >= 2 and np.isfinite(tops).all():
                ends = statistics.bootstrap_ratio(tops[counted], bottoms[counted], self.groups[counted], seed=seed)
                found[name] = (ends.low / unit, ends.high / unit)
        return found


def _ratio(tops: Floats, bottoms: Floats) -> float | None:
    total = float(bottoms.sum())
    return float(tops.sum()) / total if total else None


def held_out(
    runner: Runner[Any],
    params: Any,
    rows: Rows,
    *,
    limit: int | None = None,
    batch_size: int = 32,
    reference: Any = None,
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
    return HeldOut(np.arange(count), nll, tokens, num_bytes, groups, kl_forward, kl_reverse, kl_tokens)


def padded_row_sums(model: Any, spec: ModelSpec, params: tuple[Any, Any], *arrays: jax.Array) -> Sums:
    """`row_sums` of the arrays of a batch, for parameters of a model and of its reference (or None)."""
    return row_sums(model.apply, spec, params[0], RowArrays(*arrays), params[1])  # type: ignore[arg-type]  # traced


def _batches(
    runner: Runner[Any], rows: Rows, count: int, batch_size: int
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


def _used(rows: Rows, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many positions of each row are not padding on the right."""
    if rows.style is DatasetStyle.PMD:
        return np.full(len(indices), rows.block_size)
    used: NDArray[np.int64] = rows.rows(indices).padding_mask.sum(1)
    return used


def _fill(array: NDArray[np.int32], num_rows: int) -> NDArray[np.int32]:
    filled = np.zeros((num_rows, array.shape[1]), np.int32)
    filled[: len(array)] = array
    return filled
