"""Runs beside each other: seeds of the same config, what became of each task in them, what can be called better."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config import Entry, Tells, entry_of
from holdfast.errors import UserError
from holdfast.evaluation.matrix import Cell, Interval
from holdfast.evaluation.statistics import Difference
from holdfast.models.family import described_spec
from holdfast.report.drawing.chart import number
from holdfast.report.drawing.heat import column_order
from holdfast.report.export import metrics_of
from holdfast.report.pictures.axis import told
from holdfast.report.run_files import Run
from holdfast.report.verdicts import UNITS, Verdict, verdicts
from holdfast.training.config import option_entries
from holdfast.types import Json, JsonView

# Of an average of checkpoints, which is no option: what says which one of a pair it is, and where the pair lies.
AVERAGE: dict[str, Tells] = {
    "average/alpha": "seed",
    "average/inputs": "nothing",
    "average/first_run": "nothing",
    "average/second_run": "nothing",
}

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Runs of one config that differ in their seed alone."""

    name: str
    runs: tuple[Run, ...]
    warnings: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[Run, ...]:
        """The runs that count: the finished ones, or all while none is."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    def values(self, measure: str, metric: str) -> dict[Any, float]:
        """A metric by seed."""
        found = {run.seed: metrics_of(run, measure).get(metric) for run in self.judged}
        return {seed: value for seed, value in found.items() if value is not None}


KEPT = frozenset({"learned", "known before"})
FORGOTTEN, NOT_LEARNED = "forgotten", "not learned"


@dataclass(frozen=True)
class Outcome:
    """What became of one task in one group, in the unit and direction of the task's own measure.

    Args:
        before, after, now: mean scores over seeds before its stage, after it, and at the latest evaluation.
        spread: standard deviation of `now` over seeds; None for one seed.
        change: from its own stage to now; None where nothing came after its stage.
        interval: 95 % of the change, over seeds where there are several, else paired over what was evaluated.
        over: what the interval is over.
        words: the verdict of each seed.
    """

    task: str
    measure: str
    before: Cell
    after: Cell
    now: Cell
    spread: float | None
    change: Cell
    interval: Interval | None
    over: str
    words: tuple[str, ...]

    @property
    def forgotten(self) -> bool:
        """Whether most seeds forgot it."""
        return 2 * sum(FORGOTTEN in word for word in self.words) > len(self.words)

    @property
    def kept(self) -> bool:
        """Whether something came after its stage and every seed still had it."""
        return self.change is not None and all(word in KEPT for word in self.words)

    @property
    def told(self) -> str:
        """The verdict in words, with the number of seeds where they differ."""
        shown = ["kept" if self.change is not None and word in KEPT else word for word in self.words]
        if len(set(shown)) == 1:
            return shown[0]
        word = FORGOTTEN if any(FORGOTTEN in each for each in shown) else shown[0]
        return f"{word} in {sum(word in each for each in shown)} of {len(shown)} seeds"

    @property
    def missed(self) -> bool:
        """Whether no seed learned it."""
        return all(word == NOT_LEARNED for word in self.words)

    def figures(self, *, unit: bool = False) -> str:
        """Where it ended, in its unit if asked for."""
        score, name = number(self.now, 3), UNITS[self.measure]
        return score if not unit else f"{name} {score}" if self.measure == "accuracy" else f"{score} {name}"

    def since(self, text: str = "") -> str:
        """What it was after its own stage, in brackets; nothing where that is now."""
        return "" if self.change is None else f" ({number(self.after, 3)}{text})"


def outcomes(group: Group) -> dict[str, Outcome]:
    """What became of every task that all seeds of a group have, in order of their stages."""
    found: dict[str, dict[Any, Verdict]] = {}
    for run in group.judged:
        order = [run.matrix.tasks[column] for column in column_order(run.matrix)] if run.matrix is not None else []
        for verdict in sorted(verdicts(run), key=lambda each: order.index(each.task)):
            found.setdefault(verdict.task, {})[run.seed] = verdict
    whole = {task: by_seed for task, by_seed in found.items() if len(by_seed) == len(group.judged)}
    return {
        task: _outcome(by_seed) for task, by_seed in whole.items() if len({v.measure for v in by_seed.values()}) == 1
    }


def _outcome(by_seed: Mapping[Any, Verdict]) -> Outcome:
    seeds = list(by_seed.values())
    first = seeds[0]
    before, after, now = (_mean([getattr(each, name) for each in seeds]) for name in ("before", "after", "now"))
    change, interval = first.change, first.interval
    over = f"{first.num} {first.unit}" if interval is not None else ""
    spread = None
    if len(seeds) > 1:
        _, spread = mean_and_spread([each.now or 0.0 for each in seeds]) if now is not None else (None, None)
        known = {seed: each.change for seed, each in by_seed.items() if each.change is not None}
        difference = seed_difference(dict.fromkeys(known, 0.0), known) if len(known) == len(seeds) else None
        change = difference.mean if difference is not None else None
        interval = (difference.low, difference.high) if difference is not None else None
        over = f"{len(seeds)} seeds"
    words = tuple(_word(each) for each in seeds)
    return Outcome(first.task, first.measure, before, after, now, spread, change, interval, over, words)


def _word(verdict: Verdict) -> str:
    known = verdict.own == "known before" and verdict.word == FORGOTTEN
    return f"known before, {FORGOTTEN}" if known else verdict.word


def _mean(values: Sequence[Cell]) -> Cell:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def pair_sentence(first: Group, second: Group, most: int = 5) -> str:
    """What two groups kept and lost, in one sentence: first in words, then where each task ended in its own unit."""
    one, two = outcomes(first), outcomes(second)
    shared = {
        task: (one[task], two[task])
        for task in one
        if task in two and one[task].measure == two[task].measure and None not in (one[task].after, two[task].after)
    }
    if not shared:
        return f"{first.name} and {second.name} have no task in common that both have evaluated after its stage."
    one_name, two_name = (re.sub(r" \(\d+ seeds\)$", "", group.name) for group in (first, second))
    if one_name == two_name:
        one_name, two_name = first.name, second.name
    words = _kept_and_lost(one_name, two_name, shared)
    places = []
    for index, (task, (a, b)) in enumerate(list(shared.items())[:most]):
        if index == 0:
            ends = f"{a.figures(unit=True)} with {one_name}{a.since(' after its stage')}"
            places.append(f"{task} ended at {ends} and {b.figures()} with {two_name}{b.since()}")
        else:
            places.append(f"{task} at {a.figures(unit=True)}{a.since()} and {b.figures()}{b.since()}")
    if len(shared) > most:
        places.append(f"{len(shared) - most} more are in the table")
    # A sentence begins with a capital, but for the name of a run, which stays as it is.
    head = words[0].upper() + words[1:] if words.startswith(("both ", "neither ")) else words
    return f"{head}: {', '.join(places)}." if words else f"{', '.join(places)}."


def _kept_and_lost(first: str, second: str, shared: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """Which tasks one kept and the other forgot, and which fared alike."""
    parts = []
    for keeper, other, sides in ((second, first, (1, 0)), (first, second, (0, 1))):
        saved = [task for task, pair in shared.items() if pair[sides[0]].kept and pair[sides[1]].forgotten]
        if saved:
            parts.append(f"{keeper} kept {told(saved)}, which {other} forgot")
    lost = [
        f"{task} (by {number(abs(a.change or 0.0), 3)} and {number(abs(b.change or 0.0), 3)})"
        for task, (a, b) in shared.items()
        if a.forgotten and b.forgotten
    ]
    kept = [task for task, (a, b) in shared.items() if a.kept and b.kept]
    missed = [task for task, (a, b) in shared.items() if a.missed and b.missed]
    parts += [f"both forgot {told(lost)}"] if lost else []
    parts += [f"both kept {told(kept)}"] if kept else []
    parts += [f"neither learned {told(missed)}"] if missed else []
    for name, side in ((first, 0), (second, 1)):
        alone = [task for task, pair in shared.items() if pair[side].missed and not pair[1 - side].missed]
        parts += [f"{name} did not learn {told(alone)}"] if alone else []
    return "; ".join(parts)


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run that no other has: its own, with folders before it where needed."""
    names = [run.name for run in runs]
    depth = 1
    while len(set(names)) < len(names) and depth < 12:
        depth += 1
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
    return names


