"""The runs of a study as a graph in which equal pasts are one node.

Each configuration is resolved to what it does, without JAX. At every boundary of its stages it has a digest of its
past: the plan's own digest of the rows, what else the curriculum did, and the options that steps before it depend on.
Runs with one digest train that past once: the first of them owns it, the others branch from its checkpoint.
Configurations whose whole past is equal are one run.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from omegaconf import OmegaConf

from holdfast.config import Entry, entry_of, merge, schema
from holdfast.data.plan import DataPlan
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.matrix import task_names
from holdfast.studies.study import (
    PLAIN,
    STAGES,
    ArmConfig,
    Choice,
    Study,
    bound_stages,
    configurations,
    early_steps,
    nested,
    scaled_stages,
    slug,
)
from holdfast.training.config import config_classes
from holdfast.training.manifest import METHODS, facts, past_of
from holdfast.training.resolve import ResolvedRun, resolve
from holdfast.types import Json

LAST = "last"


@dataclass(frozen=True)
class Cell:
    """What one row of the results is about: a configuration of an arm with a seed.

    Args:
        weights: which weights are measured: `last`, `ema` or `interpolated` (by the share that is the strength).
    """

    arm: str
    choice: Choice
    seed: int
    weights: str = LAST

    @property
    def name(self) -> str:
        """The folder of its run, unless the run of an equal configuration serves it too.

        >>> Cell("replay 5 %", Choice(0.5), 3).name
        'replay-5-x0.5-s3'
        """
        strength = "" if self.choice.strength is None else f"-{self.choice.strength:g}"
        return f"{slug(self.arm)}-x{self.choice.rate:g}{strength}-s{self.seed}"


@dataclass(frozen=True)
class StudyRun:
    """One run to be trained, with the cells that it serves.

    Args:
        parent: the run whose past it shares; None where it begins at step 0.
        branch_stage: the first stage that it trains itself.
        shared_steps: steps that the parent trains for it.
        total_steps: steps of its whole curriculum.
        digest: of all options that decide its numbers, its seed not counted.
    """

    cell: Cell
    cells: tuple[Cell, ...]
    parent: str | None
    branch_stage: int
    shared_steps: int
    total_steps: int
    digest: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.cell.name

    @property
    def steps(self) -> int:
        """Steps that it trains itself."""
        return self.total_steps - self.shared_steps


@dataclass(frozen=True)
class Configuration:
    """A configuration, resolved: a digest of its past at each boundary, by stage, and of the whole.

    Args:
        starts: first step of every stage, and the number of all steps.
    """

    pasts: tuple[str, ...]
    starts: tuple[int, ...]
    digest: str


class Graph:
    """The configurations of a study, and the runs that they come to.

    Args:
        study: whose arms are resolved when they are first asked for.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self._resolved: dict[tuple[str, Choice], ResolvedRun] = {}
        self._configurations: dict[tuple[str, Choice], Configuration] = {}

    def choices(self, arm: str) -> list[Choice]:
        """The configurations of an arm, of plain or of a bound."""
        config = self.study.config
        if arm == PLAIN:
            return [Choice(rate) for rate in sorted(config.plain.rates, reverse=True)]
        return configurations(config.arms[arm]) if arm in config.arms else [Choice()]

    def weights(self, arm: str) -> str:
        """Which weights of an arm's runs are measured."""
        config = self.study.config
        return config.arms[arm].weights if arm in config.arms else LAST

    @property
    def grids(self) -> list[str]:
        """Arms of which one configuration has to be chosen."""
        return [arm for arm in self.study.config.arms if len(self.choices(arm)) > 1]

    def selection(self) -> list[Cell]:
        """All that is run to choose configurations: plain and the arms with a grid, on the selection seeds."""
        return self._cells([PLAIN, *self.grids] if self.grids else [], self.study.config.selection, {})

    def judging(self, chosen: Mapping[str, Choice]) -> list[Cell]:
        """All that is judged; arms whose configuration is not chosen yet are left out."""
        config = self.study.config
        ready = [arm for arm in config.arms if arm not in self.grids or arm in chosen]
        return self._cells([PLAIN, *ready, *config.bounds], config.judging, chosen)

    def _cells(self, arms: Iterable[str], seeds: Iterable[int], chosen: Mapping[str, Choice]) -> list[Cell]:
        found = [(arm, choice) for arm in arms for choice in ([chosen[arm]] if arm in chosen else self.choices(arm))]
        return [Cell(arm, choice, seed, self.weights(arm)) for seed in seeds for arm, choice in found]

    def runs(self, cells: Iterable[Cell], begun: Mapping[str, int] | None = None) -> list[StudyRun]:
        """The runs that serve some cells, seed by seed, each after the run that it branches from.

        Args:
            begun: runs that are there, with the first stage that each trains itself: later pasts are theirs.
        """
        known = begun or {}
        ordered = sorted(dict.fromkeys(cells), key=lambda cell: known.get(cell.name, len(self.study.stages)))
        owners: dict[tuple[int, str], StudyRun] = {}
        served: dict[tuple[int, str], list[Cell]] = {}
        found: list[StudyRun] = []
        for cell in ordered:
            made = self.configuration(cell.arm, cell.choice)
            served.setdefault((cell.seed, made.digest), []).append(cell)
            if len(served[cell.seed, made.digest]) > 1:
                continue
            run = _branched(cell, made, owners)
            # A run has no checkpoint of what it took over from another.
            for past in made.pasts[known.get(cell.name, run.branch_stage) :]:
                owners.setdefault((cell.seed, past), run)
            found.append(run)
        return [dataclasses.replace(run, cells=tuple(served[run.cell.seed, run.digest])) for run in found]

    def configuration(self, arm: str, choice: Choice) -> Configuration:
        """A configuration's digests; they do not depend on which seed it is run with."""
        key = (arm, choice)
        if key not in self._configurations:
            self._configurations[key] = digests(self.resolved(arm, choice), self.study.config.first_stage)
        return self._configurations[key]

    def resolved(self, arm: str, choice: Choice, seed: int = 0) -> ResolvedRun:
        """The checked run of a configuration with a seed."""
        key = (arm, choice)
        if seed == 0 and key in self._resolved:
            return self._resolved[key]
        run = resolve_cell(self.study, arm, choice, seed)
        if seed == 0:
            self._check_tasks(run)
            self._resolved[key] = run
        return run

    def _check_tasks(self, run: ResolvedRun) -> None:
        """Refuse tasks that no evaluation of the runs has."""
        names = [[each.name for each in run.curriculum.datasets_of(i)] for i in range(len(run.curriculum.stages))]
        tasks = task_names(run.config.evaluations, [*names, run.held_out])
        config = self.study.config
        for path, wanted in (("old", config.old), ("new", config.new_tasks)):
            for index, task in enumerate(wanted):
                if task not in tasks:
                    raise ConfigError(f"{self.study.path}: {path}/{index}", task, f"one of {', '.join(tasks)}")


