"""Where the losses of a stage will end, from how they changed since the switch, with an interval or not at all.

Time is the learning rate summed since the switch, so that a schedule that decays has less of it ahead. Changes are in
bits per byte since the switch; new is what the stage brings, old is what the stage before it brought.

- The new loss falls as a power law with an onset: -C (1 - (1 + (u / t)^p)^(-h / p)). SciPy fits it to the run's probes,
  with priors on its shape. A decay of the learning rate that is still ahead brings some more.
- The old loss jumps, and what comes then is no power law: it goes on rising in exchange for what is still learned, and
  replay brings back a part of what was lost. The level and the exchange are fitted to the run's last probes;
  the prior of the exchange and the part that comes back depend on the share of replay.

Intervals are the spread of forecasts of other runs around their truth, widened until nine in ten held. Where a run is
unlike those runs there is no forecast, and a sentence says why. Pure functions of NumPy; SciPy is imported when used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Constants(NamedTuple):
    """What was learned from other runs; `python -m benchmarks.forecast --tune RUNS…` prints it.

    Args:
        tail, onset: mean of the logarithms of h and p.
        exchange: old change for a new one: in plain training, and more by the root of the replay share.
        recovery: of the old change by that root, over all the time that may be left.
        spread_new: of forecasts around the truth: of all, and by what was still to be learned.
        spread_old: the same, and by the change so far.
        width_new, width_old: spreads in which nine of ten truths lay.
    """

    tail: float
    onset: float
    exchange: tuple[float, float]
    recovery: float
    spread_new: tuple[float, float]
    spread_old: tuple[float, float, float]
    width_new: float
    width_old: float


# By `python -m benchmarks.forecast --tune RUNS/study/stories-shakespeare/*-s10[01]`: the 100 runs of the two selection
# seeds of examples/studies/stories-shakespeare.yaml, of which those of plain, replay, A-GEM and EMA count.
TUNED = Constants(
    tail=-0.5213,
    onset=0.5329,
    exchange=(-0.4358, 1.0654),
    recovery=-0.7072,
    spread_new=(0.0448, 0.1),
    spread_old=(0.005, 0.1469, 0.1),
    width_new=2.8291,
    width_old=2.3697,
)

# Widths of priors (of logarithms, the exchange as it is), and the noise of a probe as a share of the largest change.
SCALE_SD, TIME_SD, TAIL_SD, ONSET_SD, EXCHANGE_SD, NOISE = 0.6, 1.5, 0.15, 0.3, 0.2, 0.05
SCALE = 0.3  # of the loss at the switch: where the prior of what can be learned is centred
LEAST_NOISE, EARLY = 0.004, 0.5
OLD_NOISE, LEAST_OLD_NOISE = 0.1, 0.02  # the same of the last probes of an old loss, which jumps about
# A learning rate that decays to nothing lowers the new loss by this share of its change so far, and how unsure that is:
# chosen on the runs of benchmarks/forecast.yaml.
ANNEALED, ANNEALED_SD = 0.3, 0.6
RECENT = 0.7  # of the time so far: probes after that are the old loss's level
UNKNOWN_ROWS = {"old": 0.4, "new": 0.1}  # how far a change over all rows is off that over a probe's, as a share of it

FEWEST = 6  # measurements since the switch
EARLIEST, FARTHEST = 0.15, 8.0  # share of the stage's time that is over; time at the end over time so far
SLOWEST, FASTEST = 0.008, 1.25  # learning rate of the stage over the largest before it
ANCHORED = "an anchor holds it, and forecasts of such losses were no better than the last measurement"
MOST_SCATTER = 0.25  # of probes around the fitted curve, as a share of the largest change


@dataclass(frozen=True)
class Curve:
    """How the loss of a dataset changed since the switch.

    Args:
        steps: after the switch, of each measurement, ascending.
        changes: in bits per byte, over the rows that every measurement has.
        level: the loss at the switch.
        full: (step, change over all rows, change over those rows) of the evaluations that saw all rows.
        narrow: other measurements saw fewer rows than those.
    """

    steps: Floats
    changes: Floats
    level: float
    full: tuple[tuple[int, float, float], ...] = ()
    narrow: bool = False

    def until(self, step: float) -> "Curve":
        """The curve as it was known after a step."""
        seen = self.steps <= step
        full = tuple(each for each in self.full if each[0] <= step)
        return Curve(self.steps[seen], self.changes[seen], self.level, full, self.narrow)

    def corrected(self) -> Floats:
        """The changes over all rows, as far as the evaluations that saw all of them tell."""
        if not self.full:
            return self.changes
        steps = [0, *(step for step, _, _ in self.full)]
        off = [0.0, *(all_rows - few for _, all_rows, few in self.full)]
        corrected: Floats = self.changes + np.interp(self.steps, steps, off)
        return corrected


@dataclass(frozen=True)
class Course:
    """What acts on a stage.

    Args:
        rates: the learning rate of each of its steps, as a share of the largest one before it.
        replay: share of old rows in its batches, less where they teach less.
        anchored: a penalty holds the model near what it was.
    """

    rates: Floats
    replay: float = 0.0
    anchored: bool = False


class Forecast(NamedTuple):
    """The change from the switch to the end of the stage, and its 90 % interval."""

    change: float
    low: float
    high: float


class Refusal(NamedTuple):
    """Why there is no forecast, as the end of a sentence."""

    reason: str


class Learned(NamedTuple):
    """A fitted curve of the new loss.

    Args:
        times: of the measurements, in steps of the mean learning rate so far.
        changes: of the curve at those times.
        end_time: of the stage's end.
        further: change from the last measurement to the end.
        annealed: the part of it that a decay of the learning rate brings.
        scatter: root mean square of the measurements around the curve.
    """

    times: Floats
    changes: Floats
    end_time: float
    further: float
    annealed: float
    scatter: float


def forecast(
    course: Course, new: Mapping[str, Curve], old: Mapping[str, Curve], constants: Constants = TUNED
) -> dict[str, Forecast | Refusal]:
    """The forecast of every dataset: those that the stage brings, and those of the stage before."""
    made: dict[str, Forecast | Refusal] = {}
    learned: dict[str, Learned] = {}
    for name, curve in new.items():
        reason = unfit(course, curve)
        if reason is None:
            learned[name] = learn(course, curve, constants)
            reason = scattered(curve, learned[name])
        made[name] = Refusal(reason) if reason else _new_forecast(curve, learned[name], constants)
    certain = [learned[name] for name in new if isinstance(made[name], Forecast)]
    for name, curve in old.items():
        reason = ANCHORED if course.anchored else unfit(course, curve)
        if reason is None and not certain:
            reason = "the loss of the new data, which it goes with, has no forecast"
        made[name] = Refusal(reason) if reason else old_forecast(course, curve, certain, constants)
    return made


def unfit(course: Course, curve: Curve) -> str | None:
    """Why a curve is unlike those that forecasts were tuned on; None where it is like them."""
    if len(curve.steps) < FEWEST:
        return f"{len(curve.steps)} measurements since the switch are too few (at least {FEWEST})"
    if not (np.isfinite(curve.changes).all() and np.isfinite(curve.level)):
        return "a loss was not finite"
    rate = float(course.rates.max())
    if not SLOWEST <= rate <= FASTEST:
        return f"the learning rate is {rate:.3g} times that before the switch (forecasts know {SLOWEST} to {FASTEST})"
    times, end = clock(course, curve)
    if times[-1] < EARLIEST * end:
        return f"{times[-1] / end:.0%} of the stage is too little to see where it goes (at least {EARLIEST:.0%})"
    if end > FARTHEST * times[-1]:
        return f"its end is {end / times[-1]:.1f} times as far as its last measurement (at most {FARTHEST:g})"
    return None


def clock(course: Course, curve: Curve) -> tuple[Floats, float]:
    """Times of the measurements and of the end: learning rates summed, in steps of their mean so far.

    >>> half = Course(np.array([1.0, 1.0, 0.5, 0.5]))
    >>> clock(half, Curve(np.array([1.0, 2.0]), np.zeros(2), 1.0))
    (array([1., 2.]), 3.0)
    """
    summed = np.concatenate([[0.0], np.cumsum(course.rates)])
    last = int(curve.steps[-1])
    mean = summed[last] / last
    return summed[curve.steps.astype(int)] / mean, float(summed[-1] / mean)


def scattered(curve: Curve, learned: Learned) -> str | None:
    """Why the fitted curve is not to be trusted; None where it is."""
    largest = float(np.abs(curve.changes).max())
    if learned.scatter > MOST_SCATTER * largest:
        return "its measurements scatter around any curve that falls"
    return None


def learning_curve(times: Floats, values: Floats) -> Floats:
    """A power law with an onset, by the logarithms of its scale, its time, its tail's exponent and its onset's."""
    scale, time, tail, onset = np.exp(values)
    fallen: Floats = -scale * (1 - (1 + (times / time) ** onset) ** (-tail / onset))
    return fallen


def learn(course: Course, curve: Curve, constants: Constants = TUNED) -> Learned:
    """The curve of the new loss, as likely as its measurements and the priors make it."""
    from scipy.optimize import least_squares

    times, end = clock(course, curve)
    largest = float(np.abs(curve.changes).max())
    # What the first steps do is of less use than what the last ones do.
    noise = max(NOISE * largest, LEAST_NOISE) * (times[-1] / times) ** EARLY
    centre = np.array([np.log(SCALE * curve.level), np.log(times[-1] / 8), constants.tail, constants.onset])
    width = np.array([SCALE_SD, TIME_SD, TAIL_SD, ONSET_SD])

    def residuals(values: Floats) -> Floats:
        off = (learning_curve(times, values) - curve.changes) / noise
        return np.concatenate([off, (values - centre) / width])

    fits = []
    for time in (times[-1] / 12, times[-1] / 3):  # an early and a late onset: the better of two minima
        start = np.array([np.log(max(1.2 * largest, LEAST_NOISE)), np.log(time), constants.tail, constants.onset])
        fits.append(least_squares(residuals, start, max_nfev=200))
    values = min(fits, key=lambda fit: float(fit.cost)).x
    fitted = learning_curve(times, values)
    fallen = float(learning_curve(np.array([end]), values)[0] - fitted[-1])
    annealed = ANNEALED * decay(course, curve) * min(float(fitted[-1]), 0.0)
    scatter = float(np.sqrt(np.mean((fitted - curve.changes) ** 2)))
    return Learned(times, fitted, end, fallen + annealed, annealed, scatter)


def decay(course: Course, curve: Curve) -> float:
    """The share of the present learning rate that is gone at the end.

    >>> decay(Course(np.array([1.0, 1.0, 0.5, 0.25])), Curve(np.array([1.0, 2.0]), np.zeros(2), 1.0))
    0.75
    """
    now = float(course.rates[int(curve.steps[-1]) - 1])
    return max(1.0 - float(course.rates[-1]) / now, 0.0)


def _new_forecast(curve: Curve, learned: Learned, constants: Constants) -> Forecast:
    change, spread = new_end(curve, learned, constants)
    return _interval(change, spread * constants.width_new)


def new_end(curve: Curve, learned: Learned, constants: Constants) -> tuple[float, float]:
    """The change of the new loss at the end, and the spread of such forecasts."""
    off = float((curve.corrected() - curve.changes)[-1])
    change = float(learned.changes[-1]) + off + learned.further
    base, share = constants.spread_new
    parts = [base, share * learned.further, ANNEALED_SD * learned.annealed, learned.scatter]
    return change, float(np.hypot.reduce([*parts, _unknown("new", curve, change)]))


def old_forecast(course: Course, curve: Curve, learned: Sequence[Learned], constants: Constants) -> Forecast:
    """The forecast of an old loss, beside those of what is learned."""
    change, spread = old_end(course, curve, learned, constants)
    return _interval(change, spread * constants.width_old)


def old_end(course: Course, curve: Curve, learned: Sequence[Learned], constants: Constants) -> tuple[float, float]:
    """The change of an old loss at the end, and the spread of such forecasts."""
    level, exchange, scatter = old_level(course, curve, learned, constants)
    further = float(np.mean([each.further for each in learned]))
    part = regained(course, curve)
    back = constants.recovery * float(np.sqrt(course.replay)) * level * part
    change = level + exchange * further + back
    base, share, held = constants.spread_old
    annealed = constants.exchange[0] * float(np.mean([each.annealed for each in learned]))  # replay may undo all of it
    parts = [base, share * further, held * level * part, scatter, ANNEALED_SD * annealed]
    return float(change), float(np.hypot.reduce([*parts, _unknown("old", curve, change)]))


def regained(course: Course, curve: Curve) -> float:
    """The part of what can come back that comes back until the end, by the logarithm of the time that is left."""
    times, end = clock(course, curve)
    return 1.0 - float(times[-1]) / end


def old_level(
    course: Course, curve: Curve, learned: Sequence[Learned], constants: Constants
) -> tuple[float, float, float]:
    """Level of the old change now, its exchange for what is learned, and the scatter of the last measurements."""
    times, _ = clock(course, curve)
    changes = curve.corrected()
    recent = times >= min(RECENT * times[-1], times[-3])
    learning = np.mean([np.interp(times, each.times, each.changes) for each in learned], axis=0)
    prior = exchange_rate(course, constants)
    noise = max(OLD_NOISE * float(np.abs(changes).max()), LEAST_OLD_NOISE)
    # Two unknowns in a linear model: its most likely values are a least-squares problem with one row for the prior.
    rows = np.column_stack([np.ones(int(recent.sum())), learning[recent] - learning[-1]]) / noise
    rows = np.vstack([rows, [0.0, 1 / EXCHANGE_SD]])
    targets = np.append(changes[recent] / noise, prior / EXCHANGE_SD)
    level, exchange = np.linalg.lstsq(rows, targets, rcond=None)[0]
    off = changes[recent] - level - exchange * (learning[recent] - learning[-1])
    return float(level), float(exchange), float(np.sqrt(np.mean(off**2)))


def exchange_rate(course: Course, constants: Constants) -> float:
    """Old bits for a new bit, as other runs had it."""
    plain, replay = constants.exchange
    return plain + replay * float(np.sqrt(course.replay))


def _unknown(role: str, curve: Curve, change: float) -> float:
    """What is not known of a change over all rows where the switch alone saw all of them."""
    return UNKNOWN_ROWS[role] * abs(change) if curve.narrow and not curve.full else 0.0


def _interval(change: float, half: float) -> Forecast:
    return Forecast(change, change - half, change + half)


class Share(NamedTuple):
    """The smallest share of replay that keeps a budget, and the shares between which it lies with 90 %."""

    share: float
    low: float
    high: float


FEWEST_SHARES = 3


def cheapest_share(pilots: Mapping[float, Forecast], budget: float) -> Share | Refusal:
    """The smallest share of replay whose forecast keeps a budget, between the shares of pilots.

    Changes are interpolated over the root of the share, in which they are nearly straight. An end of the interval that
    no pilot reaches is the smallest or the largest share that was tried.

    >>> made = {0.0: Forecast(0.4, 0.3, 0.5), 0.04: Forecast(0.2, 0.1, 0.3), 0.25: Forecast(0.0, -0.1, 0.1)}
    >>> cheapest_share(made, 0.2)
    Share(share=0.04, low=0.01, high=0.1225)
    """
    shares = sorted(pilots)
    if len(shares) < FEWEST_SHARES:
        return Refusal(f"pilots with {len(shares)} different replay rates are too few (at least {FEWEST_SHARES})")
    roots = np.sqrt(np.array(shares))
    middle, low, high = (_never_rising([pilots[share][end] for share in shares]) for end in range(3))
    if not middle[-1] <= budget <= middle[0]:
        return Refusal(
            f"the budget of {budget:g} lies outside of what the pilots come to, {middle[-1]:.3f} (replay "
            f"{shares[-1]:.0%}) to {middle[0]:.3f} (replay {shares[0]:.0%}) bits per byte"
        )
    ends = [round(_crossing(roots, values, budget) ** 2, 6) for values in (middle, low, high)]
    return Share(*ends)


def _never_rising(values: Sequence[float]) -> Floats:
    """Values that more replay never makes larger: the nearest ones, pooled where they rise."""
    from scipy.optimize import isotonic_regression

    fitted: Floats = isotonic_regression(values, increasing=False).x
    return fitted


def _crossing(roots: Floats, values: Floats, budget: float) -> float:
    """Where a line through values that do not rise comes down to the budget; an end where it does not cross it."""
    if values[0] <= budget:
        return float(roots[0])
    if values[-1] > budget:
        return float(roots[-1])
    after = int(np.argmax(values <= budget))
    start, end = values[after - 1], values[after]
    part = (start - budget) / (start - end)
    return float(roots[after - 1] + part * (roots[after] - roots[after - 1]))
