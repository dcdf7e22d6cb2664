"""Runs beside each other: which are seeds of the same config, what differs, and what can be called better."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.evaluation.statistics import Difference
from holdfast.models.config import ModelSpec
from holdfast.report.export import metrics_of
from holdfast.report.run_files import Run

# What may differ between seeds of one config: the seeds, and what never touches training.
SEEDS = (
    "training/seed", "training/seed_init", "training/seed_data", "training/seed_dropout", "average/alpha",
)  # fmt: skip
APART = (
    "logging/", "data/cache", "data/root", "data/workers", "training/prefetch",
    "average/inputs", "average/first_run", "average/second_run",
)  # fmt: skip

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


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run that no other has: its own, with folders before it where needed."""
    names = [run.name for run in runs]
    depth = 1
    while len(set(names)) < len(names) and depth < 12:
        depth += 1
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
    return names


def compared(run: Run) -> dict[str, Any]:
    """The options that make a run what it is, seeds and logging left out."""
    kept = {path: value for path, value in run.flat.items() if path not in SEEDS and not path.startswith(APART)}
    return {"job": run.job, **kept}


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Options that are not the same in all runs: path -> value of each, None where a run has none; seeds included."""
    flats = [{"job": run.job, **_deep(run.flat)} for run in runs]
    paths = dict.fromkeys(path for flat in flats for path in flat)
    return {
        path: [flat.get(path) for flat in flats]
        for path in paths
        if not path.startswith(APART) and len({json.dumps(flat.get(path), default=str) for flat in flats}) > 1
    }


def _deep(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of mappings taken apart too, so that a stage's own option shows and not the whole curriculum."""
    found: dict[str, Any] = {}
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
    old = {sampling.name for sampling in curriculum.stages[0].mixture}
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
        spec = ModelSpec(**model)
    except TypeError:
        return None  # of another version
    forward, both = spec.flops_per_token(backward=False), spec.flops_per_token()
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
