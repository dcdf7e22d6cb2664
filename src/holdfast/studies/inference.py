"""How sure a mean difference is: seeds and documents together, Student's t, Holm's correction, what would be seen.

A difference is measured for every seed and, where it is known, for every document of one held-out set that all seeds
share. Seeds differ, documents differ, and both are samples. With S seeds and M documents

    SE² = s²_seed / S + s²_doc / M − s²_resid / (S M)

where s²_seed is the variance of the seeds' means, s²_doc of the documents' means and s²_resid of what is left; the
degrees of freedom are Satterthwaite's. Without documents only the first term is there, and the answer is conditional on
the held-out set.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

Array = np.ndarray

LEVEL = 0.025  # one-sided, for a family of comparisons together
POWER = 0.8
FEWEST_SEEDS = 3
MOST_SEEDS = 1000


class Block(NamedTuple):
    """The differences of one task.

    Args:
        differences: (S, M), of one column where no documents are known.
        weights: (M,) of the documents, such as their bytes.
        factor: what the task counts in the outcome.
    """

    differences: Array
    weights: Array
    factor: float = 1.0


class Effect(NamedTuple):
    """A mean difference with its standard error.

    Args:
        mean: over seeds and documents.
        error: its standard error.
        degrees: of freedom of that.
        by_seed: (S,) the seeds' own means.
        seeds_part: what more seeds make smaller: SE² times S, without what is the documents'.
        documents_part: the part of SE² that is the documents'.
    """

    mean: float
    error: float
    degrees: float
    by_seed: Array
    seeds_part: float
    documents_part: float


def effect(blocks: Sequence[Block]) -> Effect:
    """The mean over all blocks, seeds and documents; documents of different blocks are different samples."""
    by_seed = sum(block.factor * (block.differences @ block.weights / block.weights.sum()) for block in blocks)
    assert isinstance(by_seed, np.ndarray)
    seeds = len(by_seed)
    if seeds < 2:
        return Effect(float(by_seed.mean()), math.inf, 1.0, by_seed, math.inf, 0.0)
    of_seeds = float(by_seed.var(ddof=1)) / seeds
    terms = [(of_seeds, seeds - 1.0)]
    of_documents = 0.0
    largest = of_seeds
    for block in blocks:
        if block.differences.shape[1] > 1:
            variance, rest, degrees = _documents(block)
            terms += [(variance, degrees), (rest, degrees * (seeds - 1))]
            of_documents += variance - rest
            largest = max(largest, variance)
    # A part that is estimated below zero is zero: then the larger of the two others is the whole.
    squared = max(of_seeds + of_documents, largest)
    spread = sum(value**2 / degrees for value, degrees in terms)
    freedom = squared**2 / spread if spread > 0 else seeds - 1.0
    mean = float(by_seed.mean())
    return Effect(mean, math.sqrt(squared), freedom, by_seed, of_seeds * seeds, max(squared - of_seeds, 0.0))


def _documents(block: Block) -> tuple[float, float, float]:
    """Of one block s²_doc / M, s²_resid / (S M) and M − 1; weighted documents count as their share in the mean."""
    differences, weights = block.differences, block.weights / block.weights.mean()
    seeds, documents = differences.shape
    centre = float((differences @ weights).mean() / documents)
    # Of a ratio of sums, each document's part is its weight times its distance from the ratio.
    parts = block.factor * weights * (differences - centre)
    of_document = parts.mean(0)
    variance = float(of_document.var(ddof=1)) / documents
    rest = parts - of_document - parts.mean(1, keepdims=True) + parts.mean()
    residual = float((rest**2).sum()) / ((seeds - 1) * (documents - 1))
    return variance, residual / (seeds * documents), documents - 1.0


def p_above(found: Effect) -> float:
    """One-sided: how likely a mean this far above 0 is where the truth is 0."""
    if not math.isfinite(found.error):
        return 1.0
    if found.error == 0:
        return 0.0 if found.mean > 0 else 1.0
    return float(special.stdtr(found.degrees, -found.mean / found.error))


def p_below(found: Effect) -> float:
    """One-sided: how likely a mean this far below 0 is where the truth is 0."""
    return p_above(found._replace(mean=-found.mean))


def point(degrees: float, level: float) -> float:
    """The point that Student's t exceeds with a small probability."""
    return float(special.stdtrit(degrees, 1 - level))


def holm(p_values: Sequence[float], level: float = LEVEL) -> tuple[list[float], list[float]]:
    """Of each hypothesis the level that it is tested at and its adjusted p; from the first that stands on, one level.

    >>> holm([0.5, 0.001, 0.012], level=0.03)
    ([0.03, 0.01, 0.015], [0.5, 0.003, 0.024])
    >>> holm([0.5, 0.001, 0.02], level=0.03)[0]
    [0.015, 0.01, 0.015]
    """
    levels, adjusted = [level] * len(p_values), [1.0] * len(p_values)
    stopped, highest = None, 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        left = len(p_values) - rank
        levels[index] = stopped or level / left
        highest = max(highest, min(1.0, p_values[index] * left))
        adjusted[index] = highest
        if stopped is None and p_values[index] > levels[index]:
            stopped = levels[index]
    return levels, adjusted


def detectable(error: float, degrees: float, level: float) -> float:
    """The smallest effect that would have been seen with probability 0.8."""
    return (point(degrees, level) + point(degrees, 1 - POWER)) * error


def seeds_to_halve(found: Effect, level: float) -> int | None:
    """How many more seeds would halve the smallest effect that is seen; None where more seeds would not.

    >>> one = effect([Block(np.array([[1.0], [2.0], [3.0], [2.5], [1.5]]), np.ones(1))])
    >>> seeds_to_halve(one, 0.025)
    9
    """
    seeds = len(found.by_seed)
    if not math.isfinite(found.error) or found.error == 0:
        return None
    goal = detectable(found.error, found.degrees, level) / 2
    for more in range(1, MOST_SEEDS):
        error = math.sqrt(found.seeds_part / (seeds + more) + found.documents_part)
        if detectable(error, found.degrees + more, level) <= goal:
            return more
    return None
