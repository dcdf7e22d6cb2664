"""Honest numbers: intervals over whole documents or groups, paired differences, chance levels, bits per byte.

Intervals are Student's, with the jackknife's standard error (one document or group left out at a time) and the degrees
of freedom of the effective number of groups, in which a long document weighs more than a short one. In simulation a
95 % interval covers 94 to 96 % at 5 documents, where the percentiles of a bootstrap cover 86 %.

SciPy is imported by the functions that need it: every config is checked through this module, and few of them measure.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
DRAWS = 50_000  # of the simulated noise floor: its mean is known to a hundredth of a point


class Interval(NamedTuple):
    """The two ends of a confidence interval."""

    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference and its interval, over `num` documents, groups or seeds; real when that leaves 0 out."""

    mean: float
    low: float
    high: float
    num: int = 0

    @property
    def real(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def bits_per_byte(nll_sum: float, num_bytes: int) -> float | None:
    """Bits that a model needs for one byte of text; None where there is no text.

    >>> round(bits_per_byte(nll_sum=8 * math.log(2), num_bytes=4), 6)
    2.0
    """
    return nll_sum / num_bytes / math.log(2) if num_bytes > 0 else None


def uniform_losses(vocab_size: int, num_tokens: int, num_bytes: int) -> dict[str, float]:
    """The losses of a model that knows nothing: all tokens, or all bytes where that needs less, are equally likely.

    >>> uniform_losses(256, 10, 10)["bits_per_byte"], uniform_losses(2, 10, 20)["bits_per_byte"]
    (8.0, 0.5)
    """
    nll = math.log(vocab_size)
    bits = bits_per_byte(nll * num_tokens, num_bytes)
    return {"nll": nll} | ({} if bits is None else {"bits_per_byte": min(8.0, bits)})


def chance(num_choices: Sequence[int]) -> float | None:
    """The accuracy of guessing, for questions with these numbers of answers.

    >>> chance([2, 4])
    0.375
    """
    return float(np.mean(1 / np.asarray(num_choices, float))) if len(num_choices) else None


def majority(labels: Sequence[Any]) -> float | None:
    """The accuracy of always giving the most frequent answer.

    >>> majority(["yes", "no", "yes", "yes"])
    0.75
    """
    if not len(labels):
        return None
    return int(np.unique(np.asarray(labels), return_counts=True)[1].max()) / len(labels)


def wilson(successes: float, trials: float, level: float = LEVEL) -> Interval:
    """Wilson's interval of a share, which is sensible also at 0, at 1 and for few trials.

    >>> [round(edge, 4) for edge in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if trials <= 0:
        return Interval(0.0, 1.0)
    z = normal(level)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends the formula is exact in theory only; rounding must not leave the share outside.
    return Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def normal(level: float = LEVEL) -> float:
    """The two-sided point of the normal distribution.

    >>> round(normal(), 3)
    1.96
    """
    from scipy import special

    return float(special.ndtri((1 + level) / 2))


def student(degrees: float, level: float = LEVEL) -> float:
    """The two-sided point of Student's t.

    >>> round(student(4), 3)
    2.776
    """
    from scipy import special

    return float(special.stdtrit(degrees, (1 + level) / 2))


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, groups: ArrayLike | None = None, *, level: float = LEVEL
) -> Interval | None:
    """Interval of sum(numerators) / sum(denominators) over whole groups; None below two groups.

    With NLL sums and bytes of documents it is the interval of a bits-per-byte figure (times ln 2).

    Args:
        groups: which observations belong together (premise, context, document); each its own unless given.
    """
    tops, bottoms = _by_group(numerators, denominators, groups)
    if len(tops) < 2:
        return None
    ratio, error = _jackknife(tops, bottoms)
    half = student(max(effective_count(bottoms) - 1, 0.5), level) * error
    return Interval(ratio - half, ratio + half)


def effective_count(weights: ArrayLike) -> float:
    """How many equal groups say as much as unequal ones (Kish).

    >>> effective_count([5, 5]), round(effective_count([9, 1]), 2)
    (2.0, 1.22)
    """
    sizes = np.asarray(weights, float)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def accuracy_interval(correct: ArrayLike, groups: ArrayLike | None = None, *, level: float = LEVEL) -> Interval:
    """Wilson's interval of an accuracy, at the effective number of questions where groups of them go together.

    Where groups show no spread (all right, all wrong, one group) they count as one question each: an interval of
    width 0 would be a lie.
    """
    values = np.asarray(correct, float)
    if values.size == 0:
        return Interval(0.0, 1.0)
    tops, bottoms = _by_group(values, np.ones_like(values), groups)
    share, count = float(values.mean()), float(len(tops))
    if len(tops) < values.size and len(tops) > 1:
        _, error = _jackknife(tops, bottoms)
        if error > 1e-12:
            # As many questions as make the same standard error, fewer where it is itself known from few groups.
            degrees = max(effective_count(bottoms) - 1, 0.5)
            known = (normal(level) / student(degrees, level)) ** 2
            count = min(share * (1 - share) / error**2, float(values.size)) * known
    return wilson(share * count, count, level)


def better_than(score: float, low: float, count: int, level: float, one_sided: float = (1 - LEVEL) / 2) -> bool:
    """Whether an accuracy is above a level (chance, majority) that is not luck.

    Its interval must be above, and so many right answers must be as rare as `one_sided` at that level, exactly:
    Wilson's interval alone errs up to twice as often for few questions.

    Args:
        low: the lower end of the accuracy's interval.
        count: questions asked.

    >>> better_than(0.45, 0.258, 20, 0.25), better_than(0.55, 0.342, 20, 0.25)
    (False, True)
    """
    from scipy import special

    right = round(score * count)
    return low > level and right > 0 and float(special.bdtrc(right - 1, count, level)) <= one_sided


def paired_ratio(
    first: ArrayLike,
    second: ArrayLike,
    denominators: ArrayLike,
    groups: ArrayLike | None = None,
    *,
    level: float = LEVEL,
) -> Difference | None:
    """sum(second - first) / sum(denominators) of the same observations, and its interval over groups.

    The degrees of freedom are of the groups that changed: few of many say little. None below two groups.
    """
    changes, bottoms = _by_group(np.asarray(second, float) - np.asarray(first, float), denominators, groups)
    count = len(changes)
    if count < 2:
        return None
    ratio, error = _jackknife(changes, bottoms)
    changed = changes != 0
    if changed.sum() < 2:
        # No spread to go by: the change lies within what so few changes of so many allow.
        most = wilson(float(changed.sum()), count, level).high * float(np.abs(changes).max() or 1.0) * count
        half = most / float(bottoms.sum())
        return Difference(ratio, -half, half, count)
    half = student(max(effective_count(bottoms[changed]) - 1, 0.5), level) * error
    return Difference(ratio, ratio - half, ratio + half, count)


def paired_difference(
    first: ArrayLike, second: ArrayLike, groups: ArrayLike | None = None, *, level: float = LEVEL
) -> Difference | None:
    """The mean of second - first on the same examples, with an interval over groups; None below two of them.

    >>> paired_difference([0, 0, 1, 1], [1, 1, 1, 1]).mean
    0.5
    """
    before = np.asarray(first, float)
    return paired_ratio(before, second, np.ones_like(before), groups, level=level)


def churn(before: ArrayLike, after: ArrayLike) -> float:
    """The share of answers whose correctness changed.

    >>> churn([1, 1, 0, 0], [1, 0, 1, 0])
    0.5
    """
    return float(np.mean(np.asarray(before, bool) != np.asarray(after, bool)))


def mcnemar(lost: int, won: int) -> float:
    """The exact two-sided p of McNemar's test: would a fair coin fall so unevenly over the answers that changed?

    It is about these two models on these questions, never about a way of training.

    >>> mcnemar(3, 3), round(mcnemar(9, 1), 4)
    (1.0, 0.0215)
    """
    from scipy import special

    return min(1.0, 2.0 * float(special.bdtr(min(lost, won), lost + won, 0.5)))


def known_share(accuracy: float, guessing: float) -> float:
    """The share of questions that a model knows, where it guesses the others.

    >>> known_share(0.625, 0.25), known_share(0.2, 0.25)
    (0.5, 0.0)
    """
    return max(accuracy - guessing, 0.0) / (1 - guessing) if guessing < 1 else 0.0


class NoiseFloor(NamedTuple):
    """Forgetting that shows although nothing was forgotten: its mean, and what it rarely exceeds."""

    mean: float
    upper: float


def forgetting_noise_floor(
    accuracy: float,
    num_examples: int,
    num_stages: int,
    churned: float,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> NoiseFloor:
    """Simulated forgetting of a task whose true accuracy never changes, because it takes a maximum over noisy scores.

    Between two rows of the matrix a share `churned` of the answers flips, as many to right as to wrong on average.

    Args:
        accuracy: the task's true accuracy.
        num_stages: T; the maximum is over T - 1 rows.

    >>> forgetting_noise_floor(0.8, 500, 5, 0.0)
    NoiseFloor(mean=0.0, upper=0.0)
    >>> round(100 * forgetting_noise_floor(0.8, 500, 5, 0.1).mean, 1)  # points that nobody forgot
    1.2
    """
    if num_stages < 2 or num_examples < 1:
        return NoiseFloor(0.0, 0.0)
    rng = np.random.default_rng(seed)
    # Equal flows both ways keep the accuracy where it is; a flow larger than its source is cut to it.
    flow = min(churned / 2, accuracy, 1 - accuracy)
    to_wrong = flow / accuracy if accuracy > 0 else 0.0
    to_right = flow / (1 - accuracy) if accuracy < 1 else 0.0
    right = rng.binomial(num_examples, accuracy, draws)
    rows = [right]
    for _ in range(num_stages - 1):
        right = right - rng.binomial(right, to_wrong) + rng.binomial(num_examples - right, to_right)
        rows.append(right)
    scores = np.stack(rows) / num_examples
    forgetting = scores[:-1].max(axis=0) - scores[-1]
    return NoiseFloor(float(forgetting.mean()), float(np.quantile(forgetting, level)))


def _by_group(
    numerators: ArrayLike, denominators: ArrayLike, groups: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    tops, bottoms = np.asarray(numerators, float), np.asarray(denominators, float)
    assert tops.shape == bottoms.shape, "one denominator for each numerator"
    if groups is None:
        return tops, bottoms
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    assert index.shape == tops.shape, "one group for each observation"
    return np.bincount(index, tops).astype(float), np.bincount(index, bottoms).astype(float)


def _jackknife(tops: NDArray[np.float64], bottoms: NDArray[np.float64]) -> tuple[float, float]:
    """The ratio of sums, and its standard error from leaving out one group at a time."""
    top, bottom, count = tops.sum(), bottoms.sum(), len(tops)
    left = (top - tops) / (bottom - bottoms)
    return float(top / bottom), float(math.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum()))


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other surpasses in both, from left to right.

    >>> pareto([(1, 3), (2, 2), (1, 2), (3, 0)])
    [(1, 3), (2, 2), (3, 0)]
    """
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]
