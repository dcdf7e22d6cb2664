"""Control rows: rows of an old source with a budget that are held out while it is old, and measure what it loses.

Every tenth draw of such a source is a control row. Draws of either kind walk through rows of their own, epoch after
epoch. All of it follows from the plan: a function of the past, never of later stages.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.permutation import key_of, permute
from holdfast.data.sampling import SourceKey

if TYPE_CHECKING:
    from holdfast.data.plan import DataPlan

CONTROL_EVERY = 10
FEWEST_CONTROL, MOST_CONTROL = 256, 512  # different ones: at least, where the source has twice as many, and at most
STRETCHES = 8  # of rows that follow each other, which control rows are

Places = NDArray[np.int64]


class Pool(NamedTuple):
    """The rows that an old source with a budget is drawn from.

    Args:
        size: how many there are.
        control: how many of them are control rows.
        drawn: rows of the source that were drawn before.
        offset: the first control row; None where the pool is a memory, whose rows are not next to each other.
    """

    size: int
    control: int
    drawn: int
    offset: int | None = None


class ControlRows:
    """The control rows of all sources with a budget in a plan."""

    def __init__(self, plan: "DataPlan") -> None:
        self.plan = plan
        self.curriculum = plan.curriculum

    def drawn_rows(self, draws: Places, source: SourceKey, stage: int) -> tuple[Places, Places]:
        """The rows behind some draws of a source with a budget, and their places in its control set or −1."""
        pool = self._pool(source, stage)
        since = draws - pool.drawn
        control = since % CONTROL_EVERY == CONTROL_EVERY - 1
        places = np.full(len(draws), -1)
        key = self._since(source, stage)
        places[control] = self.plan.permuted(since[control] // CONTROL_EVERY, source, pool.control, "control", key)
        others = since[~control] - since[~control] // CONTROL_EVERY
        rows = np.empty(len(draws), np.int64)
        rows[control] = self._pooled(places[control], source, stage, pool)
        trained = self.plan.permuted(others, source, pool.size - pool.control, "kept", key)
        rows[~control] = self._pooled(pool.control + trained, source, stage, pool)
        return rows, places

    def size(self, source: SourceKey, stage: int) -> int:
        """How many different control rows a source has in a stage."""
        if self.curriculum.is_sampled(source.name) and stage not in self.plan.sampled_sets:
            return 0
        return self._pool(source, stage).control

    def rows(self, source: SourceKey, stage: int) -> Places:
        """The control set of a source, in the order of `RowRefs.control`."""
        pool = self._pool(source, stage)
        return self._pooled(np.arange(pool.control), source, stage, pool)

    def drawn(self, source: SourceKey, stage: int) -> int:
        """How many control rows a stage draws outside its fades, where they steer."""
        curriculum, total = self.curriculum, 0
        sampled = curriculum.is_sampled(source.name)
        first = self.plan.drawn_before(curriculum.stage_start(stage if sampled else self._since(source, stage)))[source]
        for start, stop, constant in curriculum.segments():
            begin, end = max(start, curriculum.stage_start(stage)), min(stop, curriculum.stage_end(stage))
            if constant and begin < end:
                before, after = (self.plan.drawn_before(at)[source] - first for at in (begin, end))
                total += after // CONTROL_EVERY - before // CONTROL_EVERY
        return total

    def expected_tokens(self, name: str, step: int) -> float:
        """Tokens of a source that a step trains on if all goes by shares."""
        plan = self.plan
        assert plan.sizes is not None
        found = [
            share * size.mean_loss_tokens
            for source, share, size in zip(plan.sources, plan.row_shares_at(step), plan.sizes, strict=True)
            if source.name == name
        ]
        return max(sum(found) * self.curriculum.batch_size * (1 - 1 / CONTROL_EVERY), 1.0)

    def _pooled(self, places: Places, source: SourceKey, stage: int, pool: Pool) -> Places:
        """Rows by their places in a pool, control rows first."""
        if self.curriculum.is_sampled(source.name):
            return self.plan.sampled_sets[stage].first_row + places
        if pool.offset is None:
            return self.plan.permuted(places, source, self._num_rows(source))
        return in_stretches(places, pool.size, pool.control, pool.offset)

    def _since(self, source: SourceKey, stage: int) -> int:
        """The stage in which the control set of a source is chosen: of `self` each has its own."""
        if self.curriculum.is_sampled(source.name):
            return stage
        return next(budget.since for budget in self.curriculum.budgets if budget.name == source.name)

    def _pool(self, source: SourceKey, stage: int) -> Pool:
        """What the draws of a source come from."""
        plan = self.plan
        if self.curriculum.is_sampled(source.name):
            made = plan.sampled_sets[stage]
            return Pool(made.num_rows, num_control(made.num_rows), made.first_draw)
        drawn = plan.drawn_before(self.curriculum.stage_start(self._since(source, stage)))[source]
        memory = self.curriculum.memory
        if memory is not None and self.from_memory(source):
            known = memory.rows if plan.sizes is None else self._num_rows(source)
            size = max(1, min(memory.rows, drawn, known))
            return Pool(size, num_control(size), drawn)
        size = self._num_rows(source)
        offset = int(permute(np.zeros(1, np.int64), size, key_of(plan.seed, source.name, "control"))[0])
        return Pool(size, num_control(size), drawn, offset)

    def from_memory(self, source: SourceKey) -> bool:
        """Whether old rows of a source come from a memory of a given size."""
        memory = self.curriculum.memory
        return memory is not None and any(source in replayed for replayed in memory.replayed)

    def _num_rows(self, source: SourceKey) -> int:
        assert self.plan.sizes is not None
        return self.plan.sizes[self.plan.sources.index(source)].num_rows


def num_control(pool: int) -> int:
    """How many of so many rows are control rows: a tenth, at least 256, at most 512 and half of them.

    >>> num_control(100), num_control(1000), num_control(4000), num_control(10**6)
    (50, 256, 400, 512)
    """
    return min(max(-(-pool // CONTROL_EVERY), FEWEST_CONTROL), MOST_CONTROL, pool // 2)


def in_stretches(places: Places, size: int, control: int, offset: int) -> Places:
    """Rows by their places, of which the first are control rows: stretches of rows that follow each other.

    Rows of a stream share documents with their neighbours: a control row between rows that are trained on would tell
    how well its document is learned, not how much is forgotten.

    >>> in_stretches(np.arange(40), 40, 16, 38).tolist()[:18]
    [38, 39, 3, 4, 8, 9, 13, 14, 18, 19, 23, 24, 28, 29, 33, 34, 0, 1]
    """
    stretches = np.arange(min(STRETCHES, control))
    count = max(len(stretches), 1)
    starts = stretches * (size // count)
    lengths = control // count + (stretches < control % count)
    before = np.cumsum(lengths) - lengths
    gaps = np.append(starts[1:], size) - (starts + lengths)
    skipped = np.cumsum(gaps) - gaps
    rows = np.empty_like(places)
    held, free = places[places < control], places[places >= control] - control
    own = np.searchsorted(before, held, side="right") - 1
    rows[places < control] = starts[own] + held - before[own]
    gap = np.searchsorted(skipped, free, side="right") - 1
    rows[places >= control] = (starts + lengths)[gap] + free - skipped[gap]
    found: Places = (rows + offset) % size
    return found
