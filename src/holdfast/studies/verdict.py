"""Does an arm keep more of the old than plain training that learns as much of the new?

An arm is compared with plain's frontier twice, seed by seed; δ is a small margin on the new loss:

    Δ₊ = least old of plain with new ≤ new_arm + δ,  minus old_arm      "better" needs Δ₊ surely above 0
    Δ₋ = least old of plain with new ≤ new_arm − δ,  minus old_arm      "worse" needs Δ₋ surely below 0

so that noise in the new loss, or a frontier that falls steeply, makes no winner and no loser. Holm's correction runs
over all arms for the primary outcome, and over all arms and old tasks where there are several. The statistics are those
of `inference.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast.errors import UserError
from holdfast.studies.frontier import Array, Frontier, Line, Reference, at_places, lines_of
from holdfast.studies.inference import (
    FEWEST_SEEDS,
    LEVEL,
    Block,
    Effect,
    detectable,
    effect,
    holm,
    p_above,
    p_below,
    point,
    seeds_to_halve,
)
from holdfast.studies.measured import Arm, Measured, Task, measured
from holdfast.studies.results import BEFORE, BOUNDS, FEWEST_SELECTION_SEEDS, PLAIN, Row

MARGIN = 0.01  # of what plain learns
MARGIN_OF_RANGE = 0.025  # of what plain's rates differ in, where what they begin with is not known
MEAN = "mean of tasks"

BETTER, WORSE, EQUAL, NO_EVIDENCE = "better", "worse", "equal", "no evidence"
LEARNS_LESS, LEARNS_MORE, TOO_FEW = "learns less", "learns more", "too few seeds"
SLOW_END = "at the slow end of plain's runs"
FAR_APART = "plain's rates are far apart there"
NONE_LEARNS_MORE = "it keeps less, but no plain run surely learns more, which worse asks for"


Readable = TypeVar("Readable", float, Array)


class Outcome(NamedTuple):
    """What is judged: an old task, or the mean of all.

    Args:
        unit: of its figures.
        tasks: its tasks with what each counts.
        margin: within which two old values are equal.
        start: what seeds begin with on average, where the outcome is shown as a change from that.
    """

    name: str
    unit: str
    tasks: tuple[tuple[Task, float], ...]
    margin: float
    start: float = 0.0

    @property
    def has_documents(self) -> bool:
        """Whether the interval counts documents of every task."""
        return all(len(task.weights) > 1 for task, _ in self.tasks)

    @property
    def higher_is_better(self) -> bool:
        """Whether it is an accuracy, whose sign is turned in the arrays."""
        return len(self.tasks) == 1 and self.tasks[0][0].measure == "accuracy"

    def readable(self, value: Readable) -> Readable:
        """A value as it is read: accuracies have their own sign again, a mean of tasks is what was lost."""
        read: Readable = -value if self.higher_is_better else value - self.start
        return read

    def plain(self) -> Array:
        """(S, P) of plain."""
        made: Array = sum((factor * task.mean(task.plain) for task, factor in self.tasks), np.zeros(()))
        return made

    def arm(self, name: str) -> Array:
        """(S_arm,) of an arm."""
        made: Array = sum((factor * task.mean(task.arms[name]) for task, factor in self.tasks), np.zeros(()))
        return made


class Estimate(NamedTuple):
    """A mean with an interval whose ends both hold at a one-sided level.

    Args:
        p: one-sided, adjusted for the family.
        level: what the arm is tested at after Holm's correction.
    """

    mean: float
    error: float
    low: float
    high: float
    p: float
    level: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Verdict:
    """What can be said of one arm for one outcome.

    Args:
        word: the verdict.
        better: Δ₊; None where the arm learns less than plain's slowest run.
        worse: Δ₋; None there, and where no plain run learns δ more than the arm.
        without_margin: mean of Δ at δ = 0.
        margin_worth: δ times the slope of the frontier where the arm is: what the margin costs or gives.
        mde: the smallest effect that would have been seen with probability 0.8.
        more_seeds: how many more seeds would halve that; None where seeds would not.
        at: where on plain's frontier it is compared, such as `rate × 0.3`.
        by_seed: Δ₊ of each seed.
        notes: what a reader must know beside it.
    """

    word: str
    seeds: int
    better: Estimate | None = None
    worse: Estimate | None = None
    without_margin: float | None = None
    margin_worth: float | None = None
    mde: float | None = None
    more_seeds: int | None = None
    at: str = ""
    by_seed: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def told(self) -> Estimate | None:
        """The estimate that the word is about."""
        return self.worse if self.word == WORSE else self.better


@dataclass(frozen=True)
class Judgement:
    """All verdicts of a study.

    Args:
        outcomes: the primary one first.
        verdicts: by outcome and arm.
        margin: δ, on the new loss.
        margin_source: what it was made from.
        dominated: rates of plain's final points that another one beats, with that other rate.
        notes: what holds for all of it.
    """

    measured: Measured
    outcomes: tuple[Outcome, ...]
    verdicts: Mapping[str, Mapping[str, Verdict]]
    margin: float
    margin_source: str
    dominated: Mapping[float, float]
    chosen: Mapping[str, str] = field(default_factory=dict)
    selection_seeds: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def primary(self) -> Mapping[str, Verdict]:
        """The verdicts of the primary outcome by arm."""
        return self.verdicts[self.outcomes[0].name]


def judge_rows(
    rows: Sequence[Row],
    *,
    selection: Sequence[int] = (),
    margin: float | None = None,
    base_rate: float | None = None,
) -> Judgement:
    """The verdict on all rows of a study.

    Args:
        selection: seeds on which configurations are chosen; those whose `role` says so unless given.
        margin: δ on the new loss; a share of what plain learns unless given.
        base_rate: the learning rate that others are multiples of.
    """
    chosen_on = set(selection) or {row.seed for row in rows if row.role == "selection"}
    if not chosen_on:
        return judge(measured(rows, base_rate), margin=margin)
    first = [row for row in rows if row.seed in chosen_on]
    rest = [row for row in rows if row.seed not in chosen_on]
    seeds = tuple(sorted({row.seed for row in first}))
    if len(seeds) < FEWEST_SELECTION_SEEDS or not rest:
        raise UserError(
            f"column role: selection seeds {list(seeds)}, judging seeds {sorted({row.seed for row in rest})}; "
            f"expected at least {FEWEST_SELECTION_SEEDS} seeds to choose on and others to judge on"
        )
    # A study runs only what it chose on the judging seeds.
    there = {(row.arm, row.learning_rate, row.strength) for row in rest}
    arms = {row.arm for row in rest} - {PLAIN, BEFORE, *BOUNDS}
    first = [row for row in first if row.arm not in arms or (row.arm, row.learning_rate, row.strength) in there]
    chosen = choose(first, margin=margin, base_rate=base_rate)
    kept = {(arm.arm, arm.rate, arm.strength) for arm in chosen.values()}
    arms = {arm.arm for arm in chosen.values()}
    rest = [row for row in rest if row.arm not in arms or (row.arm, row.learning_rate, row.strength) in kept]
    configs = {arm: told for arm, config in chosen.items() if (told := config.name.removeprefix(f"{arm}, ")) != arm}
    found = judge(measured(rest, base_rate), margin=margin, chosen=configs, selection_seeds=seeds)
    unjudged = sorted(arms - {row.arm for row in rest})
    notes = [f"{arm} is not judged: it was run on selection seeds alone" for arm in unjudged]
    return replace(found, notes=(*found.notes, *notes))


def choose(rows: Sequence[Row], *, margin: float | None = None, base_rate: float | None = None) -> dict[str, Arm]:
    """Of each arm the configuration that keeps most on the selection seeds while it learns as much as plain.

    How sure that is plays no part: it is judged on other seeds.
    """
    found = judge(measured(rows, base_rate), margin=margin)
    best: dict[str, tuple[float, Arm]] = {}
    for name, arm in found.measured.arms.items():
        better = found.primary[name].better
        # What learns less than plain's slowest run cannot be judged; of those the one that learns most.
        score = better.mean if better is not None else -1e6 - float(arm.new.mean())
        if arm.arm not in best or score > best[arm.arm][0]:
            best[arm.arm] = (score, arm)
    return {arm: config for arm, (_, config) in best.items()}


def judge(
    study: Measured,
    *,
    margin: float | None = None,
    chosen: Mapping[str, str] | None = None,
    selection_seeds: tuple[int, ...] = (),
) -> Judgement:
    """The verdict on every arm for every outcome.

    Args:
        chosen: the configurations that were chosen on other seeds, by arm.
    """
    allowed, source = (margin, "as given") if margin is not None else default_margin(study)
    outcomes, notes = _outcomes(study, allowed)
    compared = {
        outcome.name: {name: _Comparison.of(study, outcome, arm, allowed) for name, arm in study.arms.items()}
        for outcome in outcomes
    }
    # The mean is one family, the old tasks another; without a mean there is one.
    families = [outcomes[:1], outcomes[1:]] if outcomes[0].name == MEAN else [outcomes]
    verdicts: dict[str, dict[str, Verdict]] = {outcome.name: {} for outcome in outcomes}
    for family in families:
        cells = [(outcome, name) for outcome in family for name in study.arms]
        parts = [compared[outcome.name][name] for outcome, name in cells]
        up = holm([part.p_better for part in parts])
        down = holm([part.p_worse for part in parts])
        for index, (outcome, name) in enumerate(cells):
            tested = [(levels[index], ps[index]) for levels, ps in (up, down)]
            verdicts[outcome.name][name] = parts[index].verdict(outcome, *tested)
    primary = _frontier(study, outcomes[0], np.arange(len(study.seeds)))
    # A rate is compared with other rates: what stops early or goes back to the snapshot beats a rate in its own name.
    ends = [index for index in range(len(study.points)) if _end(study, index)]
    rates = {study.points[one].rate: study.points[two].rate for one, two in primary.dominated(ends).items()}
    return Judgement(
        study,
        tuple(outcomes),
        verdicts,
        allowed,
        source,
        dict(sorted(rates.items())),
        chosen or {},
        selection_seeds,
        (*study.notes, *notes, *_conditions(study, outcomes, selection_seeds)),
    )


def _end(study: Measured, index: int) -> bool:
    """Whether a point is a whole run at its rate, not stopped early and not interpolated."""
    steps = max(p.steps or 0 for p in study.points if p.rate == study.points[index].rate)
    return study.points[index].share == 1 and (study.points[index].steps or 0) == steps


def default_margin(study: Measured) -> tuple[float, str]:
    """δ and what it is made from, of means over seeds."""
    best = float(study.new.mean(0).min())
    if study.new_before is not None:
        return MARGIN * max(float(study.new_before.mean()) - best, 0.0), f"{MARGIN:.0%} of what plain learns"
    ends = [index for index in range(len(study.points)) if _end(study, index)]
    spread = float(study.new.mean(0)[ends].max()) - best
    told = f"{MARGIN_OF_RANGE:.0%} of what plain's rates differ in, for want of rows `before`"
    return MARGIN_OF_RANGE * spread, told


def _outcomes(study: Measured, margin: float) -> tuple[list[Outcome], list[str]]:
    """The primary outcome, and each task where there are several."""
    units = {"loss": "bits per byte", "accuracy": "accuracy"}
    single = [
        Outcome(task.name or "old", units[task.measure], ((task, 1.0),), margin if task.measure == "loss" else MARGIN)
        for task in study.tasks
    ]
    if len(single) == 1:
        return single, []
    scales = {task.name: _lost(study, task) for task in study.tasks}
    counted = [task for task in study.tasks if scales[task.name] > 0]
    notes = [
        f"{task.name} is not in the mean: plain at the base rate loses nothing of it"
        for task in study.tasks
        if task not in counted
    ]
    if not counted:
        return single, notes
    parts = tuple((task, 1 / (len(counted) * scales[task.name])) for task in counted)
    start = sum(factor * _start(study, task) for task, factor in parts)
    return [Outcome(MEAN, "of what plain loses", parts, MARGIN, start), *single], notes


def _lost(study: Measured, task: Task) -> float:
    """What plain at the base rate loses of a task."""
    ends = [index for index in range(len(study.points)) if _end(study, index)]
    base = min(ends, key=lambda index: abs(math.log(study.points[index].rate / study.base_rate)))
    return float(task.mean(task.plain).mean(0)[base]) - _start(study, task)


def _start(study: Measured, task: Task) -> float:
    """What is there of a task before anything is lost; without rows `before`, what plain keeps at its best."""
    if task.before is not None:
        return float(task.mean(task.before).mean())
    ends = [index for index in range(len(study.points)) if _end(study, index)]
    return float(task.mean(task.plain).mean(0)[ends].min())


def _conditions(study: Measured, outcomes: Sequence[Outcome], selection_seeds: Sequence[int]) -> list[str]:
    """What the answer is conditional on."""
    notes = []
    if not all(outcome.has_documents for outcome in outcomes):
        notes.append("conditional on this held-out set: no interval counts its documents")
    if study.parents == 1 and len(study.seeds) > 1:
        notes.append("conditional on this parent: all seeds begin with one checkpoint")
    if not selection_seeds:
        grids = {arm.arm for arm in study.arms.values() if arm.name != arm.arm}
        told = f"; Holm runs over all configurations of {', '.join(sorted(grids))}" if grids else ""
        notes.append(f"no selection seeds are named: configurations are judged as they are{told}")
    return notes


def _frontier(study: Measured, outcome: Outcome, seeds: Array) -> Frontier:
    return Frontier(study.points, tuple(lines_of(study.points)), study.new[seeds], outcome.plain()[seeds])


class _Doubt(NamedTuple):
    """What must be as unlikely as a verdict asks for before it is given, and what is said where it is not."""

    p: float
    note: str


@dataclass(frozen=True)
class _Comparison:
    """An arm beside plain's frontier, before its family is known.

    Args:
        better_doubts: what must be sure too before it is called better.
        worse_doubts: the same of worse.
    """

    less: bool
    slow_end: bool
    more: bool
    better: Effect | None
    worse: Effect | None
    without_margin: float | None
    margin_worth: float | None
    at: str
    notes: tuple[str, ...]
    seeds: int
    better_doubts: tuple[_Doubt, ...] = ()
    worse_doubts: tuple[_Doubt, ...] = ()

    @classmethod
    def of(cls, study: Measured, outcome: Outcome, arm: Arm, margin: float) -> "_Comparison":
        """Where the arm is, decided on means over seeds, and its differences there."""
        frontier = _frontier(study, outcome, arm.seeds)
        new = frontier.new.mean(0)
        smallest = min(p.rate for p in study.points)
        slower = f"run plain at {study.multiple(smallest / 3)} too"
        if arm.new.mean() > new.max():
            note = f"learns less than the slowest plain run; {slower}"
            return cls(True, False, False, None, None, None, None, "", (note,), len(arm.new))
        above, level = (frontier.reference(arm.new + shift) for shift in (margin, 0.0))
        below = frontier.reference(arm.new - max(margin, _noise(frontier, arm, level)))
        found = effect(_blocks(outcome, arm, above))
        slow_end = bool(arm.new.mean() + margin >= new.max())
        notes = []
        if slow_end:
            notes.append(f"{SLOW_END}, where the frontier may go on: {slower}")
        if not above.reached:
            notes.append("learns more than every plain run")
        if _at_fast_end(above):
            largest = max(p.rate for p in study.points)
            notes.append(f"at the fast end of plain's rates: run plain at {study.multiple(2 * largest)} too")
        return cls(
            False,
            slow_end,
            not above.reached,
            found,
            effect(_blocks(outcome, arm, below)) if below.reached else None,
            effect(_blocks(outcome, arm, level)).mean,
            margin * frontier.slope(float(arm.new.mean()) + margin),
            _told(study, above),
            tuple(notes),
            len(arm.new),
            _better_doubts(study, outcome, arm, frontier, margin, level) if p_above(found) < LEVEL else (),
            _worse_doubts(study, outcome, arm, frontier, margin) if below.reached else (),
        )

    @property
    def p_better(self) -> float:
        return 1.0 if self.better is None else p_above(self.better)

    @property
    def p_worse(self) -> float:
        return 1.0 if self.worse is None else p_below(self.worse)

    def verdict(self, outcome: Outcome, up: tuple[float, float], down: tuple[float, float]) -> Verdict:
        """The verdict at the levels, with the adjusted p-values, that its family leaves it."""
        if self.better is None:
            return Verdict(TOO_FEW if self.seeds < FEWEST_SEEDS else LEARNS_LESS, self.seeds, notes=self.notes)
        better = _estimate(self.better, *up)
        worse = None if self.worse is None else _estimate(self.worse, *down)
        seen = self.seeds > 1
        against = [doubt.note for doubt in self.better_doubts if better.low > 0 and doubt.p >= better.level]
        if worse is not None and worse.high < 0:
            against += [doubt.note for doubt in self.worse_doubts if doubt.p >= worse.level]
        word = self._word(better, worse, outcome.margin, doubted=bool(against))
        if word == NO_EVIDENCE and worse is None and better.high < 0:
            against.append(NONE_LEARNS_MORE)
        return Verdict(
            word,
            self.seeds,
            better,
            worse,
            self.without_margin,
            self.margin_worth,
            detectable(self.better.error, self.better.degrees, better.level) if seen else None,
            seeds_to_halve(self.better, better.level) if seen else None,
            self.at,
            tuple(map(float, self.better.by_seed)),
            (*self.notes, *against),
        )

    def _word(self, better: Estimate, worse: Estimate | None, equal: float, *, doubted: bool) -> str:
        if self.seeds < FEWEST_SEEDS:
            return TOO_FEW
        # At the slow end plain might keep more at a rate that was not run, so nobody is better there.
        if better.low > 0 and not self.slow_end and not doubted:
            return BETTER
        if worse is not None and worse.high < 0 and not doubted:
            return WORSE
        if self.more:
            return LEARNS_MORE
        ends = [] if worse is None else [better.low, better.high, worse.low, worse.high]
        return EQUAL if ends and max(map(abs, ends)) <= equal else NO_EVIDENCE


def _better_doubts(
    study: Measured, outcome: Outcome, arm: Arm, frontier: Frontier, margin: float, level: Reference
) -> tuple[_Doubt, ...]:
    """That plain is bowed between its rates, or that it only seems to learn less at all of them."""
    above = frontier.reference(arm.new + margin)
    found, limit = effect(_blocks(outcome, arm, above)), float(arm.new.mean())
    straight, bowed = frontier.lowest_mean(limit + margin), frontier.bowed(limit)
    if straight is None:
        wide = frontier.reference(arm.new + max(margin, _noise(frontier, arm, level)))
        note = f"and not surely more than plain that learns as much within the noise ({_told(study, wide)})"
        return (_Doubt(p_above(effect(_blocks(outcome, arm, wide))), note),)
    note = f"{FAR_APART} and it may be bowed: measure it at {_told(study, level if level.reached else above)} too"
    return (_Doubt(p_above(found._replace(mean=found.mean - max(straight - bowed, 0.0))), note),)


def _worse_doubts(study: Measured, outcome: Outcome, arm: Arm, frontier: Frontier, margin: float) -> tuple[_Doubt, ...]:
    """That it learns and keeps as much as plain at its own learning rate: then the rate is worse, not the arm."""
    ends = sorted(
        (index for index in range(len(study.points)) if _end(study, index)), key=lambda i: study.points[i].rate
    )
    rates = np.array([study.points[index].rate for index in ends])
    if not rates[0] <= arm.rate <= rates[-1]:
        return ()
    place = float(np.interp(math.log(arm.rate), np.log(rates), np.arange(len(rates))))
    own = Reference(Line("rate", np.array(ends), rates), np.full(len(arm.new), place), place, True)
    plain = at_places(frontier.new[:, own.line.points, None], own.places)[:, 0]
    # It may differ in what it learns or in what it keeps: each is tested at half the level.
    if float((arm.new - plain).mean()) > max(margin, _noise(frontier, arm, own, LEVEL / 2)):
        return ()
    note = f"as plain at its own rate {study.multiple(arm.rate)}, which is dominated"
    return (_Doubt(2 * p_below(effect(_blocks(outcome, arm, own))), note),)


def _noise(frontier: Frontier, arm: Arm, level: Reference, chance: float = LEVEL) -> float:
    """How far the arm's new loss may be from plain's by chance alone, where both are the same on means.

    Where that is more than δ, "worse" asks for plain that learns more by this much: at the fast end, where the curve is
    flat, plain that merely seems to learn δ more keeps far more of the old.
    """
    if len(arm.new) < 2:
        return 0.0
    plain = at_places(frontier.new[:, level.line.points, None], np.full(len(arm.new), level.mean_place))[:, 0]
    found = effect([Block((arm.new - plain)[:, None], np.ones(1))])
    return point(found.degrees, chance) * found.error


def _blocks(outcome: Outcome, arm: Arm, reference: Reference) -> list[Block]:
    """Plain's old loss at the arm's place minus the arm's, for every seed and document."""
    return [
        Block(reference.old(task.plain[arm.seeds]) - task.arms[arm.name], task.weights, factor)
        for task, factor in outcome.tasks
    ]


def _at_fast_end(reference: Reference) -> bool:
    return reference.line.along == "rate" and reference.mean_place == len(reference.line.points) - 1


def _told(study: Measured, reference: Reference) -> str:
    """The place on plain's frontier in words."""
    line = reference.line
    setting = line.setting(reference.mean_place)
    if line.along == "rate":
        return f"rate {study.multiple(setting)}"
    first = study.points[int(line.points[0])]
    told = f"{setting:.0f} steps" if line.along == "steps" else f"{setting:.2g} of the trained weights"
    return f"{told} at rate {study.multiple(first.rate)}"


def _estimate(found: Effect, level: float, p: float) -> Estimate:
    if not math.isfinite(found.error):
        return Estimate(found.mean, math.inf, -math.inf, math.inf, p, level)
    half = point(found.degrees, level) * found.error
    return Estimate(found.mean, found.error, found.mean - half, found.mean + half, p, level)
