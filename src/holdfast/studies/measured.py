"""The rows of `results.csv` as arrays: seeds paired, plain as a set of points, arms one configuration each.

Shapes: S seeds, P points of plain, M documents of a task (1 where none are named).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.errors import UserError
from holdfast.studies.frontier import Array, PlainPoint
from holdfast.studies.results import BEFORE, BOUNDS, COSTS, PLAIN, Row

WANTED_RATES = 5


@dataclass(frozen=True)
class Task:
    """What was kept of one old task: losses, or accuracies with their sign turned, so that lower is better.

    Args:
        documents: their names; empty where the rows name none.
        weights: (M,) of the documents in the mean.
        plain: (S, P, M).
        before: (S, M), what each seed begins with; None where that is not known for all.
        arms: (S_arm, M) of each arm.
    """

    name: str
    measure: str
    documents: tuple[str, ...]
    weights: Array
    plain: Array
    before: Array | None
    arms: Mapping[str, Array]

    def mean(self, values: Array) -> Array:
        """The mean over documents, which are the last axis."""
        result: Array = values @ self.weights / self.weights.sum()
        return result


@dataclass(frozen=True)
class Arm:
    """One configuration of an arm on the seeds that it shares with plain.

    Args:
        name: of the arm, and of its configuration where it has several.
        arm: of the arm alone.
        seeds: (S_arm,) the numbers of its seeds among those of plain.
        new: (S_arm,) loss on the new task.
        beside: means of what the results tell beside the verdict, such as costs and the worst old loss.
    """

    name: str
    arm: str
    rate: float
    strength: str
    seeds: Array
    new: Array
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All runs of a study over the seeds for which plain is complete.

    Args:
        base_rate: the learning rate that others are multiples of.
        new: (S, P) of plain.
        new_before: (S,); None where that is not known for all seeds.
        bounds: of `joint` and `single` the mean new loss and the mean old loss of each task.
        parents: how many checkpoints the seeds begin with; None where nothing says so.
        runs: how many runs are behind all this.
    """

    seeds: tuple[int, ...]
    base_rate: float
    points: tuple[PlainPoint, ...]
    new: Array
    new_before: Array | None
    tasks: tuple[Task, ...]
    arms: Mapping[str, Arm]
    bounds: Mapping[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)
    plain_beside: Mapping[str, float] = field(default_factory=dict)
    parents: int | None = None
    runs: int = 0
    notes: tuple[str, ...] = ()

    def multiple(self, rate: float) -> str:
        """A learning rate as a multiple of the base rate."""
        return f"× {float(f'{rate / self.base_rate:.3g}'):g}"


Key = tuple[str, float | None, str, int | None]  # what was run: arm, learning rate, strength, steps


