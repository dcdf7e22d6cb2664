"""Batches of a run as a random-access dataset: `batches[step]` is a pure function of the plan and the step.

Legend: S micro-batches, B rows of one, T tokens of a row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.data.plan import DataPlan, RowRefs
from holdfast.data.sampling import DatasetStyle, SourceKey
from holdfast.data.slots import OldSlots, slot_order

IntArray = NDArray[np.int32]


class Batch(NamedTuple):
    """Rows for one step; mask 1 = a real token, y = -1 = not part of the loss."""

    x: Any  # int32 (..., T)
    y: Any  # int32 (..., T)
    padding_mask: Any  # int8 (..., T)
    segment_ids: Any = None  # int32 (..., T) where rows are packed: 0 = padding, examples 1, 2, …
    positions: Any = None  # int32 (..., T) where rows are packed
    penalty_mask: Any = None  # int8 (..., T) where a penalty looks
    old_mask: Any = None  # int8 (..., T), 1 in rows of earlier stages' sources, where a method asks for it
    # int8 (S, shards, q) where old rows lie in slots: of the first q rows of each block, 1 where it is old. A block is
    # the part of a micro-batch's rows that one shard holds.
    slots: Any = None
    # float32 (S, B, 4) in runs with budgets, by `KeptRows`: of each row the number of its budget (1, 2, …; 0 = none,
    # negative = a control row), its place in the control set, the bytes of its targets, one over its expected tokens.
    kept: Any = None


class KeptRows(NamedTuple):
    """What a batch says of rows with a budget, (…, B) each."""

    budget: Any  # 0 = none, k = trained on for the k-th budget of the stage, −k = a control row of it
    place: Any  # in the control set
    num_bytes: Any  # of text that its targets stand for
    per_token: Any  # one over the tokens of this budget that a step is expected to train on


def slot_rows(batch: Batch) -> Batch:
    """The rows of the old slots alone, (..., shards × q, T) each; of a whole batch or of one micro-batch."""
    shards, slots = batch.slots.shape[-2:]

    def first(array: Any) -> Any:
        if array is None:
            return None
        before, (rows, time) = array.shape[:-2], array.shape[-2:]
        blocks = array.reshape(*before, shards, rows // shards, time)
        return blocks[..., :slots, :].reshape(*before, shards * slots, time)

    return Batch(*(first(array) for array in batch._replace(slots=None)))


def kept_rows(batch: Batch) -> KeptRows:
    """What a batch says of rows with a budget, as columns."""
    return KeptRows(*(batch.kept[..., column] for column in range(len(KeptRows._fields))))


def without_control(batch: Batch) -> Batch:
    """A batch whose control rows are padding: what is remembered for training must not have seen them."""
    if batch.kept is None:
        return batch
    seen = (kept_rows(batch).budget >= 0)[..., None]
    mask = batch.padding_mask * seen.astype(batch.padding_mask.dtype)
    return batch._replace(y=np.where(seen, batch.y, -1).astype(np.int32), padding_mask=mask)


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
        marks_old: whether batches say which rows are old.
        slots: where old rows lie; None where no stage has slots.
        token_bytes: bytes of each token of the vocabulary; for runs with budgets.
    """

    def __init__(
        self,
        plan: DataPlan,
        rows: Mapping[SourceKey, RowSource],
        num_micro: int,
        penalty: PenaltyView | None = None,
        local: slice = slice(None),
        *,
        marks_old: bool = False,
        slots: OldSlots | None = None,
        token_bytes: IntArray | None = None,
    ) -> None:
        self.plan = plan
        self.num_micro = num_micro
        self.penalty = penalty
        self.marks_old = marks_old
        self.slots = slots
        self._bytes = None if token_bytes is None else np.append(token_bytes, 0)  # 0 at −1: no target
        self._rows = [rows[source] for source in plan.sources]
        self._packed = any(source.style is DatasetStyle.PACKED for source in plan.sources)
        size = plan.curriculum.batch_size
        self._selected = np.arange(size).reshape(num_micro, size // num_micro)[:, local]  # (S, local B)

    def __len__(self) -> int:
        return self.plan.curriculum.total_steps

    def _drawn(self, step: int) -> tuple[RowRefs, NDArray[np.bool_], NDArray[np.int64], int | None]:
        """The rows of a step, which of them are old, the order in which this process has them, and their slots."""
        refs = self.plan.rows_at(step)
        old = self.plan.is_old(self.plan.curriculum.stage_at(step))[refs.source]
        flat = self._selected.reshape(-1)
        slots = None if self.slots is None else self.slots.at(step)
        if self.slots is not None and slots is not None:
            flat = slot_order(old, self.slots.num_micro, self.slots.shards, slots)[flat]
        return refs, old, flat, slots

    def refs(self, step: int) -> RowRefs:
        """What the rows of a step's batch are, one after the other as the batch has them."""
        refs, _, flat, _ = self._drawn(step)
        return RowRefs(*(part[flat] for part in refs))

    def __getitem__(self, step: int) -> Batch:
        refs, old, flat, slots = self._drawn(step)
        fields = gather(self._rows, refs.source[flat], refs.row[flat], self.plan.curriculum.block_size)
        batch = self._masked(fields, old[flat])
        if self.plan.curriculum.budgets:
            kept = self._kept(step, refs.source[flat], refs.control[flat], fields)
            # What rows with a budget train is for their weights to say; their targets are there to be measured.
            batch = batch._replace(kept=kept, y=np.where(kept[:, :1] != 0, fields.y, batch.y))
        batch = Batch(*(None if a is None else a.reshape(*self._selected.shape, a.shape[-1]) for a in batch))
        if self.slots is None or slots is None:
            return batch
        block = self.plan.curriculum.batch_size // (self.slots.num_micro * self.slots.shards)
        held = old[flat].reshape(self.num_micro, -1, block)[..., :slots]
        return batch._replace(slots=held.astype(np.int8))

    def _kept(
        self, step: int, source: NDArray[np.int64], control: NDArray[np.int64], fields: Batch
    ) -> NDArray[np.float32]:
        """`Batch.kept` of rows, (rows, 4)."""
        assert self._bytes is not None, "a run with budgets knows the bytes of tokens"
        plan, found = self.plan, np.zeros((len(source), len(KeptRows._fields)), np.float32)
        budgets = plan.curriculum.budgets_in(plan.curriculum.stage_at(step))
        for number, budget in enumerate(budgets, 1):
            here = np.isin(source, [at for at, key in enumerate(plan.sources) if key.name == budget.name])
            found[here, 0] = np.where(control[here] < 0, number, -number)
            found[here, 1] = np.maximum(control[here], 0)
            found[here, 3] = 1 / plan.control.expected_tokens(budget.name, step)
        found[:, 2] = self._bytes[np.where(fields.padding_mask > 0, fields.y, -1)].sum(-1)
        return found

    def _masked(self, batch: Batch, old: NDArray[np.bool_]) -> Batch:
        if not self._packed:
            batch = batch._replace(segment_ids=None, positions=None)
        if self.marks_old:
            batch = batch._replace(old_mask=np.broadcast_to(old[:, None], batch.x.shape).astype(np.int8))
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


def validation_batches(
    rows: Any, num_rows: int, shape: tuple[int, int], packed: bool, local: slice = slice(None)
) -> Iterator[Batch]:
    """The first rows of a validation split as (S, B, T) batches, the last one filled up with masked rows.

    Args:
        rows: with `block_size`, as `holdfast.data.rows.Rows`.
        local: the part of B that this process reads.
    """
    count = min(num_rows, len(rows))
    per_batch = shape[0] * shape[1]
    for start in range(0, count, per_batch):
        here = np.arange(start, start + per_batch).reshape(shape)[:, local]
        chosen, real = here.reshape(-1), here.reshape(-1) < count
        batch = gather([rows], np.zeros(len(chosen), np.int64), np.where(real, chosen, 0), rows.block_size)
        batch = batch._replace(padding_mask=batch.padding_mask * real[:, None].astype(np.int8))
        if not packed:
            batch = batch._replace(segment_ids=None, positions=None)
        yield Batch(*(None if a is None else a.reshape(*here.shape, a.shape[-1]) for a in batch))


@dataclass(frozen=True)
class _BySteps:
    """Batches by step as a random-access dataset."""

    batch_at: Callable[[int], Batch]
    num_steps: int

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        return self.batch_at(step)


def prefetched(batch_at: Callable[[int], Batch], num_steps: int, start: int, ahead: int) -> Iterator[Batch]:
    """The batches from a step to the end, made in a background thread with a small bounded buffer."""
    import grain

    dataset = grain.MapDataset.source(_BySteps(batch_at, num_steps))[start:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)))
