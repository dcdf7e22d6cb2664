"""Two arms compared with each other, seed by seed, without a frontier.

For arms that are set the same way (a method with and without one part, or one arm twice with other data orders). The
difference of the old losses is tested to both sides, which are one family, by Student's t and, from 7 to 12 seeds, by
all swaps of the two names too. It says nothing of plain training that learns less: what differs in the new loss by more
than the margin is said before anything is called better.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import UserError
from holdfast.studies.frontier import Array
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
)
from holdfast.studies.measured import Measured, Task, measured
from holdfast.studies.results import PLAIN, Row
from holdfast.studies.verdict import (
    BETTER,
    EQUAL,
    LEARNS_LESS,
    LEARNS_MORE,
    MARGIN,
    NO_EVIDENCE,
    TOO_FEW,
    WORSE,
    default_margin,
)
from holdfast.studies.words import figure
from holdfast.types import Json

SWAPPED = range(
    7, 13
)  # seeds of which all swaps are counted: fewer never reach the level, more are near to Student's t


@dataclass(frozen=True)
class Pair:
    """What can be said of an arm beside another one.

    Args:
        delta: how much less of the old the first arm loses; positive where it keeps more.
        new: how much higher its new loss is; positive where it learns less.
    """

    first: str
    second: str
    word: str
    delta: float
    low: float
    high: float
    p: float
    mde: float
    new: float
    seeds: int
    margin: float

    def words(self) -> str:
        """The comparison in a sentence."""
        half = (self.high - self.low) / 2
        sized = f"{figure(abs(self.delta), half)} ± {figure(half, half)}"
        who = f"{self.first} against {self.second}, {self.seeds} seeds"
        if self.word in (BETTER, WORSE):
            return f"{who}: keeps {sized} {'more' if self.word == BETTER else 'less'} ({self.word})."
        if self.word == NO_EVIDENCE:
            return f"{who}: no evidence, an effect of {figure(self.mde, self.mde)} would have been seen."
        told = f" by {figure(abs(self.new), abs(self.new))} on the new loss" if self.word.startswith("learns") else ""
        return f"{who}: {self.word}{told}."

    def to_json(self) -> Json:
        """The comparison as JSON can hold it."""
        values = {name: getattr(self, name) for name in ("delta", "low", "high", "p", "mde", "new")}
        known = {name: value if np.isfinite(value) else None for name, value in values.items()}
        return {"first": self.first, "second": self.second, "verdict": self.word, **known, "seeds": self.seeds}


@dataclass(frozen=True)
class _Side:
    """One arm: its new losses, and its old ones of one task, by seed."""

    seeds: Array
    new: Array
    old: Array


def _side(study: Measured, task: Task, name: str) -> _Side:
    arm, _, text = name.partition("@")
    if arm == PLAIN:
        rates = [index for index, at in enumerate(study.points) if at.share == 1 and text and _same(at.rate, text)]
        if not rates:
            known = ", ".join(f"{PLAIN}@{rate:g}" for rate in sorted({at.rate for at in study.points}))
            raise UserError(f"--pair: got {name!r}, expected one of {known}")
        index = max(rates, key=lambda each: study.points[each].steps or 0)
        return _Side(np.arange(len(study.seeds)), study.new[:, index], task.plain[:, index])
    if name not in study.arms:
        raise UserError(f"--pair: got {name!r}, expected an arm of the file: {', '.join(study.arms)}, or {PLAIN}@RATE")
    found = study.arms[name]
    return _Side(found.seeds, found.new, task.arms[name])


def _same(rate: float, text: str) -> bool:
    try:
        return bool(np.isclose(rate, float(text), rtol=1e-6, atol=0.0))
    except ValueError:
        return False


def _shared(rows: Sequence[Row], first: str, second: str) -> tuple[Measured, Task, _Side, _Side]:
    study = measured(rows)
    if len(study.tasks) > 1:
        raise UserError(f"--pair: the file has {len(study.tasks)} old tasks; a pair is compared on one")
    task = study.tasks[0]
    one, two = _side(study, task, first), _side(study, task, second)
    both = np.intersect1d(one.seeds, two.seeds)
    if not len(both):
        raise UserError(f"--pair: {first!r} and {second!r} have no seed in common; runs are paired by seed")
    sides = [
        _Side(both, side.new[np.searchsorted(side.seeds, both)], side.old[np.searchsorted(side.seeds, both)])
        for side in (one, two)
    ]
    return study, task, sides[0], sides[1]


def compare_pair(rows: Sequence[Row], first: str, second: str, *, margin: float | None = None) -> Pair:
    """The first arm against the second one, over the seeds that both have."""
    study, task, one, two = _shared(rows, first, second)
    margins = _margins(study, task, margin)
    return _pair(first, second, task.weights, one.old - two.old, one.new - two.new, margins)


def resampled(
    rows: Sequence[Row], first: str, second: str, *, times: int = 200, margin: float | None = None, seed: int = 0
) -> dict[str, int]:
    """How often each verdict comes out where the two names are swapped at random, seed by seed.

    For one arm under two names every swap is as likely as another one, so that all but a few must be no evidence. Seeds
    are not drawn anew: one that counted twice would look surer than it is. Few seeds have few swaps (with 5, one in 16
    gives all differences one sign), so 8 or more are needed for a fair count.
    """
    study, task, one, two = _shared(rows, first, second)
    margins = _margins(study, task, margin)
    old, new = one.old - two.old, one.new - two.new
    random = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    for _ in range(times):
        sign = random.choice([-1.0, 1.0], len(new))
        word = _pair(first, second, task.weights, old * sign[:, None], new * sign, margins).word
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _margins(study: Measured, task: Task, margin: float | None) -> tuple[float, float]:
    """Within which two new losses, and two old values, are equal; accuracies have a margin of their own."""
    allowed = margin if margin is not None else default_margin(study)[0]
    return allowed, allowed if task.measure == "loss" else MARGIN


def _pair(first: str, second: str, weights: Array, old_SM: Array, new_S: Array, margins: tuple[float, float]) -> Pair:
    kept = effect([Block(-old_SM, weights)])
    learned = effect([Block(new_S[:, None], np.ones(1))])
    chances = [
        max(p_above(kept), _p_of_swaps(kept.by_seed)),
        max(p_below(kept), _p_of_swaps(-kept.by_seed)),
    ]
    levels, adjusted = holm(chances)
    level = min(levels)
    half = point(kept.degrees, level) * kept.error if np.isfinite(kept.error) else np.inf
    low, high = kept.mean - half, kept.mean + half
    mde = detectable(kept.error, kept.degrees, level) if np.isfinite(kept.error) else np.inf
    word = _word(low, high, learned, margins, len(new_S), sure=min(chances) < level)
    return Pair(
        *(first, second, word, kept.mean, float(low), float(high), min(adjusted), float(mde)),
        *(learned.mean, len(new_S), margins[0]),
    )


def _p_of_swaps(gains_S: Array) -> float:
    """The share of all swaps of the two names, seed by seed, in which the first one gains as much or more.

    Student's t is too sure where the gains of all seeds are of one size: one of eight may then have the other sign. 0
    for numbers of seeds of which swaps are not counted.

    >>> _p_of_swaps(np.full(8, 0.1)) * 2**8, _p_of_swaps(np.array([0.1] * 7 + [-0.1])) * 2**8
    (1.0, 9.0)
    """
    if len(gains_S) not in SWAPPED:
        return 0.0
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(gains_S))))
    return float((signs @ gains_S >= gains_S.sum() - 1e-12 * np.abs(gains_S).sum()).mean())


def _word(low: float, high: float, learned: Effect, margins: tuple[float, float], seeds: int, *, sure: bool) -> str:
    margin, old_margin = margins
    if seeds < FEWEST_SEEDS:
        return TOO_FEW
    half = point(learned.degrees, LEVEL / 2) * learned.error
    if learned.mean - half > margin:
        return LEARNS_LESS
    if learned.mean + half < -margin:
        return LEARNS_MORE
    if low > 0 and learned.mean <= margin and sure:
        return BETTER
    if high < 0 and learned.mean >= -margin and sure:
        return WORSE
    # Equal is who surely keeps as much and surely learns as much, each within the margin.
    equal = max(abs(low), abs(high)) <= old_margin and abs(learned.mean) + half <= margin
    return EQUAL if equal else NO_EVIDENCE