class _Rows:
    """Rows by what was run, seed, task and document.

    Args:
        notes: what must be said of the rows is added here.
    """

    def __init__(self, rows: Sequence[Row], notes: list[str]) -> None:
        begun = [replace(row, arm=BEFORE) if _is_beginning(row) else row for row in rows]
        self.rows = _with_one_end(begun, notes)
        self.by_run: dict[Key, dict[int, list[Row]]] = {}
        self.tasks: dict[str, dict[str, float]] = {}
        self.measures: dict[str, str] = {}
        for row in self.rows:
            plain = row.arm in (BEFORE, *BOUNDS)
            key: Key = (row.arm, None, "", None) if plain else (row.arm, row.learning_rate, row.strength, row.steps)
            self.by_run.setdefault(key, {}).setdefault(row.seed, []).append(row)
            size = self.tasks.setdefault(row.task, {}).setdefault(row.document, row.bytes)
            if size != row.bytes:
                raise UserError(
                    f"arm {row.arm!r}, seed {row.seed}, document {row.document!r}: column bytes: {row.bytes:g} here "
                    f"and {size:g} elsewhere; all runs are measured on the same documents"
                )
            if self.measures.setdefault(row.task, row.measure) != row.measure:
                raise UserError(
                    f"arm {row.arm!r}, seed {row.seed}, task {row.task!r}: column measure: {row.measure!r} here and "
                    f"{self.measures[row.task]!r} elsewhere; a task has one measure"
                )

    def new(self, key: Key, seed: int) -> float:
        return float(np.mean([row.new for row in self.by_run[key][seed]]))

    def old(self, key: Key, seed: int, task: str) -> Array:
        """(M,) of one task; every run has all tasks and all their documents."""
        found = {row.document: row.old for row in self.by_run[key][seed] if row.task == task}
        missing = [name for name in self.tasks[task] if name not in found]
        if missing:
            what = f"column document: document {missing[0]!r}" if found else f"column task: {task!r}"
            raise UserError(
                f"arm {key[0]!r}, seed {seed}, learning_rate {key[1]}"
                + (f", task {task!r}" if task and found else "")
                + f": {what} is missing; all runs are measured on the same tasks and documents"
            )
        sign = -1.0 if self.measures[task] == "accuracy" else 1.0
        return sign * np.array([found[name] for name in self.tasks[task]])

    def olds(self, key: Key, seeds: Iterable[int], task: str) -> Array:
        return np.stack([self.old(key, seed, task) for seed in seeds])


def _is_beginning(row: Row) -> bool:
    return row.arm == PLAIN and row.steps == 0 and row.strength in ("", "0")


def _with_one_end(rows: Sequence[Row], notes: list[str]) -> list[Row]:
    """Rows in which all runs of plain have the same number of steps, and all of an arm's configuration.

    The last row of a run is its end, whatever others have: its steps are then those of the longest run.
    """
    last: dict[tuple[object, ...], int] = {}
    for row in rows:
        last[row.run[:4]] = max(last.get(row.run[:4], 0), row.steps or 0)
    ends: dict[tuple[object, ...], set[int]] = {}
    for run, steps in last.items():
        ends.setdefault(_alike(run), set()).add(steps)
    for group, found in ends.items():
        known = sorted(found - {0})
        if len(known) > 1 and group[0] not in (BEFORE, *BOUNDS):
            told = f"{group[0]}: runs end after {known[0]} to {known[-1]} steps"
            notes.append(f"{told}; the last row of each is its end")
    made = []
    for row in rows:
        end = max(ends[_alike(row.run[:4])])
        is_last = (row.steps or 0) == last[row.run[:4]]
        made.append(replace(row, steps=end) if is_last and (row.steps or 0) != end else row)
    return made


def _alike(run: tuple[object, ...]) -> tuple[object, ...]:
    """What runs have in common that end together: all of plain, else arm, learning rate and strength."""
    arm, _, rate, strength = run
    return (PLAIN,) if arm == PLAIN else (arm, rate, strength)


def measured(rows: Sequence[Row], base_rate: float | None = None) -> Measured:
    """The arrays of a study.

    Args:
        base_rate: what multiples are of; unless given, the rate of most arms if plain has it, else plain's largest.
    """
    notes: list[str] = []
    table = _Rows(rows, notes)
    points, seeds = _plain(table, notes)
    keys: list[Key] = [(PLAIN, p.rate, _strength(p.share), p.steps) for p in points]
    arms = _arms(table, seeds, notes)
    before: Key = (BEFORE, None, "", None)
    begun = all(seed in table.by_run.get(before, {}) for seed in seeds)
    tasks = []
    for name, documents in table.tasks.items():
        tasks.append(
            Task(
                name,
                table.measures[name],
                tuple(documents) if set(documents) != {""} else (),
                np.array(list(documents.values())),
                np.stack([table.olds(key, seeds, name) for key in keys], axis=1),
                table.olds(before, seeds, name) if begun else None,
                {arm.name: table.olds(key, _own(arm, seeds), name) for arm, key in arms},
            )
        )
    return Measured(
        seeds=tuple(seeds),
        base_rate=base_rate or _base_rate(points, [arm for arm, _ in arms]),
        points=points,
        new=np.array([[table.new(key, seed) for key in keys] for seed in seeds]),
        new_before=np.array([table.new(before, seed) for seed in seeds]) if begun else None,
        tasks=tuple(tasks),
        arms={arm.name: arm for arm, _ in arms},
        bounds=_bounds(table),
        plain_beside=_costs(row for row in table.rows if row.arm == PLAIN),
        parents=_parents(table, before, seeds if begun else []),
        # Interpolations of plain are made from its runs.
        runs=len({(*row.run[:3], "" if row.arm == PLAIN else row.strength) for row in table.rows if row.arm != BEFORE}),
        notes=tuple(notes),
    )


