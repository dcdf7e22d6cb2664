"""From shares to whole rows: how many rows each source gives at each step.

Rows go one by one to the source with the largest deficit (cumulative share − cumulative count) among those
whose share at this step is above 0; ties go by config order. Shares are whole multiples of 1/UNIT, so the sum
is exact over any number of rows. Where shares are constant the deficits repeat after some steps, so a long run
is kept as one period.

A digest of all counts up to a step is the value of a polynomial with the counts as its coefficients, one for each
source: whatever way a run is divided into spans, equal counts give equal digests, and a period that repeats a million
times is a geometric series.
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 10**9
MODULUS = 2**127 - 1  # a prime, so large that different counts have different digests for all purposes
BASE = 0x2545F4914F6CDD1D9E3779B97F4A7C15
MARK = 4096  # steps between two digests that are kept


def quantise(shares: Sequence[float]) -> tuple[int, ...]:
    """Shares that sum to 1 as whole numbers that sum to UNIT; a share above 0 stays above 0.

    >>> quantise([0.99, 0.01])
    (990000000, 10000000)
    """
    total = sum(shares)
    units = [max(1, round(share / total * UNIT)) if share > 0 else 0 for share in shares]
    units[units.index(max(units))] += UNIT - sum(units)
    return tuple(units)


def allot(deficits: list[int], shares: Sequence[int], rows: int) -> list[int]:
    """Rows of each source for the next `rows` rows at constant shares; `deficits` moves along.

    >>> deficits = [0, 0]
    >>> [allot(deficits, quantise([0.75, 0.25]), 2) for _ in range(4)]
    [[2, 0], [1, 1], [2, 0], [1, 1]]
    """
    active = [index for index, share in enumerate(shares) if share > 0]
    counts = [0] * len(shares)
    if len(active) == 1:
        counts[active[0]] = rows
    elif len(active) == 2 and -UNIT <= deficits[active[0]] - deficits[active[1]] < UNIT:
        first, second = active
        # The difference of the two deficits stays in [-UNIT, UNIT), which leaves one possible count.
        drift = deficits[first] - deficits[second] + rows * (shares[first] - shares[second])
        counts[first] = (drift + rows * UNIT + UNIT) // (2 * UNIT)
        counts[second] = rows - counts[first]
    else:
        return _allot_one_by_one(deficits, shares, rows, active)
    for index in active:
        deficits[index] += rows * shares[index] - counts[index] * UNIT
    return counts


def _allot_one_by_one(deficits: list[int], shares: Sequence[int], rows: int, active: list[int]) -> list[int]:
    counts = [0] * len(shares)
    for _ in range(rows):
        for index in active:
            deficits[index] += shares[index]
        chosen = max(active, key=deficits.__getitem__)
        deficits[chosen] -= UNIT
        counts[chosen] += 1
    return counts


@dataclass(frozen=True)
class _Segment:
    """Counts from `start_step` on: a prefix table whose last `period` steps repeat to `end_step`."""

    start_step: int
    before: NDArray[np.int64]  # rows drawn before start_step, by source
    prefix: NDArray[np.int64]  # (steps + 1, sources), rows drawn since start_step
    period: int  # 0 where nothing repeats

    def drawn(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows drawn before each of the steps, (steps, sources)."""
        offsets, last = steps - self.start_step, len(self.prefix) - 1
        beyond = np.maximum(offsets - last, 0)
        repeats = -(-beyond // self.period) if self.period else np.zeros_like(beyond)
        a_period = self.prefix[last] - self.prefix[last - self.period]
        table: NDArray[np.int64] = self.before + self.prefix[offsets - repeats * self.period]
        table += repeats[:, None] * a_period
        return table

    def digests(self, length: int) -> list[int]:
        """Digests of the first steps of the span, one for each source."""
        last = len(self.prefix) - 1
        if length <= last:
            return self._kept(length)
        first = last - self.period
        repeats, rest = divmod(length - first, self.period)
        once = pow(BASE, self.period, MODULUS)
        many = pow(once, repeats, MODULUS)
        series = (many - 1) * pow(once - 1, -1, MODULUS)
        before = self._kept(first)
        parts = zip(before, self._kept(last), self._kept(first + rest), strict=True)
        return [(a + (whole - a) * series + (part - a) * many) % MODULUS for a, whole, part in parts]

    def _kept(self, length: int) -> list[int]:
        """Digests of the first steps of the table."""
        return self._extended(self._marks[length // MARK], length // MARK * MARK, length)

    @functools.cached_property
    def _marks(self) -> list[list[int]]:
        """Digests after 0, MARK, 2 MARK, … steps of the table."""
        marks = [[0] * self.prefix.shape[1]]
        for start in range(0, len(self.prefix) - 1 - MARK + 1, MARK):
            marks.append(self._extended(marks[-1], start, start + MARK))
        return marks

    def _extended(self, digests: list[int], start: int, stop: int) -> list[int]:
        columns = np.diff(self.prefix[start : stop + 1], axis=0).T.tolist()
        power = pow(BASE, start, MODULUS)
        return [
            (digest + power * _polynomial(column)) % MODULUS for digest, column in zip(digests, columns, strict=True)
        ]


class CountTable:
    """Rows drawn of every source before any step; a seek is a look-up.

    Args:
        segments: `(start_step, end_step, constant)` spans that cover the run.
        shares_at: step -> share of each source, in config order.
        batch_size: rows a step.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, bool]],
        shares_at: Callable[[int], Sequence[float]],
        batch_size: int,
    ) -> None:
        self._segments: list[_Segment] = []
        self.total_steps = segments[-1][1]
        deficits = [0] * len(shares_at(0))
        before = np.zeros(len(deficits), np.int64)
        for start_step, end_step, constant in segments:
            if constant:
                segment = _constant(start_step, end_step, quantise(shares_at(start_step)), batch_size, deficits, before)
            else:
                counts = [
                    allot(deficits, quantise(shares_at(step)), batch_size) for step in range(start_step, end_step)
                ]
                segment = _Segment(start_step, before, _prefix(counts), period=0)
            self._segments.append(segment)
            before = segment.drawn(np.array([end_step]))[0]
        self._starts = [segment.start_step for segment in self._segments]

    def drawn_before(self, step: int) -> NDArray[np.int64]:
        """Rows of each source that steps 0 … step − 1 have drawn."""
        segment = self._segments[max(0, bisect.bisect_right(self._starts, step) - 1)]
        rows: NDArray[np.int64] = segment.drawn(np.array([step]))[0]
        return rows

    def counts_at(self, step: int) -> NDArray[np.int64]:
        """Rows of each source at a step; they sum to the batch size."""
        segment = self._segments[bisect.bisect_right(self._starts, step) - 1]
        before, after = segment.drawn(np.array([step, step + 1]))
        counts: NDArray[np.int64] = after - before
        return counts

    def kinds_between(self, start: int, end: int) -> NDArray[np.int64]:
        """Rows of each source at the steps of one span or a part of it; what repeats in it is listed once."""
        segment = self._segments[bisect.bisect_right(self._starts, start) - 1]
        last = min(end, max(start, segment.start_step) + len(segment.prefix) - 1)
        counts: NDArray[np.int64] = np.diff(segment.drawn(np.arange(start, last + 1)), axis=0)
        return counts

    def digests_until(self, step: int) -> list[int]:
        """Digests of the counts at every step before this one, one for each source."""
        ends = [*self._starts[1:], self.total_steps]
        digests = [0] * len(self._segments[0].before)
        for segment, end in zip(self._segments, ends, strict=True):
            if segment.start_step < step:
                shift = pow(BASE, segment.start_step, MODULUS)
                found = segment.digests(min(end, step) - segment.start_step)
                digests = [(a + shift * b) % MODULUS for a, b in zip(digests, found, strict=True)]
        return digests

    def counts_until(self, step: int) -> NDArray[np.int64]:
        """Rows of each source at every step before this one, (step, sources)."""
        ends = [*self._starts[1:], self.total_steps]
        spans = [
            np.diff(segment.drawn(np.arange(segment.start_step, min(end, step) + 1)), axis=0)
            for segment, end in zip(self._segments, ends, strict=True)
            if segment.start_step < step
        ]
        return np.concatenate(spans) if spans else np.zeros((0, len(self._segments[0].before)), np.int64)


def _constant(
    start_step: int,
    end_step: int,
    shares: tuple[int, ...],
    batch_size: int,
    deficits: list[int],
    before: NDArray[np.int64],
) -> _Segment:
    """A span of constant shares, kept up to the step at which its deficits have come back."""
    seen = {tuple(deficits): 0}
    counts: list[list[int]] = []
    for offset in range(1, end_step - start_step + 1):
        counts.append(allot(deficits, shares, batch_size))
        state = tuple(deficits)
        if state in seen:
            period = offset - seen[state]
            for _ in range((end_step - start_step - offset) % period):
                allot(deficits, shares, batch_size)
            return _Segment(start_step, before, _prefix(counts), period)
        seen[state] = offset
    return _Segment(start_step, before, _prefix(counts), period=0)


def _polynomial(coefficients: list[int]) -> int:
    """Coefficients of 1, BASE, BASE², … summed up.

    >>> _polynomial([3, 0, 2]) == (3 + 2 * BASE**2) % MODULUS
    True
    """
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * BASE + coefficient) % MODULUS
    return value


def _prefix(counts: list[list[int]]) -> NDArray[np.int64]:
    table = np.zeros((len(counts) + 1, len(counts[0])), np.int64)
    np.cumsum(np.array(counts, np.int64), axis=0, out=table[1:])
    return table
