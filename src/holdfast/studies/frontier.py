"""The frontier of plain training: the least that it forgets while it learns as much as an arm.

Plain training is a set of runs: learning rates, their earlier checkpoints, interpolations with the snapshot. All are
ways of learning less. Points that differ in one of these alone lie on a **line**; between neighbours new and old are
taken as linear in what was set (the logarithm of the rate or of the steps, the share of an interpolation) and never in
the new loss, which is measured with noise. A place on a line is a number: 2.25 is a quarter of the way from its third
point to its fourth.

Shapes: S seeds, P points of plain, K points of a line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Array = np.ndarray

FINE = 50  # points of a smooth curve from one point of a line to the next
NEAR = 0.01  # of a fall of the new loss: by so much less it is flat
BENDS = 1.5  # a smooth curve is a guess, and plain may be bowed more than it


class PlainPoint(NamedTuple):
    """What was set in a plain run."""

    rate: float
    steps: int | None = None
    share: float = 1.0


class Line(NamedTuple):
    """Points of plain that differ in one thing, in the order of it.

    Args:
        along: what they differ in: `rate`, `steps` or `share`.
        points: (K,) their numbers among the points of plain.
        settings: (K,) its values.
    """

    along: str
    points: Array
    settings: Array

    def setting(self, place: float) -> float:
        """What would have been set at a place.

        >>> round(Line("rate", np.arange(2), np.array([0.01, 1.0])).setting(0.5), 6)
        0.1
        """
        first = min(int(place), len(self.settings) - 2)
        ends, share = self.settings[first : first + 2], place - first
        if self.along == "share":
            return float(ends[0] + share * (ends[1] - ends[0]))
        return math.exp(math.log(ends[0]) + share * (math.log(ends[1]) - math.log(ends[0])))


def lines_of(points: Sequence[PlainPoint]) -> list[Line]:
    """All lines of two points or more through a set of points."""
    found = []
    for along in PlainPoint._fields:
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, point in enumerate(points):
            rest = tuple(value for name, value in point._asdict().items() if name != along)
            if getattr(point, along) is not None:
                groups.setdefault(rest, []).append(index)
        for members in groups.values():
            ordered = sorted(members, key=lambda index: float(getattr(points[index], along)))
            if len(ordered) > 1:
                settings = np.array([float(getattr(points[index], along)) for index in ordered])
                found.append(Line(along, np.array(ordered), settings))
    return found


def lowest(new_SK: Array, old_SK: Array, limits_S: Array) -> tuple[Array, Array]:
    """For each seed the lowest old loss on a line where the new loss is at most a limit, and its place.

    Where a line stays above the limit, old is infinite and the place is where new is lowest.

    >>> lowest(np.array([[4.0, 2.0]]), np.array([[5.0, 9.0]]), np.array([3.0]))
    (array([7.]), array([0.5]))
    """
    limits = limits_S[:, None]
    reached = new_SK <= limits
    first, second = new_SK[:, :-1], new_SK[:, 1:]
    crossed = reached[:, :-1] != reached[:, 1:]
    share = np.where(crossed, (limits - first) / np.where(crossed, second - first, 1.0), 0.0)
    between = old_SK[:, :-1] + share * (old_SK[:, 1:] - old_SK[:, :-1])
    candidates = np.concatenate([np.where(reached, old_SK, np.inf), np.where(crossed, between, np.inf)], axis=1)
    places = np.concatenate(
        [np.broadcast_to(np.arange(new_SK.shape[1]), new_SK.shape), np.arange(share.shape[1]) + share], axis=1
    )
    seeds = np.arange(len(new_SK))
    chosen = candidates.argmin(1)
    found = candidates[seeds, chosen]
    return found, np.where(np.isfinite(found), places[seeds, chosen], new_SK.argmin(1))


def smooth(line: Line, new_K: Array, old_K: Array) -> list[Array]:
    """(2, many) new and old losses along a line as smooth curves through its points.

    One has no highs and lows of its own; one, with the slopes of parabolas, finds a low between two points; and in one
    the new loss falls as a power of what was set.
    """
    from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

    values = np.stack([new_K, old_K])
    along = line.settings if line.along == "share" else np.log(line.settings)
    if len(along) < 3:  # a straight line is all that two points tell
        return [values]
    fine = np.interp(np.arange((len(along) - 1) * FINE + 1) / FINE, np.arange(len(along)), along)
    slopes = np.gradient(values, along, axis=1, edge_order=2)
    curve = PchipInterpolator(along, values, axis=1)(fine)
    low = CubicHermiteSpline(along, values, slopes, axis=1)(fine)
    return [curve, low, np.stack([falling(along, new_K, fine), curve[1]])]


def falling(along_K: Array, new_K: Array, fine: Array) -> Array:
    """Losses between points as a level plus an exponential through three neighbours; straight where none fits.

    Where there are neighbours on both sides, the two that are less bowed count: near the level losses are mostly noise.

    >>> falling(np.arange(3.0), np.array([5.0, 3.0, 2.0]), np.array([0.5])).round(6)  # 4 above 1, then 2, then 1
    array([3.828427])
    """
    made: Array = np.interp(fine, along_K, new_K)
    for first in range(len(along_K) - 1):
        starts = [start for start in (first - 1, first) if 0 <= start <= len(along_K) - 3]
        level = min(_level(along_K[start : start + 3], new_K[start : start + 3]) for start in starts)
        if math.isfinite(level):
            inside = (fine >= along_K[first]) & (fine <= along_K[first + 1])
            logs = np.log(new_K[first : first + 2] - level)
            made[inside] = level + np.exp(np.interp(fine[inside], along_K[first : first + 2], logs))
    return made


def _level(along_3: Array, new_3: Array) -> float:
    """What three losses fall towards if what is left above it falls by the same share everywhere; else −∞."""
    from scipy.optimize import brentq

    falls = -np.diff(new_3) / np.diff(along_3)
    fallen = float(new_3[0] - new_3[1])
    if falls[0] > 0 and abs(new_3[2] - new_3[1]) <= NEAR * fallen:
        return float(new_3[1:].min()) - NEAR * fallen  # flat from the second on
    if not falls[0] > falls[1] > 0:
        return -math.inf

    def apart(level: float) -> float:
        shares = -np.diff(np.log(new_3 - level)) / np.diff(along_3)
        return float(shares[0] - shares[1])

    ends = float(new_3[2]) - 1e3 * fallen, float(new_3[2]) - 1e-9 * fallen
    return float(brentq(apart, *ends)) if apart(ends[0]) > 0 > apart(ends[1]) else -math.inf


def at_places(old_SKM: Array, places_S: Array) -> Array:
    """(S, M) old losses at a place for each seed, document by document."""
    first = np.minimum(places_S.astype(int), old_SKM.shape[1] - 2)
    share = (places_S - first)[:, None]
    seeds = np.arange(len(old_SKM))
    found: Array = (1 - share) * old_SKM[seeds, first] + share * old_SKM[seeds, first + 1]
    return found


class Reference(NamedTuple):
    """Where on plain's frontier an arm is compared.

    Args:
        line: the line that is lowest for the means over seeds.
        places: (S,) each seed's own place on it.
        mean_place: the place for the means.
        reached: whether plain learns as much as was asked for, on means; else all seeds are where it learns most.
    """

    line: Line
    places: Array
    mean_place: float
    reached: bool

    def old(self, old_SPM: Array) -> Array:
        """(S, M) old losses of plain there."""
        return at_places(old_SPM[:, self.line.points], self.places)


@dataclass(frozen=True)
class Frontier:
    """The frontier of one outcome over some seeds.

    Args:
        points: the P points of plain.
        new: (S, P) loss on the new task.
        old: (S, P) loss on the old task, lower is better.
    """

    points: tuple[PlainPoint, ...]
    lines: tuple[Line, ...]
    new: Array
    old: Array

    def reference(self, limits_S: Array) -> Reference:
        """Where plain forgets least with a new loss of at most a limit for each seed.

        Range and line are decided on means over seeds, so that no seed is dropped and no line is chosen for its noise.
        """
        new, old = self.new.mean(0)[None], self.old.mean(0)[None]
        limit = limits_S.mean()[None]
        if new.min() > limit[0]:
            return self._where_it_learns_most(new[0])
        ends = [lowest(new[:, line.points], old[:, line.points], limit) for line in self.lines]
        best = int(np.argmin([end[0][0] for end in ends]))
        line = self.lines[best]
        found, places = lowest(self.new[:, line.points], self.old[:, line.points], limits_S)
        # A seed whose own curve does not reach the limit is compared where the means are: its argmin would be noise.
        place = float(ends[best][1][0])
        return Reference(line, np.where(np.isfinite(found), places, place), place, True)

    def _where_it_learns_most(self, new_P: Array) -> Reference:
        most = int(new_P.argmin())
        line = next(line for line in self.lines if most in line.points)
        place = int(np.flatnonzero(line.points == most)[0])
        return Reference(line, np.full(len(self.new), float(place)), float(place), False)

    def lowest_mean(self, limit: float) -> float | None:
        """The frontier of the means at a new loss; None where plain does not learn as much."""
        new, old = self.new.mean(0)[None], self.old.mean(0)[None]
        found = min(lowest(new[:, line.points], old[:, line.points], np.array([limit]))[0][0] for line in self.lines)
        return float(found) if np.isfinite(found) else None

    def bowed(self, limit: float) -> float:
        """How low the frontier of the means may be at a new loss, because plain is not straight between its points.

        Chords lie above a curve that is bowed, most of all where rates are far apart: plain at a rate between two of
        them would look like a winner.
        """
        new, old = self.new.mean(0), self.old.mean(0)
        within = max(limit, float(new.min()))
        straight = self.lowest_mean(within)
        assert straight is not None, "plain reaches its own lowest new loss"
        curves = [each for line in self.lines for each in smooth(line, new[line.points], old[line.points])]
        curved = min(lowest(each[:1], each[1:], np.array([within]))[0][0] for each in curves)
        return straight - BENDS * max(straight - float(curved), 0.0)

    def slope(self, limit: float) -> float:
        """How fast the frontier of means falls where more new loss is allowed; 0 where it does not."""
        step = 1e-6
        here, there = self.lowest_mean(limit), self.lowest_mean(limit - step)
        return 0.0 if here is None or there is None else (there - here) / step

    def dominated(self, among: Sequence[int]) -> dict[int, int]:
        """Points that another of them beats on means: it learns at least as much and keeps at least as much."""
        new, old = self.new.mean(0), self.old.mean(0)
        found = {}
        for index in among:
            by = [
                other
                for other in among
                if new[other] <= new[index]
                and old[other] <= old[index]
                and (new[other] < new[index] or old[other] < old[index])
            ]
            if by:
                found[index] = min(by, key=lambda other: float(old[other]))
        return found