def _own(arm: Arm, seeds: Sequence[int]) -> list[int]:
    return [seeds[index] for index in arm.seeds]


def _strength(share: float) -> str:
    return "" if share == 1 else f"{share:g}"


def _plain(table: _Rows, notes: list[str]) -> tuple[tuple[PlainPoint, ...], list[int]]:
    """The points of plain that all of its complete seeds have, and those seeds."""
    found = {
        PlainPoint(rate, steps, float(strength) if strength else 1.0): set(by_seed)
        for (arm, rate, strength, steps), by_seed in table.by_run.items()
        if arm == PLAIN and rate is not None
    }
    if not found:
        known = ", ".join(map(repr, dict.fromkeys(row.arm for row in table.rows)))
        raise UserError(f"column arm: no row of the arm {PLAIN!r}, which the others are judged by; found {known[:200]}")
    last = {point.rate: max((p.steps or 0) for p in found if p.rate == point.rate) for point in found}
    ends = {
        point: seeds for point, seeds in found.items() if point.share == 1 and (point.steps or 0) == last[point.rate]
    }
    every = set().union(*ends.values())
    kept = {point: seeds for point, seeds in ends.items() if 2 * len(seeds) >= len(every)}
    seeds = sorted(every.intersection(*kept.values())) if kept else []
    if len(kept) < 2 or not seeds:
        rates = ", ".join(f"{point.rate:g}" for point in sorted(ends))
        raise UserError(
            f"column learning_rate: arm {PLAIN!r} has the rates {rates}, of which no seed has two or more in common "
            f"with the others; run it at {WANTED_RATES} rates on every seed"
        )
    notes += [
        f"plain at {point.rate:g} was run on few seeds and is left out: {_listed(ends[point])}"
        for point in ends
        if point not in kept
    ]
    lost = {seed: [point.rate for point in kept if seed not in kept[point]] for seed in sorted(every - set(seeds))}
    notes += [
        f"seed {seed} is left out: plain at {missing[0]:g} is missing" for seed, missing in lost.items() if missing
    ]
    if len(kept) < WANTED_RATES:
        notes.append(f"plain was run at {len(kept)} learning rates; {WANTED_RATES} or more are asked for")
    whole = [point for point, have in found.items() if point in kept or (point not in ends and have >= set(seeds))]
    return tuple(sorted(whole, key=lambda p: (p.share, p.steps or 0, p.rate))), seeds


