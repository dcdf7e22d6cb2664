"""The verdict once more, in plain loops from the statement of the method alone, on random studies.

It shares no code with `holdfast.studies`: plain's curve is cut segment by segment, the t distribution is SciPy's.
"""

import math

import numpy as np
import pytest
from scipy import stats

from holdfast.studies.results import Row
from holdfast.studies.verdict import judge_rows
from holdfast.studies.words import to_json

RATES = 0.003 * np.array([0.03, 0.1, 0.2, 0.5, 1.0])


def least_old(new: np.ndarray, old: np.ndarray, limit: float) -> tuple[float, float] | None:
    """Least old with new at most a limit on segments, and where: the segment's number plus a share of it."""
    best = None
    for i in range(len(new) - 1):
        rise = new[i + 1] - new[i]
        cut = min(max((limit - new[i]) / rise, 0.0), 1.0)
        ends = (0.0, cut) if rise > 0 else (cut, 1.0)
        for t in ends:
            if new[i] + t * rise <= limit + 1e-12:
                value = old[i] + t * (old[i + 1] - old[i])
                if best is None or value < best[0] - 1e-12:
                    best = (value, i + t)
    return best


def at(values: np.ndarray, place: float) -> np.ndarray:
    i = min(int(place), len(values) - 2)
    return values[i] + (place - i) * (values[i + 1] - values[i])


class Again:
    """Losses: plain_new (S, P), arm_new (S,); of each task plain (S, P, M), arm (S, M) and what both are divided by."""

    def __init__(self, plain_new, arm_new, tasks, delta) -> None:
        self.plain_new, self.arm_new, self.tasks, self.delta = plain_new, arm_new, tasks, delta

    def differences(self, shift: float) -> list[np.ndarray] | None:
        """Of each task (S, M) plain at each seed's place minus the arm; None where plain never learns as much."""
        plain_old = sum(plain.mean(2) / scale for plain, _, scale in self.tasks)
        limit = self.arm_new + shift
        middle = least_old(self.plain_new.mean(0), plain_old.mean(0), limit.mean())
        places = []
        for seed in range(len(limit)):
            if middle is None:  # it learns more than every plain run: all seeds where plain learns most
                places.append(float(self.plain_new.mean(0).argmin()))
            else:
                own = least_old(self.plain_new[seed], plain_old[seed], limit[seed])
                places.append((own or middle)[1])
        if middle is None and shift < 0:
            return None
        return [
            np.stack([at(plain[s], place) - arm[s] for s, place in enumerate(places)]) / scale
            for plain, arm, scale in self.tasks
        ]

    def effect(self, shift: float) -> tuple[float, float, float] | None:
        """Mean, SE and Satterthwaite's degrees of freedom: SE² = s²_seed/n + s²_doc/m − s²_resid/(nm)."""
        blocks = self.differences(shift)
        if blocks is None:
            return None
        by_seed = sum(block.mean(1) for block in blocks)
        n = len(by_seed)
        parts, squared = [(by_seed.var(ddof=1) / n, n - 1)], by_seed.var(ddof=1) / n
        for block in blocks:
            m = block.shape[1]
            if m > 1:
                rest = block - block.mean(0) - block.mean(1)[:, None] + block.mean()
                of_docs = block.mean(0).var(ddof=1) / m
                of_rest = (rest**2).sum() / ((n - 1) * (m - 1)) / (n * m)
                parts += [(of_docs, m - 1), (of_rest, (n - 1) * (m - 1))]
                squared += of_docs - of_rest
        freedom = squared**2 / sum(part**2 / degrees for part, degrees in parts)
        return float(by_seed.mean()), math.sqrt(squared), freedom


