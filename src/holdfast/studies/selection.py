"""Which configuration of an arm is judged: the one that keeps the most on the selection seeds, learning as much.

It is compared with the frontier of plain training as the verdict is: rates, early stops and interpolations, on lines
along which one of these changes. How sure anything is, the verdict says on other seeds.

Shapes: S seeds, P points of plain, K points of a line.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.studies.records import Row
from holdfast.studies.study import BEFORE, PLAIN

MARGIN = 0.01  # of what plain learns
LEARNS_LESS = -1e6  # of what learns less than all of plain, the one that learns most is the best

Array = np.ndarray
Key = tuple[str, str, str, str, int]  # arm, seed, learning rate, strength, steps
Setting = tuple[float, float, float]  # learning rate, steps, share of the trained weights


@dataclass(frozen=True)
class Plain:
    """What plain training ended with.

    Args:
        settings: of its P points.
        new, old: (S, P) losses; old in units of what plain at its base rate loses, where there are several tasks.
        margin: by how much plain may learn less than an arm.
    """

    settings: tuple[Setting, ...]
    new: Array
    old: Array
    margin: float

    def lines(self) -> list[list[int]]:
        """Points that differ in one thing alone, in its order."""
        found = []
        for axis in range(3):
            groups: dict[tuple[float, ...], list[int]] = {}
            for index, setting in enumerate(self.settings):
                groups.setdefault((*setting[:axis], *setting[axis + 1 :]), []).append(index)
            found += [sorted(each, key=lambda i: self.settings[i][axis]) for each in groups.values() if len(each) > 1]
        return found

    def gain(self, new_S: Array, old_S: Array) -> float:
        """How much less an arm forgets than plain that learns as much; far below 0 where plain never learns so little.

        Which line, and whether plain learns as much at all, is decided on means over seeds.
        """
        means, limit = self.new.mean(0), float(new_S.mean()) + self.margin
        if new_S.mean() > means.max():
            return LEARNS_LESS - float(new_S.mean())
        if means.min() > limit:
            return float((self.old[:, means.argmin()] - old_S).mean())
        line = min(self.lines(), key=lambda each: lowest(means[each], self.old.mean(0)[each], limit)[0])
        kept = [
            at_place(old[line], lowest(new[line], old[line], own + self.margin)[1])
            for new, old, own in zip(self.new, self.old, new_S, strict=True)
        ]
        return float((np.array(kept) - old_S).mean())


def lowest(new_K: Array, old_K: Array, limit: float) -> tuple[float, float]:
    """The lowest old loss on a line where the new loss is at most a limit, and its place on the line.

    Where the line stays above the limit, old is infinite and the place is where new is lowest.

    >>> lowest(np.array([4.0, 2.0]), np.array([5.0, 9.0]), 3.0)
    (7.0, 0.5)
    """
    found = [
        (float(old), float(place)) for place, (new, old) in enumerate(zip(new_K, old_K, strict=True)) if new <= limit
    ]
    for place in range(len(new_K) - 1):
        first, second = new_K[place : place + 2]
        if (first <= limit) != (second <= limit):
            share = float((limit - first) / (second - first))
            found.append((float(old_K[place] + share * (old_K[place + 1] - old_K[place])), place + share))
    return min(found, key=lambda each: each[0]) if found else (math.inf, float(new_K.argmin()))


def at_place(old_K: Array, place: float) -> float:
    """The old loss at a place on a line."""
    first = min(int(place), len(old_K) - 2)
    return float(old_K[first] + (place - first) * (old_K[first + 1] - old_K[first]))


def points(rows: Iterable[Row]) -> dict[Key, tuple[float, dict[str, float]]]:
    """New loss, and old loss of each task, of every measured point; documents weigh as many as they have bytes."""
    sums: dict[Key, tuple[float, dict[str, list[float]]]] = {}
    for row in rows:
        key = (row["arm"], row["seed"], row["learning_rate"], row["strength"], int(row["steps"] or 0))
        size = float(row["bytes"] or 1)
        total = sums.setdefault(key, (float(row["new"]), {}))[1].setdefault(row["task"], [0.0, 0.0])
        total[0], total[1] = total[0] + float(row["old"]) * size, total[1] + size
    return {key: (new, {task: top / size for task, (top, size) in old.items()}) for key, (new, old) in sums.items()}


def best(rows: Sequence[Row], arm: str, seeds: Sequence[int]) -> tuple[str, str] | None:
    """Learning rate and strength of an arm's best configuration, as rows write them; None where runs are missing."""
    found, names = points(rows), [str(seed) for seed in seeds]
    scales = _scales(found, names)
    plain = _plain(found, names, scales)
    if plain is None:
        return None
    scores = []
    for rate, strength in sorted({key[2:4] for key in found if key[0] == arm}):
        ends = [max((key for key in found if key[:4] == (arm, seed, rate, strength)), default=None) for seed in names]
        if None in ends:
            return None
        new = np.array([found[end][0] for end in ends if end is not None])
        old = np.array([_mean(found[end][1], scales) for end in ends if end is not None])
        scores.append((plain.gain(new, old), (rate, strength)))
    return max(scores, key=lambda score: score[0])[1] if scores else None


def _mean(old: dict[str, float], scales: dict[str, float]) -> float:
    return sum(old[task] / scale for task, scale in scales.items()) / len(scales)


def _scales(found: dict[Key, tuple[float, dict[str, float]]], seeds: Sequence[str]) -> dict[str, float]:
    """What plain at its largest rate loses of each task, where there are several; those it loses nothing of are out."""
    tasks = {task for _, old in found.values() for task in old}
    if len(tasks) < 2:
        return dict.fromkeys(tasks, 1.0)
    lost: dict[str, float] = {}
    for task in tasks:
        changes = []
        for seed in seeds:
            ends = [key for key in found if key[:2] == (PLAIN, seed) and not key[3]]
            before = found.get((BEFORE, seed, "", "", 0))
            if ends and before is not None:
                end = max(ends, key=lambda key: (float(key[2]), key[4]))
                changes.append(found[end][1][task] - before[1][task])
        lost[task] = float(np.mean(changes)) if changes else 0.0
    return {task: value for task, value in lost.items() if value > 0} or dict.fromkeys(tasks, 1.0)


def _plain(
    found: dict[Key, tuple[float, dict[str, float]]], seeds: Sequence[str], scales: dict[str, float]
) -> Plain | None:
    """Plain's points that all seeds have; None where there are none, or a seed has no beginning."""
    by_seed = [{key[2:]: value for key, value in found.items() if key[:2] == (PLAIN, seed)} for seed in seeds]
    shared = sorted(set.intersection(*(set(each) for each in by_seed))) if by_seed else []
    begun = [found.get((BEFORE, seed, "", "", 0)) for seed in seeds]
    if not shared or None in begun:
        return None
    new = np.array([[each[key][0] for key in shared] for each in by_seed])
    old = np.array([[_mean(each[key][1], scales) for key in shared] for each in by_seed])
    before = float(np.mean([each[0] for each in begun if each is not None]))
    settings = tuple((float(rate), float(steps), float(share or 1)) for rate, share, steps in shared)
    return Plain(settings, new, old, MARGIN * max(before - float(new.mean(0).min()), 0.0))