def _arms(table: _Rows, seeds: Sequence[int], notes: list[str]) -> list[tuple[Arm, Key]]:
    """All configurations of all arms at the end of their runs."""
    ends: dict[tuple[str, float, str], int | None] = {}
    for arm, rate, strength, steps in table.by_run:
        if arm not in (PLAIN, BEFORE, *BOUNDS) and rate is not None:
            config = (arm, rate, strength)
            ends[config] = steps if ends.get(config) is None else max(ends[config] or 0, steps or 0)
    made: list[tuple[Arm, Key]] = []
    for (arm, rate, strength), steps in ends.items():
        key: Key = (arm, rate, strength, steps)
        have = table.by_run[key]
        name = _config_name((arm, rate, strength), list(ends))
        alone = sorted(set(have) - set(seeds))
        if alone:
            notes.append(f"{name}: {_listed(alone)} left out, for which plain is not there")
        absent = [seed for seed in seeds if seed not in have]
        if absent:
            notes.append(f"{name}: not run on {_listed(absent)}")
        own = np.array([index for index, seed in enumerate(seeds) if seed in have], dtype=int)
        if not len(own):
            raise UserError(
                f"arm {arm!r}: column seed: none of its seeds has all runs of plain; runs are paired by seed"
            )
        new = np.array([table.new(key, seeds[index]) for index in own])
        beside = _costs(row for rows in have.values() for row in rows) | _worst(table, key)
        if any(name == other.name for other, _ in made):
            raise UserError(f"column arm: {name!r} is the name of an arm and of a configuration of another; rename one")
        made.append((Arm(name, arm, rate, strength, own, new, beside), key))
    return made


def _config_name(config: tuple[str, float, str], configs: Sequence[tuple[str, float, str]]) -> str:
    """The arm's name, with what tells its configurations apart.

    >>> _config_name(("kl", 0.1, "2"), [("kl", 0.1, "1"), ("kl", 0.1, "2")]), _config_name(("ewc", 0.1, "2"), [])
    ('kl, strength 2', 'ewc')
    """
    arm, rate, strength = config
    same = [other for other in configs if other[0] == arm]
    parts = [arm]
    if len({other[1] for other in same}) > 1:
        parts.append(f"rate {rate:.10g}")
    if len({other[2] for other in same}) > 1:
        parts.append(f"strength {strength or 'not given'}")
    return ", ".join(parts)


def _costs(rows: Iterable[Row]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.costs.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(values[name])) for name in COSTS if name in values}


def _worst(table: _Rows, key: Key) -> dict[str, float]:
    """The highest old loss that was measured in the stage, over its tasks of losses, as a mean over seeds."""
    others = [other for other in table.by_run if other[:3] == key[:3]]
    losses = [task for task, measure in table.measures.items() if measure == "loss"]
    if len(others) < 2 or len(losses) != 1:
        return {}
    worst = []
    for seed in table.by_run[key]:
        rows = [table.by_run[other][seed] for other in others if seed in table.by_run[other]]
        worst.append(max(map(_weighted, rows)))
    return {"worst_old": float(np.mean(worst))}


def _weighted(rows: Sequence[Row]) -> float:
    return float(np.average([row.old for row in rows], weights=[row.bytes for row in rows]))


def _bounds(table: _Rows) -> dict[str, tuple[float, dict[str, float]]]:
    made = {}
    for name in BOUNDS:
        rows = [row for row in table.rows if row.arm == name]
        if rows:
            tasks = {
                task: _weighted([row for row in rows if row.task == task])
                for task in dict.fromkeys(row.task for row in rows)
            }
            made[name] = (float(np.mean([row.new for row in rows])), tasks)
    return made


def _base_rate(points: Sequence[PlainPoint], arms: Sequence[Arm]) -> float:
    rates = [point.rate for point in points]
    shared = [arm.rate for arm in arms if arm.rate in rates]
    return max(set(shared), key=lambda rate: (shared.count(rate), rate)) if shared else max(rates)


def _parents(table: _Rows, before: Key, seeds: Sequence[int]) -> int | None:
    """How many parents the seeds have: by name, else by what they begin with."""
    named = {row.parent for row in table.rows if row.parent}
    if named:
        return len(named)
    begun = {tuple((row.task, row.document, row.old, row.new) for row in table.by_run[before][seed]) for seed in seeds}
    return (1 if len(begun) == 1 else len(begun)) if len(seeds) > 1 else None


def _listed(seeds: Iterable[int]) -> str:
    told = sorted(seeds)
    return f"seed{'s' if len(told) > 1 else ''} {', '.join(map(str, told))}"
