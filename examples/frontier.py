"""Does an arm keep more of the old than plain training that learns as much of the new?

Plain training is a set of runs at several learning rates: a smaller one forgets less because it learns less. Its
**frontier** is the lowest old loss among those that reach a new loss. An arm is compared with it twice, seed by seed
(δ is a small margin on the new loss):

    Δ₊ = min old over plain with new ≤ new_arm + δ,  minus old_arm      "better" needs Δ₊ surely above 0
    Δ₋ = min old over plain with new ≤ new_arm − δ,  minus old_arm      "worse" needs Δ₋ surely below 0

so that noise in the new loss, or a frontier that falls steeply, makes no winner and no loser. Between the rates that
were run, new and old are taken as linear in the logarithm of the rate, the variable that was set, and never in the new
loss, which is measured with noise. Intervals are Student's t over seeds, with Holm's correction over the arms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MARGIN = 0.01  # of what plain learns
LEVEL = 0.025  # one-sided, for all arms together
POWER = 0.8
FEWEST_SEEDS = 3

Array = np.ndarray


@dataclass(frozen=True)
class Plain:
    """Plain training at R learning rates, smallest first, with S seeds.

    Args:
        rates: (R,) learning rates, as multiples of the base rate.
        new: (S, R) loss on the new dataset at the end.
        old: (S, R) loss on the old dataset at the end.
        new_before: (S,) loss on the new dataset before it was trained on.
    """

    rates: Array
    new: Array
    old: Array
    new_before: Array

    @property
    def margin(self) -> float:
        """δ: a share of what plain learns at its best rate, of means over seeds."""
        return MARGIN * float(self.new_before.mean() - self.new.mean(0).min())

    def dominated(self) -> dict[float, float]:
        """Rates at which another one learns at least as much and keeps at least as much, with that other rate."""
        new, old = self.new.mean(0), self.old.mean(0)
        found = {}
        for index, rate in enumerate(self.rates):
            by = (new <= new[index]) & (old <= old[index]) & ((new < new[index]) | (old < old[index]))
            if by.any():
                found[float(rate)] = float(self.rates[np.where(by, old, np.inf).argmin()])
        return found


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with an interval whose ends both hold at a one-sided level."""

    mean: float
    error: float
    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Verdict:
    """What can be said of one arm.

    Args:
        better: Δ₊; None where the arm learns less than plain at its smallest rate.
        worse: Δ₋; None there, and where no plain run learns δ more than the arm.
        without_margin: mean of Δ at δ = 0.
        margin_worth: δ times the slope of the frontier where the arm lies: what the margin costs or gives.
        words: the verdict itself, in words.
        notes: what a reader must know beside it.
    """

    better: Estimate | None
    worse: Estimate | None
    without_margin: float | None
    margin_worth: float | None
    words: str
    notes: tuple[str, ...]


def frontier(rates: Array, new: Array, old: Array, limit: float) -> tuple[float, float] | None:
    """The lowest old loss with a new loss of at most `limit`, and its rate; None if there is none.

    >>> frontier(np.array([1.0, 100.0]), np.array([4.0, 2.0]), np.array([5.0, 9.0]), limit=3.0)
    (7.0, 10.0)
    """
    logs = np.log(rates)
    points = [(float(old[i]), float(rates[i])) for i in range(len(rates)) if new[i] <= limit]
    for i in range(len(rates) - 1):
        if (new[i] <= limit) != (new[i + 1] <= limit):
            share = (limit - new[i]) / (new[i + 1] - new[i])
            log_rate = logs[i] + share * (logs[i + 1] - logs[i])
            points.append((float(old[i] + share * (old[i + 1] - old[i])), round(math.exp(log_rate), 12)))
    return min(points, default=None)


def gaps(plain: Plain, new: Array, old: Array, shift: float) -> Array | None:
    """For each seed, the frontier's old loss at the arm's new loss + shift, minus the arm's old loss.

    Whether plain learns that much is decided on means. Where it does not, an arm is set against the rate that learns
    most, unless plain should have learned more than the arm (shift < 0): then nothing can be compared.
    """
    mean_new = plain.new.mean(0)
    reached = mean_new.min() <= new.mean() + shift
    if not reached and shift < 0:
        return None
    found = []
    for seed in range(len(new)):
        point = frontier(plain.rates, plain.new[seed], plain.old[seed], new[seed] + shift) if reached else None
        # A seed is never dropped: the best it has is where it learns most.
        most = plain.new[seed].argmin() if reached else mean_new.argmin()
        found.append((point[0] if point else plain.old[seed, most]) - old[seed])
    return np.array(found)


