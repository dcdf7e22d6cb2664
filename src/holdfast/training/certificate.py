"""What control rows say of a budget (`keep`) at the ends of stages.

A certificate looks at θ* + α(θ − θ*), θ* the snapshot, for α = 0, 0.05, … 1, upwards until the first failure: the last
α whose one-sided 95 % upper bound over control documents is within every budget. Testing in a fixed order and stopping
at the first failure keeps the chance of a false one at 5 %.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.curriculum import Budget
from holdfast.data.control import MOST_CONTROL
from holdfast.data.plan import DataPlan
from holdfast.data.rows import RowArrays, Rows
from holdfast.data.sampled import BLOCKS, SampledRows
from holdfast.data.sampling import SELF, DatasetStyle, SourceKey
from holdfast.evaluation import statistics
from holdfast.evaluation.forward import Runner
from holdfast.evaluation.perplexity import held_out
from holdfast.evaluation.sums import HeldOut
from holdfast.training.placement import placed_like
from holdfast.training.state import TrainState
from holdfast.training.step import plain
from holdfast.types import Json, Tree

ALPHAS = tuple(step / 20 for step in range(21))
ONE_SIDED = 0.90  # the level of a two-sided interval whose upper end is a one-sided bound at 95 %


@dataclass(frozen=True)
class ControlRows:
    """The control rows of a source as rows that can be measured."""

    rows_of: Rows | SampledRows
    indices: NDArray[np.int64]
    style: DatasetStyle
    block_size: int
    token_bytes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, indices: Any) -> RowArrays:
        """Several rows, as arrays of shape (N, T)."""
        return self.rows_of.rows(self.indices[np.asarray(indices)])

    def target_bytes(self, y: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The bytes of targets (…, T), summed over T."""
        summed: NDArray[np.int64] = np.append(self.token_bytes, 0)[y].sum(-1, dtype=np.int64)
        return summed

    def documents(self, index: int) -> range:
        """The documents that a row shows; of sampled rows the sample that it was cut from."""
        row = int(self.indices[index])
        if isinstance(self.rows_of, Rows):
            return self.rows_of.documents(row)
        return range(row // BLOCKS, row // BLOCKS + 1)


@dataclass(frozen=True)
class ControlSets:
    """The control rows of a run's budgets, and what measures them.

    Args:
        rows: of each source.
        token_bytes: of each token of the vocabulary.
        batch_size: rows at once.
    """

    plan: DataPlan
    rows: Mapping[SourceKey, Rows | SampledRows]
    token_bytes: NDArray[np.int32]
    runner: Runner
    batch_size: int

    def of(self, name: str, stage: int) -> ControlRows:
        """The control rows of a source in a stage."""
        source = next(source for source in self.plan.sources if source.name == name)
        chosen = self.plan.control.rows(source, stage)
        block_size = self.plan.curriculum.block_size
        return ControlRows(self.rows[source], chosen, source.style, block_size, self.token_bytes)

    def measured(self, name: str, stage: int, params: Tree, reference: Tree = None) -> HeldOut:
        """The loss of some parameters on control rows; with a reference, how far they are from it."""
        rows = self.of(name, stage)
        return held_out(self.runner, params, rows, batch_size=self.batch_size, reference=reference)

    def entered(self, state: TrainState, stage: int) -> TrainState:
        """The state in which the losses that budgets count from are known, on entering a stage in which some begin."""
        held = dict(state.keep)
        for budget in self.plan.curriculum.budgets:
            if budget.since == stage and budget.name != SELF.name:
                nll = self.measured(budget.name, stage, state.params).nll
                own = held[budget.name]
                stored = np.zeros(MOST_CONTROL, np.float32)
                stored[: len(nll)] = nll
                held[budget.name] = {**own, "reference": placed_like(jnp.asarray(stored), own["reference"])}
        return state.replace(keep=held)

    def rise(self, budget: Budget, stage: int, state: TrainState, params: Tree, level: float) -> statistics.Difference:
        """How much a budget's loss has risen on control rows, in bits per byte, with an interval over documents."""
        own = budget.name == SELF.name
        found = self.measured(budget.name, stage, params, plain(state, state.reference_params()) if own else None)
        count = len(found.nll)
        stored = np.asarray(jax.device_get(state.keep[budget.name]["reference"]), float)[:count]
        first, second = (np.zeros(count), found.kl_forward) if own else (stored, found.nll)
        if np.array_equal(first, second):  # the very weights that the rise is counted from
            return statistics.Difference(0.0, 0.0, 0.0, found.num_documents)
        groups = found.groups if found.num_documents > 1 else None
        change = statistics.paired_ratio(first, second, found.num_bytes, groups, level=level)
        assert change is not None, "a budget has at least 64 control rows"
        mean, low, high = (value / math.log(2) for value in change[:3])
        return statistics.Difference(mean, low, high, change.num)


def certificate(state: TrainState, stage: int, step: int, sets: ControlSets) -> Json:
    """How far from the snapshot towards its end a stage may go within all budgets, as control rows prove it."""
    budgets = sets.plan.curriculum.budgets_in(stage)
    start, end = plain(state, state.reference_params()), plain(state, state.params)
    alpha: float | None = None
    tested: list[Json] = []
    for share in ALPHAS:
        params = between(start, end, share)
        bounds = {each.name: sets.rise(each, stage, state, params, ONE_SIDED).high for each in budgets}
        tested.append({"alpha": share, "bounds": bounds})
        if not all(bounds[each.name] <= each.limit for each in budgets):
            break
        alpha = share
    return {"stage": stage, "step": step, "alpha": alpha, "applied": False, "tested": tested}


def with_control(found: Json, state: TrainState, sets: ControlSets) -> Json:
    """A certificate with what control rows say of the weights as they are, two-sided at 95 %."""
    stage, budgets = int(found["stage"]), sets.plan.curriculum.budgets_in(int(found["stage"]))
    rises = {each.name: sets.rise(each, stage, state, plain(state, state.params), statistics.LEVEL) for each in budgets}
    control = {name: {"rise": d.mean, "low": d.low, "high": d.high, "documents": d.num} for name, d in rises.items()}
    return {**found, "control": control}


def stepped_back(state: TrainState, alpha: float) -> TrainState:
    """The state at θ* + α(θ − θ*), and its average of weights as far back, if it has one."""
    start = state.trained_reference()
    trained = between(start, state.trained(), alpha)
    ema = None if state.ema is None else between(start, state.ema, alpha)
    return state.replace(params=state.objective.completed(state.params, trained), ema=ema)


def between(start: Tree, end: Tree, alpha: float) -> Tree:
    """start + α(end − start); the ends themselves at 0 and 1."""
    if alpha in (0.0, 1.0):
        return end if alpha else start
    return jax.tree.map(lambda a, b: (a + alpha * (b.astype(jnp.float32) - a)).astype(b.dtype), start, end)


def end_of_stage(
    state: TrainState, stage: int, step: int, sets: ControlSets, *, certify: bool
) -> tuple[TrainState, Json]:
    """The state after a stage with budgets, and its certificate, which is applied if asked for."""
    found = certificate(state, stage, step, sets)
    if certify and found["alpha"] is not None and found["alpha"] < 1:
        state, found = stepped_back(state, found["alpha"]), {**found, "applied": True}
    return state, with_control(found, state, sets)