def holm(p_values: list[float]) -> list[tuple[float, float]]:
    """Holm: of each the level that it is tested at and its adjusted p."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    made, standing, worst = [(0.0, 0.0)] * len(p_values), True, 0.0
    level = 0.0
    for k, i in enumerate(order):
        if standing:
            level = 0.025 / (len(p_values) - k)
            standing = p_values[i] <= level
        worst = max(worst, min(1.0, (len(p_values) - k) * p_values[i]))
        made[i] = level, worst
    return made


def judged(arms: dict[str, Again], margin: float) -> dict[str, dict[str, float | str | None]]:
    """The word and the figures of each arm."""
    known = {name: (arm.effect(arm.delta), arm.effect(-arm.delta)) for name, arm in arms.items()}
    less = {name: bool(arm.arm_new.mean() > arm.plain_new.mean(0).max()) for name, arm in arms.items()}
    up, down = [], []
    for name, (better, worse) in known.items():
        up.append(1.0 if less[name] else float(stats.t.sf(better[0] / better[1], better[2])))
        down.append(1.0 if less[name] or worse is None else float(stats.t.cdf(worse[0] / worse[1], worse[2])))
    found = {}
    for (name, (better, worse)), high, low in zip(known.items(), holm(up), holm(down), strict=True):
        if less[name]:
            found[name] = {"verdict": "learns less", "delta": None, "low": None, "high": None, "p": None, "mde": None}
            continue
        ends = {}
        for side, effect, (level, _) in (("better", better, high), ("worse", worse, low)):
            if effect is not None:
                half = stats.t.isf(level, effect[2]) * effect[1]
                ends[side] = effect[0] - half, effect[0] + half
        more = arms[name].arm_new.mean() + arms[name].delta < arms[name].plain_new.mean(0).min()
        word = "learns more" if more else "no evidence"
        if worse is not None and max(abs(end) for pair in ends.values() for end in pair) <= margin:
            word = "equal"
        if worse is not None and ends["worse"][1] < 0:
            word = "worse"
        if ends["better"][0] > 0:
            word = "better"
        side, told, p = ("worse", worse, low[1]) if word == "worse" else ("better", better, high[1])
        mde = (stats.t.isf(high[0], better[2]) + stats.t.ppf(0.8, better[2])) * better[1]
        figures = {"delta": told[0], "low": ends[side][0], "high": ends[side][1], "p": p, "mde": mde}
        found[name] = {"verdict": word, **figures}
    return found


def random_study(random: np.random.Generator, documents: int, tasks: int) -> tuple[list[Row], dict[str, Again], float]:
    """Rows of a study and the same as arrays; new losses are less noisy than δ, as the method's δ asks for."""
    seeds, rates = int(random.integers(3, 9)), len(RATES)
    parent = random.normal(0, 0.05, seeds)
    steps = random.uniform(0.05, 0.4, rates - 1)
    plain_new = 2.5 + np.concatenate([steps[::-1].cumsum()[::-1], [0.0]]) + parent[:, None]
    plain_new = plain_new + random.normal(0, 0.003, plain_new.shape)
    before = 5.0 + parent
    delta = 0.01 * float(before.mean() - plain_new.mean(0).min())
    curves, starts = [], []
    for _ in range(tasks):
        rise = np.concatenate([[0.0], random.uniform(0.05, 0.5, rates - 1).cumsum()])
        curve = 1.5 + rise + parent[:, None] + random.normal(0, 0.01, (seeds, rates))
        curves.append(curve[:, :, None] + random.normal(0, 0.02, (seeds, rates, documents)))
        starts.append(np.repeat((1.3 + parent)[:, None], documents, 1))
    scales = [
        tasks * float(c[:, -1].mean() - s.mean()) if tasks > 1 else 1.0 for c, s in zip(curves, starts, strict=True)
    ]
    arms = {}
    for index, gain in enumerate([0.0, 0.1, -0.4, 0.02, float(random.normal(0, 0.1))]):
        place = float(random.uniform(-0.1, 1.05)) * (rates - 1)
        new = np.array([at(row, min(max(place, 0.0), rates - 1.0)) for row in plain_new]) - 0.2 * (place > rates - 1)
        new = new + 0.2 * (place < 0) + random.normal(0, 0.003, seeds)
        own = []
        for curve in curves:
            old = np.stack([at(row, min(max(place, 0.0), rates - 1.0)) for row in curve]) - gain
            own.append(old + random.normal(0, 0.01, (seeds, 1)) + random.normal(0, 0.03, documents))
        arms[f"arm {index}"] = new, own
    rows: list[Row] = []

    def add(arm: str, seed: int, rate: float | None, new: float, olds: list[np.ndarray]) -> None:
        for task, old in enumerate(olds):
            for document, loss in enumerate(old):
                named = f"d{document}" if documents > 1 else ""
                name = f"task {task}" if tasks > 1 else ""
                rows.append(Row(arm, seed, rate, float(loss), float(new), task=name, document=named))

    for seed in range(seeds):
        add("before", seed, None, before[seed], [start[seed] for start in starts])
        for index, rate in enumerate(RATES):
            add("plain", seed, float(rate), plain_new[seed, index], [curve[seed, index] for curve in curves])
        for name, (new, own) in arms.items():
            add(name, seed, 0.003, new[seed], [old[seed] for old in own])
    again = {
        name: Again(plain_new, new, list(zip(curves, own, scales, strict=True)), delta)
        for name, (new, own) in arms.items()
    }
    return rows, again, delta


@pytest.mark.parametrize(("documents", "tasks"), [(1, 1), (6, 1), (1, 3), (4, 2)])
def test_a_second_implementation_says_the_same(documents: int, tasks: int) -> None:
    random = np.random.default_rng([documents, tasks])
    words: dict[str, int] = {}
    for _ in range(40):
        rows, arms, delta = random_study(random, documents, tasks)
        found = to_json(judge_rows(rows))
        assert found["margin"] == pytest.approx(delta)
        for name, wanted in judged(arms, delta if tasks == 1 else 0.01).items():
            told = found["arms"][name]
            # At the slow end, and where rates are far apart, plain might keep more at a rate that was not run.
            slow = any("slow end" in note or "far apart" in note for note in told["notes"])
            assert told["verdict"] == wanted["verdict"] or (slow and told["verdict"] == "no evidence"), name
            words[told["verdict"]] = words.get(told["verdict"], 0) + 1
            for figure in ("delta", "low", "high", "p", "mde"):
                expected = wanted[figure]
                near = None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-9)
                assert told[figure] == near, (name, figure)
    assert {"better", "worse", "no evidence", "learns less", "learns more"} <= {*words}
