"""Old slots: where the old rows of a batch lie, so that work which looks at old rows alone is done for few rows.

A step's rows are cut into blocks, one for each micro-batch and shard. Each block begins with q slots that together hold
all old rows of the step; other rows lie in the slots that are left. q is a shape of the compiled step, so there is one
for the constant parts of a stage and one for its fades. The rows of a step are the same with slots and without.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.curriculum import Curriculum
from holdfast.data.plan import DataPlan


@dataclass(frozen=True)
class OldSlots:
    """How many slots each block of a step begins with.

    Args:
        most: for each stage with slots the most old rows of a step, in its constant parts and in its fades.
        num_micro: S, micro-batches of a step.
        shards: of the rows of a micro-batch.
    """

    curriculum: Curriculum
    most: Mapping[int, tuple[int, int]]
    num_micro: int
    shards: int

    def at(self, step: int) -> int | None:
        """Slots of each block at a step; None where its stage has none."""
        stage = self.curriculum.stage_at(step)
        if stage not in self.most:
            return None
        return self.needed(self.most[stage][self.curriculum.fades_at(step)])

    def needed(self, old_rows: int) -> int:
        """Slots of each block that hold so many old rows together."""
        return -(-old_rows // (self.num_micro * self.shards))


def most_old_rows(plan: DataPlan, stage: int) -> tuple[int, int]:
    """The most old rows of any step of a stage: in its constant parts, and in its fades."""
    curriculum, most = plan.curriculum, [0, 0]
    old = plan.is_old(stage)
    begin, end = curriculum.stage_start(stage), curriculum.stage_end(stage)
    for start, stop, constant in curriculum.segments():
        first, last = max(start, begin), min(stop, end)
        if first < last:
            rows = plan.table.kinds_between(first, last)[:, old].sum(axis=1)
            most[not constant] = max(most[not constant], int(rows.max()))
    return most[0], most[1]


def slot_order(old: NDArray[np.bool_], num_micro: int, shards: int, slots: int) -> NDArray[np.int64]:
    """An order of the rows of a step in which old rows lie in the first slots of each block, spread evenly.

    Apart from that rows stay in their order.

    >>> slot_order(np.array([False, False, True, False, True, False, False, False]), 1, 2, 1).tolist()
    [2, 0, 1, 3, 4, 5, 6, 7]
    """
    places = np.arange(len(old)).reshape(num_micro * shards, -1)
    # The first slot of every block, then the second of every block, …
    held = places[:, :slots].T.reshape(-1)[: np.count_nonzero(old)]
    assert len(held) == np.count_nonzero(old), "the slots hold all old rows"
    others = np.ones(len(old), bool)
    others[held] = False
    order = np.empty(len(old), np.int64)
    order[held], order[others] = np.flatnonzero(old), np.flatnonzero(~old)
    return order