def _branched(cell: Cell, made: Configuration, owners: Mapping[tuple[int, str], StudyRun]) -> StudyRun:
    """The run of a cell, from the last boundary whose past another run owns."""
    for stage in range(len(made.pasts), 0, -1):
        owner = owners.get((cell.seed, made.pasts[stage - 1]))
        if owner is not None:
            return StudyRun(cell, (), owner.name, stage, made.starts[stage], made.starts[-1], made.digest)
    return StudyRun(cell, (), None, 0, 0, made.starts[-1], made.digest)


def resolve_cell(study: Study, arm: str, choice: Choice, seed: int) -> ResolvedRun:
    """The checked run of an arm, of plain or of a bound; what is wrong is said under the arm's name."""
    config = study.config.arms.get(arm, ArmConfig())
    overrides = [*config.set]
    if config.strength is not None:
        overrides += [f"{path}={choice.strength!r}" for path in config.strength.paths]
    for override in overrides:
        if override.partition("=")[0].strip().replace(".", "/") == "training/seed":
            raise ConfigError(
                f"{study.path}: arms/{arm}/set", override, "no training/seed: the study gives each run its own"
            )
    classes = config_classes(study.job)
    try:
        merged = merge(classes, nested(study.values), overrides)
        if config.weights == "ema" and not merged.training.ema:
            raise ConfigError("weights", "ema", "the average that training/ema keeps", "add training.ema=0.97 to set")
        stages = cast(list[Json], OmegaConf.to_container(merged[STAGES]))
        tokens_per_step = int(merged.training.batch_size) * int(merged.architecture.block_size)
        if arm in study.config.bounds:
            stages = bound_stages(stages, arm, tokens_per_step)
            merged.eval.held_out = [*dict.fromkeys([*merged.eval.held_out, *_datasets(study)])]
        else:
            stages = scaled_stages(stages, study.config.first_stage, choice.rate)
            merged.eval.steps = [*merged.eval.steps, *early_steps(study.config, stages, tokens_per_step)]
        merged[STAGES] = stages
        merged.training.seed = seed
        return resolve(study.job, merged)
    except UserError as error:
        raise UserError(f"{study.path}: {place(study, arm)}: {error}") from None


