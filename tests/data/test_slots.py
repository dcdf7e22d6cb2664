"""Old slots: they hold every old row, and no step has other rows for it."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.curriculum import Curriculum, FadeConfig, Stage
from holdfast.data.batches import Batches, PenaltyView, slot_rows
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.sampling import DatasetStyle, Sampling, SourceKey
from holdfast.data.slots import OldSlots, most_old_rows, slot_order
from holdfast.training.stages import ReplayConfig, with_replay

TIME = 4
NAMES = "abc"


class Numbered:
    """Rows that tell where they come from: source number × 1000 + row in every token."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 50

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        x = np.repeat((self.number * 1000 + indices)[:, None], TIME, axis=1)
        return x, x, np.ones_like(x), np.ones_like(x), np.zeros_like(x)


@st.composite
def plans(draw: st.DrawFn) -> tuple[DataPlan, int, int]:
    """A plan with replay, with fades or without, and how its batches are cut."""
    num_micro, shards = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    batch_size = num_micro * shards * draw(st.integers(1, 5))
    stages = tuple(
        Stage(name, batch_size * TIME * draw(st.integers(2, 12)), (Sampling(name, 1.0, DatasetStyle.PMD),))
        for name in NAMES
    )
    replay = ReplayConfig(rate=draw(st.sampled_from([0.0, 0.1, 0.25, 0.6])))
    fade = FadeConfig(overlap=draw(st.sampled_from([0.0, 0.3, 1.0])))
    curriculum = Curriculum(with_replay(stages, replay), batch_size, TIME, fade)
    sizes = {SourceKey(name, DatasetStyle.PMD): SourceSize(50, 4.0, name) for name in NAMES}
    return DataPlan(curriculum, draw(st.integers(0, 9)), sizes), num_micro, shards


def batches(plan: DataPlan, num_micro: int, slots: OldSlots | None, local: slice = slice(None)) -> Batches:
    rows = {source: Numbered(number) for number, source in enumerate(plan.sources)}
    return Batches(plan, rows, num_micro, PenaltyView(on="old"), local, marks_old=True, slots=slots)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_slots_hold_all_old_rows_and_the_rows_of_a_step_stay_the_same(made: tuple[DataPlan, int, int]) -> None:
    plan, num_micro, shards = made
    most = {stage: most_old_rows(plan, stage) for stage in (1, 2)}
    slots = OldSlots(plan.curriculum, most, num_micro, shards)
    before, after = batches(plan, num_micro, None), batches(plan, num_micro, slots)
    sizes = set()
    for step in range(plan.curriculum.total_steps):
        plain, slotted = before[step], after[step]
        if plan.curriculum.stage_at(step) == 0:
            assert slotted.slots is None
            assert (plain.x == slotted.x).all(), "a stage without slots keeps its order"
            continue
        assert Counter(plain.x[..., 0].flat) == Counter(slotted.x[..., 0].flat)
        held = slot_rows(slotted)
        assert held.old_mask.sum() == slotted.old_mask.sum() == plain.old_mask.sum()
        assert held.penalty_mask.sum() == slotted.penalty_mask.sum()
        assert (slotted.slots.reshape(num_micro, -1) == held.old_mask[..., 0]).all()
        per_block = slotted.slots.sum(axis=-1)
        assert per_block.max() - per_block.min() <= 1, "old rows are spread evenly"
        sizes.add((plan.curriculum.stage_at(step), plan.curriculum.fades_at(step), slotted.slots.shape))
    assert len(sizes) == len({(stage, fades) for stage, fades, _ in sizes}), "one shape a part of a stage"
    counted = plan.table.counts_until(plan.curriculum.total_steps)
    for stage, (constant, fades) in most.items():
        steps = range(plan.curriculum.stage_start(stage), plan.curriculum.stage_end(stage))
        old = {step: int(counted[step][plan.is_old(stage)].sum()) for step in steps}
        assert constant == max((old[step] for step in steps if not plan.curriculum.fades_at(step)), default=0)
        assert fades == max((old[step] for step in steps if plan.curriculum.fades_at(step)), default=0)


@settings(max_examples=20, deadline=None)
@given(plans())
def test_processes_read_the_parts_of_one_batch(made: tuple[DataPlan, int, int]) -> None:
    plan, num_micro, shards = made
    slots = OldSlots(plan.curriculum, {1: most_old_rows(plan, 1)}, num_micro, shards)
    step, block = plan.curriculum.stage_start(1), plan.curriculum.batch_size // (num_micro * shards)
    whole = batches(plan, num_micro, slots)[step]
    parts = [
        batches(plan, num_micro, slots, slice(shard * block, (shard + 1) * block))[step] for shard in range(shards)
    ]
    for name in ("x", "old_mask", "penalty_mask", "slots"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        assert (joined == getattr(whole, name)).all(), name


def test_a_period_that_repeats_is_looked_at_once() -> None:
    stages = (
        Stage("a", 40, (Sampling("a", 1.0, DatasetStyle.PMD),)),
        Stage("b", 40_000_000, (Sampling("b", 0.7, DatasetStyle.PMD), Sampling("a", 0.3, DatasetStyle.PMD))),
    )
    plan = DataPlan(Curriculum(stages, 10, TIME), 0)
    assert most_old_rows(plan, 1) == (3, 0)
    assert len(plan.table.kinds_between(1, plan.curriculum.total_steps)) < 100


def test_other_rows_keep_their_order() -> None:
    old = np.array([0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], bool)
    order = slot_order(old, 2, 2, 1)
    assert order.tolist() == [1, 0, 2, 5, 3, 4, 6, 7, 8, 9, 10, 11]