def compared(run: Run) -> Json:
    """The options that make a run what it is, seeds and logging left out."""
    entries = option_entries(run.job)
    kept = {path: value for path, value in run.flat.items() if tells(path, entries) == "config"}
    return {"job": run.job, **kept}


def tells(path: str, entries: Mapping[str, Entry]) -> Tells:
    """What another value of an option makes of a run: another config, another seed of one, or nothing else."""
    entry = entry_of(path, entries)
    return AVERAGE.get(path, "config") if entry is None else entry.tells


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Options that are not the same in all runs: path -> value of each, None where a run has none; seeds included."""
    flats = [{"job": run.job, **_deep(run.flat)} for run in runs]
    paths = dict.fromkeys(path for flat in flats for path in flat)
    entries = {path: entry for run in runs for path, entry in option_entries(run.job).items()}
    return {
        path: [flat.get(path) for flat in flats]
        for path in paths
        if tells(path, entries) != "nothing" and len({json.dumps(flat.get(path), default=str) for flat in flats}) > 1
    }


def _deep(values: JsonView) -> Json:
    """Lists of mappings taken apart too, so that a stage's own option shows and not the whole curriculum."""
    found: Json = {}
    for path, value in values.items():
        if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            found |= _deep({f"{path}/{index}": item for index, item in enumerate(value)})
        elif isinstance(value, Mapping) and value:
            found |= _deep({f"{path}/{name}": item for name, item in value.items()})
        else:
            found[path] = value
    return found


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs by config; two runs of one config and one seed stay apart."""
    names = run_names(runs)
    by_key: dict[tuple[str, int], list[tuple[str, Run]]] = {}
    for name, run in zip(names, runs, strict=True):
        key, copy = json.dumps(compared(run), sort_keys=True, default=str), 0
        while any(other.seed == run.seed for _, other in by_key.get((key, copy), [])):
            copy += 1
        by_key.setdefault((key, copy), []).append((name, run))
    groups = [
        Group(
            members[0][0] if len(members) == 1 else common_name([name for name, _ in members]),
            tuple(r for _, r in members),
        )
        for members in by_key.values()
    ]
    return [Group(group.name, group.runs, tuple(told)) for group, told in zip(groups, unequal(groups), strict=True)]


def common_name(names: Sequence[str]) -> str:
    """A name for seeds: what their names have in common.

    >>> common_name(["plain-s0", "plain-s1"]), common_name(["a", "b"])
    ('plain (2 seeds)', 'a … (2 seeds)')
    """
    length = 0
    while all(len(name) > length for name in names) and len({name[length] for name in names}) == 1:
        length += 1
    head = names[0][:length].rstrip("-_/. s") or f"{names[0]} …"
    return f"{head} ({len(names)} seeds)"


def unequal(groups: Sequence[Group]) -> list[list[str]]:
    """For each group why it should not be judged beside the others as it is: other data, compute, or unfinished."""
    told: list[list[str]] = [[] for _ in groups]
    news = [new_tokens(group.runs[0]) for group in groups]
    costs = [compute(group.runs[0]) for group in groups]
    for values, text in ((news, "new-data tokens"), (costs, "compute")):
        known = [value for value in values if value is not None]
        usual = max(set(known), key=known.count, default=None)
        for index, value in enumerate(values):
            if usual and value is not None and not math.isclose(value, usual, rel_tol=0.02):
                told[index].append(f"{value / usual:.2f}x the {text}")
    for index, group in enumerate(groups):
        if not all(run.finished for run in group.runs):
            told[index].append("unfinished")
    return told


def new_tokens(run: Run) -> float | None:
    """Tokens of datasets that the first stage does not have, as the curriculum drew them so far."""
    curriculum = run.timeline.curriculum
    if curriculum is None:
        return None
    old = {source.name for source in curriculum.sources if curriculum.is_old(source, 1)}
    done = run.step if not run.finished else curriculum.total_steps
    total = 0.0
    for start, end, constant in curriculum.segments():
        for step in (start,) if constant else range(start, min(end, done)):
            steps = max(0, min(end, done) - start) if constant else 1
            total += steps * sum(w for source, w in curriculum.weights_at(step).items() if source.name not in old)
    return total * curriculum.tokens_per_step


def compute(run: Run) -> float | None:
    """Floating point operations so far; a stage with a penalty also reads with the reference."""
    curriculum, model = run.timeline.curriculum, run.model
    if curriculum is None or not model:
        return None
    try:
        spec = described_spec(model)
        if spec is None:
            return None
        forward, both = spec.flops_per_token(backward=False), spec.flops_per_token()
    except (TypeError, ValueError, ZeroDivisionError, AssertionError, UserError):
        return None  # of another version, or of none
    done = curriculum.total_steps if run.finished else run.step
    total = 0.0
    for index, stage in enumerate(curriculum.stages):
        steps = max(0, min(curriculum.stage_end(index), done) - curriculum.stage_start(index))
        total += steps * (both + (forward if stage.beta > 0 else 0.0))
    return total * curriculum.tokens_per_step


def seed_difference(first: Mapping[Any, float], second: Mapping[Any, float]) -> Difference | None:
    """The mean of second - first over the seeds that both have, with Student's interval; None below two seeds.

    The bootstrap that serves for hundreds of examples is far too narrow for a handful of seeds.

    >>> seed_difference({0: 1.0, 1: 1.2, 2: 1.1}, {0: 2.0, 1: 2.2, 2: 2.1}).real
    True
    >>> seed_difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 2.1}).real
    False
    """
    changes = [second[seed] - first[seed] for seed in first if seed in second]
    count = len(changes)
    if count < 2:
        return None
    mean = math.fsum(changes) / count
    spread = math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (count - 1))
    half = _T95[min(count - 1, len(_T95)) - 1] * spread / math.sqrt(count)
    return Difference(mean, mean - half, mean + half)


# Of scores where higher is better; of forgetting less is better.
LESS_IS_BETTER = frozenset({"forgetting"})


def best_group(groups: Sequence[Group], measure: str, metric: str) -> int | None:
    """The group that is surely better than every other one over paired seeds, if there is one."""
    sign = -1.0 if metric in LESS_IS_BETTER else 1.0
    values = [group.values(measure, metric) for group in groups]
    means = [sign * math.fsum(each.values()) / len(each) if each else -math.inf for each in values]
    if len(groups) < 2 or max(means) == -math.inf:
        return None
    best = means.index(max(means))
    for index, other in enumerate(values):
        if index == best or not other:
            continue
        difference = seed_difference(other, values[best])
        if difference is None or not difference.real:
            return None
    return best if sum(bool(each) for each in values) > 1 else None


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation over seeds where there are several.

    >>> mean_and_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, spread if spread > 1e-12 * abs(mean) else 0.0  # equal values, but for rounding