def place(study: Study, arm: str) -> str:
    """Where an arm stands in the study's file."""
    return f"arms/{arm}" if arm in study.config.arms else arm


def _datasets(study: Study) -> list[str]:
    """All datasets of the base, so that a bound that trains on some of them is measured on all."""
    return [*dict.fromkeys(each["name"] for stage in study.stages for each in stage["data"])]


def digests(run: ResolvedRun, first_stage: int) -> Configuration:
    """A digest of a run's past at every boundary, and of everything.

    What a branch may switch on (methods, adapters, averages) begins where arms begin: at `first_stage`. Before it, it
    is no part of the past.
    """
    options, curriculum = run.options.run, run.curriculum
    plan = DataPlan(curriculum, options.seed_of("data"), mixture_unit=options.mixture_unit)
    starts = tuple(curriculum.stage_start(index) for index in range(len(curriculum.stages)))
    starts = (*starts, curriculum.total_steps)
    entries, flat = schema(*run.classes), run.flat_config()
    pasts = []
    for stage in range(1, len(curriculum.stages)):
        told = {
            path: value
            for path, value in flat.items()
            if _counts(path, entries, run, starts[stage], branched=stage > first_stage)
        }
        told["schedule"] = None if run.options.optim.schedule == "constant" else list(starts)
        pasts.append(_digest({"options": told, **facts(plan, starts[stage])}))
    # Defaults are left out: an option that a later version or a plug-in brings along changes no run.
    defaults = run.flat_defaults()
    everything = {
        path: value
        for path, value in flat.items()
        if _tells(path, entries) != "nothing" and _in_use(path, run) and value != defaults[path]
    }
    everything.pop("training/seed", None)
    return Configuration(tuple(pasts), starts, _digest(everything))


# The plan's digest tells them once data is prepared; here it is not.
PREPARED = ("data/", "tokenizer/")


def _tells(path: str, entries: Mapping[str, Entry]) -> str:
    entry = entry_of(path, entries)
    return "config" if entry is None else entry.tells


def _in_use(path: str, run: ResolvedRun) -> bool:
    """Whether an option is not one of a method that is off: a plug-in that is loaded beside changes no run."""
    return not path.startswith(METHODS) or path.removeprefix(METHODS).split("/")[0] in run.options.run.methods


def _counts(path: str, entries: Mapping[str, Entry], run: ResolvedRun, step: int, *, branched: bool) -> bool:
    """Whether the steps before one depend on an option beside what the plan's digest tells."""
    entry = entry_of(path, entries)
    if path.startswith(METHODS):
        return branched and _in_use(path, run)
    if entry is None or entry.tells == "seed":
        return True
    if entry.resume == "unused":
        return any(each[0] == "stage" and each[2] > 0 for each in past_of(run.curriculum, step))
    if entry.resume == "planned":
        return path.startswith(PREPARED)
    return entry.resume == "fixed" or (entry.resume == "branch" and branched)


def _digest(value: Json) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Cost:
    """What a study trains, and what the same runs would train one by one."""

    runs: int
    steps: int
    alone: int

    @property
    def ideal(self) -> float:
        """Steps with equal pasts trained once, over steps of all runs from scratch."""
        return self.steps / self.alone if self.alone else 1.0


def cost(runs: Iterable[StudyRun]) -> Cost:
    """The steps of some runs.

    >>> cost([])
    Cost(runs=0, steps=0, alone=0)
    """
    listed = list(runs)
    return Cost(len(listed), sum(run.steps for run in listed), sum(run.total_steps for run in listed))
