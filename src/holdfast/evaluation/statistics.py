"""Honest numbers: intervals that resample whole documents or groups, chance levels, bits per byte.

Everything random takes a seed and gives the same answer every time.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
DRAWS = 2000
_CHUNK = 1 << 22  # resampling counts held at once


class Interval(NamedTuple):
    """The two ends of a confidence interval."""

    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference and its interval; it counts as real when the interval leaves 0 out."""

    mean: float
    low: float
    high: float

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
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends the formula is exact in theory only; rounding must not leave the share outside.
    return Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def bootstrap_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    groups: ArrayLike | None = None,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of sum(numerators) / sum(denominators), resampling whole groups.

    With NLL sums and bytes of documents it is the interval of a bits-per-byte figure (times ln 2).

    Args:
        groups: which observations belong together (premise, context, document); each its own unless given.
    """
    tops, bottoms = _by_group(numerators, denominators, groups)
    ratios = np.sort(_resampled_ratios(tops, bottoms, draws, seed))
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def accuracy_interval(
    correct: ArrayLike,
    groups: ArrayLike | None = None,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Interval of an accuracy: bootstrap over groups; Wilson's where resampling shows no spread.

    All answers right (or wrong), or a single group, resample to one value: an interval of width 0 would be a
    lie, so Wilson's over the number of groups is given instead.
    """
    values = np.asarray(correct, float)
    if values.size == 0:
        return Interval(0.0, 1.0)
    tops, bottoms = _by_group(values, np.ones_like(values), groups)
    if len(tops) < 2 or np.ptp(tops / bottoms) == 0:
        return wilson(float(values.mean()) * len(tops), len(tops), level)
    return bootstrap_ratio(values, np.ones_like(values), groups, level=level, draws=draws, seed=seed)


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    groups: ArrayLike | None = None,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """The mean of second - first on the same examples, with a bootstrap interval over groups.

    >>> paired_difference([0, 0, 1, 1], [1, 1, 1, 1]).mean
    0.5
    """
    change = np.asarray(second, float) - np.asarray(first, float)
    assert change.size, "a difference needs examples"
    interval = bootstrap_ratio(change, np.ones_like(change), groups, level=level, draws=draws, seed=seed)
    return Difference(float(change.mean()), *interval)


def churn(before: ArrayLike, after: ArrayLike) -> float:
    """The share of answers whose correctness changed.

    >>> churn([1, 1, 0, 0], [1, 0, 1, 0])
    0.5
    """
    return float(np.mean(np.asarray(before, bool) != np.asarray(after, bool)))


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


def _resampled_ratios(
    tops: NDArray[np.float64], bottoms: NDArray[np.float64], draws: int, seed: int
) -> NDArray[np.float64]:
    """Ratios of resampled sums, in chunks of bounded memory; the chunks do not change the numbers drawn."""
    rng = np.random.default_rng(seed)
    size = len(tops)
    rows = max(1, _CHUNK // max(size, 1))
    ratios = []
    for start in range(0, draws, rows):
        picked = rng.integers(size, size=(min(rows, draws - start), size))
        ratios.append(tops[picked].sum(axis=1) / bottoms[picked].sum(axis=1))
    return np.concatenate(ratios)


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
