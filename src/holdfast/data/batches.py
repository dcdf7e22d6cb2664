"""Batches of a run as a random-access dataset: `batches[step]` is a pure function of the plan and the step.

Legend: S micro-batches, B rows of one, T tokens of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.data.plan import DataPlan
from holdfast.data.sampling import DatasetStyle, SourceKey

IntArray = NDArray[np.int32]


class Batch(NamedTuple):
    """Rows for one step; mask 1 = a real token, y = -1 = not part of the loss."""

    x: Any  # int32 (..., T)
    y: Any  # int32 (..., T)
    padding_mask: Any  # int8 (..., T)
    segment_ids: Any = None  # int32 (..., T) where rows are packed: 0 = padding, examples 1, 2, …
    positions: Any = None  # int32 (..., T) where rows are packed
    penalty_mask: Any = None  # int8 (..., T) where a penalty looks


class RowSource(Protocol):
    """The rows of one prepared source in one style."""

    def __len__(self) -> int: ...

    def rows(self, indices: Any) -> Any:
        """Stacked (x, y, padding_mask, segment_ids, positions) of the rows."""


@dataclass(frozen=True)
class PenaltyView:
    """What of a batch the penalty and the loss see.

    Args:
        tokens: `all` real tokens, or those of the `loss`.
        on: the whole `batch`, or `old` rows, whose source belongs to an earlier stage.
        replay_objective: what old rows train: `ce`, `kl` or `both`.
    """

    tokens: str = "all"
    on: str = "batch"
    replay_objective: str = "both"


class Batches:
    """The batches of a run.

    Args:
        plan: which rows a step draws.
        rows: the rows of each source.
        num_micro: S, micro-batches of a step.
        penalty: what the penalty sees; None where no stage has one.
        local: the part of B that this process reads.
    """

    def __init__(
        self,
        plan: DataPlan,
        rows: Mapping[SourceKey, RowSource],
        num_micro: int,
        penalty: PenaltyView | None = None,
        local: slice = slice(None),
    ) -> None:
        self.plan = plan
        self.num_micro = num_micro
        self.penalty = penalty
        self._rows = [rows[source] for source in plan.sources]
        self._packed = any(source.style is DatasetStyle.PACKED for source in plan.sources)
        size = plan.curriculum.batch_size
        self._selected = np.arange(size).reshape(num_micro, size // num_micro)[:, local]  # (S, local B)

    def __len__(self) -> int:
        return self.plan.curriculum.total_steps

    def __getitem__(self, step: int) -> Batch:
        refs = self.plan.rows_at(step)
        flat = self._selected.reshape(-1)
        source, row = refs.source[flat], refs.row[flat]
        fields = gather(self._rows, source, row, self.plan.curriculum.block_size)
        batch = self._masked(fields, self._is_old(step)[source])
        return Batch(*(None if a is None else a.reshape(*self._selected.shape, a.shape[-1]) for a in batch))

    def _is_old(self, step: int) -> NDArray[np.bool_]:
        curriculum = self.plan.curriculum
        stage = curriculum.stage_at(step)
        return np.array([curriculum.home(source) < stage for source in self.plan.sources])

    def _masked(self, batch: Batch, old: NDArray[np.bool_]) -> Batch:
        if not self._packed:
            batch = batch._replace(segment_ids=None, positions=None)
        view = self.penalty
        if view is None:
            return batch
        counted = batch.padding_mask if view.tokens == "all" else batch.padding_mask * (batch.y >= 0)
        sees = old if view.on == "old" else np.ones_like(old)
        if view.replay_objective == "ce":
            sees = sees & ~old
        y = np.where(old[:, None], -1, batch.y).astype(np.int32) if view.replay_objective == "kl" else batch.y
        return batch._replace(y=y, penalty_mask=(counted * sees[:, None]).astype(np.int8))


def gather(rows: Sequence[RowSource], source: NDArray[np.int64], row: NDArray[np.int64], block_size: int) -> Batch:
    """Rows of several sources, in the order asked for, (rows, T) each."""
    fields = [np.zeros((len(source), block_size), np.int32) for _ in range(5)]
    fields[2] = fields[2].astype(np.int8)
    for number in np.unique(source):
        here = source == number
        for field, values in zip(fields, rows[number].rows(row[here]), strict=True):
            field[here] = values
    return Batch(*fields)


def prefetched(batches: Batches, start: int, ahead: int) -> Iterator[Batch]:
    """Batches from a step to the end, made in a background thread with a small bounded buffer."""
    import grain

    dataset = grain.MapDataset.source(batches)[start:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)))