def estimate(values: Array, level: float) -> Estimate:
    """Student's interval of a mean."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf(1 - level, len(values) - 1)) * error
    mean = float(values.mean())
    return Estimate(mean, error, mean - half, mean + half, level)


def p_value(values: Array | None) -> float:
    """One-sided: how likely a mean this far above 0 is if the truth is 0; 1 where there is nothing to test."""
    if values is None:
        return 1.0
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if values.mean() > 0 else 1.0
    return float(stats.t.sf(values.mean() / error, len(values) - 1))


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """The level at which each hypothesis is tested; from the first that stands on, all have that one's.

    >>> holm([0.5, 0.001, 0.012], level=0.03)
    [0.03, 0.01, 0.015]
    >>> holm([0.5, 0.001, 0.02], level=0.03)
    [0.015, 0.01, 0.015]
    """
    levels = [level] * len(p_values)
    stopped = None
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        levels[index] = stopped or level / (len(p_values) - rank)
        if stopped is None and p_values[index] > levels[index]:
            stopped = levels[index]
    return levels


def detectable(error: float, seeds: int, level: float) -> float:
    """The smallest effect that would have been seen with probability 0.8."""
    return float(stats.t.ppf(1 - level, seeds - 1) + stats.t.ppf(POWER, seeds - 1)) * error


def seeds_to_halve(seeds: int, level: float) -> int:
    """How many more seeds would halve the smallest effect that is seen.

    >>> seeds_to_halve(5, 0.025)
    9
    """
    goal = detectable(1 / math.sqrt(seeds), seeds, level) / 2
    more = 1
    while detectable(1 / math.sqrt(seeds + more), seeds + more, level) > goal:
        more += 1
    return more


def judge(plain: Plain, arms: Mapping[str, tuple[Array, Array]]) -> dict[str, Verdict]:
    """The verdict on every arm; all arms are one family.

    Args:
        arms: (new, old) of each arm, one value for each seed of plain, in the same order.
    """
    margin = plain.margin
    placed = {name: _notes(plain, new) for name, (new, _) in arms.items()}
    upper, lower = {}, {}
    for name, (new, old) in arms.items():
        beyond = placed[name][0] is not None
        upper[name] = None if beyond else gaps(plain, new, old, margin)
        lower[name] = None if beyond else gaps(plain, new, old, -margin)
    names = list(arms)
    up_levels = dict(zip(names, holm([p_value(upper[name]) for name in names]), strict=True))
    down = [None if lower[name] is None else -lower[name] for name in names]
    down_levels = dict(zip(names, holm([p_value(values) for values in down]), strict=True))
    verdicts = {}
    for name, (new, old) in arms.items():
        refused, notes = placed[name]
        better = None if upper[name] is None else estimate(upper[name], up_levels[name])
        worse = None if lower[name] is None else estimate(lower[name], down_levels[name])
        level_gaps = None if better is None else gaps(plain, new, old, 0.0)
        verdicts[name] = Verdict(
            better,
            worse,
            None if level_gaps is None else float(level_gaps.mean()),
            None if better is None else margin * slope(plain, float(new.mean()) + margin),
            refused or words(better, worse, margin, len(new)),
            notes,
        )
    return verdicts


def slope(plain: Plain, new: float) -> float:
    """How fast the frontier of means falls where more new loss is allowed; 0 where it does not."""
    step = 1e-6
    mean_new, mean_old = plain.new.mean(0), plain.old.mean(0)
    here, there = (frontier(plain.rates, mean_new, mean_old, limit) for limit in (new, new - step))
    return 0.0 if here is None or there is None else (there[0] - here[0]) / step


def words(better: Estimate, worse: Estimate | None, margin: float, seeds: int) -> str:
    """The verdict of an arm that lies where plain training was run."""
    if seeds < FEWEST_SEEDS:
        return f"no verdict below {FEWEST_SEEDS} seeds"
    if better.low > 0:
        return "better"
    if worse is not None and worse.high < 0:
        return "worse"
    if worse is not None and all(abs(end) < margin for part in (better, worse) for end in (part.low, part.high)):
        return "equal"
    seen = detectable(better.error, seeds, better.level)
    more = seeds_to_halve(seeds, better.level)
    return f"no evidence; an effect of at least {seen:.2f} would have been seen ({more} more seeds halve that)"


def _notes(plain: Plain, new: Array) -> tuple[str | None, tuple[str, ...]]:
    """Why there is no verdict, if so, and what must be said beside one: all of it decided on means over seeds."""
    mean_new, mean_old = plain.new.mean(0), plain.old.mean(0)
    slower, faster = f"× {plain.rates[0] / 3:.1g}", f"× {plain.rates[-1] * 2:.2g}"
    if new.mean() > mean_new[0]:
        return f"no verdict: learns less than plain at × {plain.rates[0]:g}; run plain at {slower}", ()
    point = frontier(plain.rates, mean_new, mean_old, new.mean() + plain.margin)
    rate = point[1] if point else plain.rates[mean_new.argmin()]
    if rate == plain.rates[0]:
        return f"no verdict: the frontier may go on below × {plain.rates[0]:g}; run plain at {slower}", ()
    notes = []
    if point is None:
        notes.append("learns more than every plain run")
    if rate == plain.rates[-1]:
        notes.append(f"at the end of plain's rates: run plain at {faster} too")
    return None, tuple(notes)
