"""Rows: how the documents of a prepared store become rows of a batch, by style.

Legend: N rows, T positions a row. x_NT are inputs, y_NT the next tokens, −1 where the loss does not look.

- PMD: row i is tokens [i·T, (i+1)·T) of the flat stream, and every position has a target.
- PADDED: one document a row, padded on the right.
- PACKED: whole documents side by side, in store order, the next one opening a new row when it does not fit.

A document of L tokens has L − 1 inputs, in PADDED and PACKED alike: its last token, the end of text, is only
ever a target. One that does not fit is cut: first the left end of its prompt (one token stays), then its right end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.sampling import DatasetStyle
from holdfast.data.store import TokenStore
from holdfast.errors import UserError

IGNORE = -1  # target that the loss skips

Ints = NDArray[np.int32]


class RowArrays(NamedTuple):
    """Rows as arrays of shape (N, T) or, for one row, (T,)."""

    x: Ints
    y: Ints
    padding_mask: Ints  # 1 = a real token
    segment_ids: Ints  # 0 = padding, documents of a row 1, 2, …
    positions: Ints  # restart at 0 in every document of a packed row


class Rows:
    """The rows of a store in one style; any row, at any time, by its index.

    Args:
        prepared: the store.
        style: how documents become rows.
        block_size: T.
        loss_on: `answer` leaves prompt tokens, and all but the assistant's of a chat, out of the loss (PADDED and
            PACKED), `all` counts them.
        pad_id: what fills the padding; never seen by the loss.
    """

    def __init__(
        self, prepared: TokenStore, style: DatasetStyle, block_size: int, *, loss_on: str = "answer", pad_id: int = 0
    ) -> None:
        self.prepared = prepared
        self.style = style
        self.block_size = block_size
        self.pad_id = pad_id
        self.num_truncated = 0  # documents that were cut to fit
        if prepared.num_tokens < 2:
            raise UserError(f"dataset {prepared.name}/{prepared.split}: {prepared.num_tokens} tokens make no row")
        if style is DatasetStyle.PMD:
            # A stream shorter than one row is a row all the same, padded, so that small validation sets count.
            self._num_rows = max((prepared.num_tokens - 1) // block_size, 1)
            self.mean_tokens = self.mean_loss_tokens = float(min(block_size, prepared.num_tokens - 1))
            return
        self._cut_documents(loss_on)
        first = np.arange(prepared.num_documents + 1) if style is DatasetStyle.PADDED else self._pack()
        self._first = first.astype(np.int64)  # first document of each row, and one past the last
        self._num_rows = len(first) - 1
        self.mean_tokens = float(self._sizes.sum() / self._num_rows)
        self.mean_loss_tokens = float(self._loss_tokens().sum() / self._num_rows)
        if not self.mean_loss_tokens:
            raise UserError(
                f"dataset {prepared.name}/{prepared.split}: none of its {self._num_rows:,} rows ({style.name}) has a "
                "token that the loss counts, so nothing would be learnt from it; a chat needs turns of the assistant, "
                f"and its template, data/sources/{prepared.name}/chat_template, must mark or render them; "
                "data/loss_on: all counts every token"
            )

    def _cut_documents(self, loss_on: str) -> None:
        """Where each document's inputs start in the stream, how many there are, and how many have no target."""
        offsets = np.asarray(self.prepared.offsets)
        lengths = np.diff(offsets)
        prompts = np.asarray(self.prepared.prompt_lengths, np.int64)
        excess = np.maximum(lengths - (self.block_size + 1), 0)
        left = np.minimum(excess, np.maximum(prompts - 1, 0))
        self.num_truncated = int((excess > 0).sum())
        self._starts = offsets[:-1] + left
        self._sizes = np.minimum(lengths, self.block_size + 1) - 1
        # The position of the last prompt token predicts the first token of the answer, so it counts.
        self._skipped = np.maximum(prompts - left - 1, 0) if loss_on == "answer" else np.zeros_like(prompts)
        self._mask = self.prepared.loss_mask if loss_on == "answer" else None

    def _loss_tokens(self) -> NDArray[np.int64]:
        """How many targets of each document the loss counts."""
        if self._mask is None:
            counted: NDArray[np.int64] = self._sizes - np.minimum(self._skipped, self._sizes)
            return counted
        found = np.zeros(len(self._sizes), np.int64)
        some = np.flatnonzero(self._sizes)
        first = self._starts[some] + 1  # the first token of a document is no target
        edges = np.stack([first, first + self._sizes[some]], 1).reshape(-1)
        if len(edges):
            inside = edges[:-1] if edges[-1] == len(self._mask) else edges  # the last sum runs to the end by itself
            found[some] = np.add.reduceat(self._mask, inside, dtype=np.int64)[::2]
        return found

    def _pack(self) -> NDArray[np.int64]:
        ends = np.concatenate([[0], np.cumsum(self._sizes)])
        following = (np.searchsorted(ends, ends[:-1] + self.block_size, side="right") - 1).tolist()
        first = [0]
        count = len(following)
        while first[-1] < count:
            first.append(following[first[-1]])
        return np.array(first, np.int64)

    @property
    def loss_share(self) -> float:
        """The share of the tokens in rows that the loss counts."""
        return self.mean_loss_tokens / self.mean_tokens

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> RowArrays:
        """One row, as arrays of shape (T,)."""
        return RowArrays(*(array[0] for array in self.rows([index])))

    def rows(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> RowArrays:
        """Several rows, as arrays of shape (N, T)."""
        chosen = np.asarray(indices, np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self._num_rows):
            raise IndexError(f"row {chosen.max()} of {self._num_rows}")
        return self._stream_rows(chosen) if self.style is DatasetStyle.PMD else self._document_rows(chosen)

    def _stream_rows(self, chosen: NDArray[np.int64]) -> RowArrays:
        width = self.block_size
        size = min(width, self.prepared.num_tokens - 1)
        self.prepared.ensure(chosen * width, chosen * width + size + 1)
        flat = self.prepared.flat
        tokens = np.empty((len(chosen), size + 1), np.int32)
        for row, start in enumerate((chosen * width).tolist()):
            tokens[row] = flat[start : start + size + 1]
        ones = np.ones((len(chosen), width), np.int32)
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), ones.shape).copy()
        if size == width:
            return RowArrays(tokens[:, :-1].copy(), tokens[:, 1:].copy(), ones, ones.copy(), positions)
        result = self._blank(len(chosen))
        values: tuple[Any, ...] = (tokens[:, :-1], tokens[:, 1:], 1, 1, positions[:, :size])
        for array, value in zip(result, values, strict=True):
            array[:, :size] = value
        return result

    def _blank(self, count: int) -> RowArrays:
        shape = (count, self.block_size)
        x, y = np.full(shape, self.pad_id, np.int32), np.full(shape, IGNORE, np.int32)
        return RowArrays(x, y, *(np.zeros(shape, np.int32) for _ in range(3)))

    def _document_rows(self, chosen: NDArray[np.int64]) -> RowArrays:
        result = self._blank(len(chosen))
        counts = self._first[chosen + 1] - self._first[chosen]
        segment = _within(counts)  # 0, 1, … in each row
        documents = np.repeat(self._first[chosen], counts) + segment
        sizes, starts = self._sizes[documents], self._starts[documents]
        self.prepared.ensure(starts, starts + sizes + 1)
        before = np.cumsum(sizes) - sizes  # inputs of all documents before this one, over all chosen rows
        row_start = np.repeat(before[np.cumsum(counts) - counts], counts) if len(before) else before
        row_of = np.repeat(np.arange(len(chosen)), counts)
        column = before - row_start
        step = np.arange(int(sizes.sum()))
        position = step - np.repeat(before, sizes)
        source = np.repeat(starts, sizes) + position
        target = np.repeat(row_of * self.block_size + column, sizes) + position
        flat = self.prepared.flat
        answers = flat[source + 1].astype(np.int32)
        answers[position < np.repeat(self._skipped[documents], sizes)] = IGNORE
        if self._mask is not None:
            answers[self._mask[source + 1] == 0] = IGNORE
        values = (flat[source], answers, 1, np.repeat(segment + 1, sizes), position)
        for array, value in zip(result, values, strict=True):
            array.reshape(-1)[target] = value
        return result

    def documents(self, index: int) -> range:
        """The documents of the store that a row shows, whole or in part."""
        if self.style is not DatasetStyle.PMD:
            return range(int(self._first[index]), int(self._first[index + 1]))
        start = index * self.block_size
        stop = min(start + self.block_size + 1, self.prepared.num_tokens)
        first, last = np.searchsorted(self.prepared.offsets, [start, stop - 1], side="right") - 1
        return range(int(first), int(last) + 1)

    def loss_tokens(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """How many targets the loss counts in each of some rows."""
        counted: NDArray[np.int64] = (self.rows(indices).y != IGNORE).sum(1)
        return counted

    def loss_bytes(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """How many bytes of text the counted targets of each row stand for.

        Bits per byte of any set of rows are their summed nll / ln 2 / summed loss bytes; the end of text is paid
        for but stands for no byte.
        """
        return self.target_bytes(self.rows(indices).y)

    def target_bytes(self, y: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The bytes of targets (…, T) that a batch already holds, summed over T."""
        sizes = np.append(self.prepared.token_bytes, 0)  # index −1, ignored targets, falls on the appended 0
        summed: NDArray[np.int64] = sizes[y].sum(-1, dtype=np.int64)
        return summed


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, …, n − 1 for every n of counts, end to end.

    >>> _within(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
