"""What a study is: one file with a base config, arms, seeds, what is old and what is new.

The file is checked whole before anything is trained, and nothing here imports JAX. `graph.py` makes runs of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from pathlib import Path
from typing import Any, Dict, List, Optional

from holdfast import registry
from holdfast.config import JOB_KEY, flatten, merge, read_yaml, schema
from holdfast.conversion import convert
from holdfast.errors import ConfigError, UserError
from holdfast.execution.names import check_name
from holdfast.studies.results import FEWEST_SELECTION_SEEDS
from holdfast.training.config import config_classes
from holdfast.training.stages import check_equal_lengths
from holdfast.types import Json

PLAIN, BEFORE = "plain", "before"
BOUNDS = ("joint", "single")
RATES = (0.03, 0.1, 0.2, 0.5, 1.0)
STAGES = "stages"


@dataclass(frozen=True)
class SeedsConfig:
    """Seeds that a configuration is chosen on, and others that it is judged on."""

    judging: List[int]
    selection: List[int] = plain_field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.judging:
            raise ConfigError("judging", [], "at least one seed", "3 are the fewest for a verdict, 8 are recommended")
        for name in ("judging", "selection"):
            seeds = getattr(self, name)
            for index, seed in enumerate(seeds):
                if seed < 0 or seed in seeds[:index]:
                    raise ConfigError(f"{name}/{index}", seed, "a number of at least 0 that stands there once")
        for index, seed in enumerate(self.selection):
            if seed in self.judging:
                raise ConfigError(
                    f"selection/{index}", seed, "a seed that is not judged on", "what is chosen on it would flatter"
                )


@dataclass(frozen=True)
class PlainConfig:
    """Plain training as a set: multiples of the learning rate, early stopping, and steps back to the snapshot.

    Args:
        rates: multiples of the learning rate of the later stages; 1 is always among them.
        early: shares of the last stage after which a run is judged as if it had stopped.
        interpolations: shares of the final weights in an interpolation with those of the last boundary.
    """

    rates: List[float] = plain_field(default_factory=lambda: list(RATES))
    early: List[float] = plain_field(default_factory=lambda: [0.5])
    interpolations: List[float] = plain_field(default_factory=lambda: [0.5])

    def __post_init__(self) -> None:
        _check_numbers("rates", self.rates)
        if 1.0 not in self.rates:
            raise ConfigError("rates", self.rates, "1 among the multiples of the learning rate", "add 1")
        for name in ("early", "interpolations"):
            for index, share in enumerate(getattr(self, name)):
                if not 0 < share < 1:
                    raise ConfigError(f"{name}/{index}", share, "a share between 0 and 1")


@dataclass(frozen=True)
class StrengthConfig:
    """The option that says how strongly an arm holds on to the old, or several alike, and the values it takes."""

    path: List[str] | str
    values: List[float]

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("path", self.path, "at least one option")
        _check_numbers("values", self.values)

    @property
    def paths(self) -> list[str]:
        """The options that take each value together."""
        return [self.path] if isinstance(self.path, str) else list(self.path)


@dataclass(frozen=True)
class ArmConfig:
    """One way to keep the old, as overrides of the base config.

    Args:
        set: `path=value`, as on the command line.
        rates: multiples of the learning rate; with `strength` they are a grid, of which the best on the selection
            seeds is judged.
        weights: `last`, `ema` (the average that `training/ema` keeps), or `interpolated` with those that arms begin
            with.
        shares: of the final weights, where they are interpolated; they are the arm's strengths.
    """

    set: List[str] = plain_field(default_factory=list)
    rates: List[float] = plain_field(default_factory=lambda: [1.0])
    strength: Optional[StrengthConfig] = None
    weights: str = "last"
    shares: List[float] = plain_field(default_factory=list)

    def __post_init__(self) -> None:
        _check_numbers("rates", self.rates)
        if self.weights not in ("last", "ema", "interpolated"):
            raise ConfigError("weights", self.weights, "last, ema or interpolated")
        if bool(self.shares) != (self.weights == "interpolated"):
            raise ConfigError("shares", self.shares, "some where weights is interpolated, none otherwise")
        if self.shares and self.strength:
            raise ConfigError("strength", self.strength.paths, "null where shares are given: they are the strengths")
        for index, share in enumerate(self.shares):
            if not 0 < share < 1:
                raise ConfigError(f"shares/{index}", share, "a share between 0 and 1")


@dataclass(frozen=True)
class RelearnConfig:
    """Training on the old data again, from where runs ended, until the old loss is back where arms began.

    Args:
        steps: after which it is given up.
        every: steps between two looks at the old loss.
    """

    steps: int = 60
    every: int = 5

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")


def _check_numbers(name: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(name, [], "at least one number")
    for index, value in enumerate(values):
        if value <= 0 or value in values[:index]:
            raise ConfigError(f"{name}/{index}", value, "a number above 0 that stands there once")


@dataclass(frozen=True)
class StudyConfig:
    """The file of a study.

    Args:
        base: a config file, relative to the study's; `config` is the same inside the study's file, and goes over it.
        arms: by name; in the file also the name of another that holds them, relative to it.
        old: the tasks that the earlier stages taught, to be kept.
        new: the task, or tasks, that the last stage teaches.
        first_stage: the first stage that arms may change; learning rates are scaled from it on.
        bounds: `joint` (all data mixed) and `single` (the new data alone).
        results: a CSV, relative to the study's file, that keeps the results of finished runs: with it, and without
            their folders, they are not run again.
        relearn: measure how soon finished runs have the old loss back.
        drift: measure KL(before ‖ after) of finished runs on held-out new rows.
    """

    old: List[str]
    new: List[str] | str
    seeds: SeedsConfig | List[int]
    arms: Dict[str, ArmConfig]
    name: str = ""
    base: Optional[str] = None
    config: Optional[Dict[str, Any]] = None
    plain: PlainConfig = plain_field(default_factory=PlainConfig)
    first_stage: int = 1
    bounds: List[str] = plain_field(default_factory=list)
    results: Optional[str] = None
    relearn: Optional[RelearnConfig] = None
    drift: bool = False

    def __post_init__(self) -> None:
        if self.base is None and self.config is None:
            raise ConfigError("base", self.base, "a config file, or a section `config`")
        self._check_tasks()
        if self.results is not None and Path(self.results).suffix != ".csv":
            raise ConfigError("results", self.results, "the name of a CSV file, which ends in .csv")
        if self.first_stage < 1:
            raise ConfigError("first_stage", self.first_stage, "at least 1: the first stage is what is shared")
        for index, bound in enumerate(self.bounds):
            if bound not in BOUNDS:
                raise ConfigError(f"bounds/{index}", bound, f"one of {', '.join(BOUNDS)}")
        for arm, config in self.arms.items():
            if arm in (PLAIN, BEFORE, *BOUNDS):
                raise ConfigError(f"arms/{arm}", arm, f"another name: {arm} is what arms are compared with")
            if not slug(arm):
                raise ConfigError(f"arms/{arm}", arm, "a name with letters or digits")
            grid = len(configurations(config))
            if grid > 1 and not self.selection:
                raise ConfigError(
                    f"arms/{arm}",
                    f"{grid} configurations",
                    "one, because there are no selection seeds to choose on",
                    "give seeds as {selection: [...], judging: [...]}",
                )
            if grid > 1 and len(self.selection) < FEWEST_SELECTION_SEEDS:
                raise ConfigError(
                    "seeds/selection", self.selection, f"{FEWEST_SELECTION_SEEDS} seeds or more to choose on", "add one"
                )
        slugs = [slug(arm) for arm in self.arms]
        for arm in self.arms:
            if slugs.count(slug(arm)) > 1:
                raise ConfigError(f"arms/{arm}", arm, "names that differ in letters or digits")

    def _check_tasks(self) -> None:
        for name, tasks in (("old", self.old), ("new", self.new_tasks)):
            if not tasks:
                raise ConfigError(name, [], f"at least one task that is to be {'kept' if name == 'old' else 'learned'}")
            for index, task in enumerate(tasks):
                others = [*tasks[:index], *(self.old if name == "new" else [])]
                if task in others:
                    raise ConfigError(f"{name}/{index}", task, "a task that is named once, as old or as new")

    @property
    def judging(self) -> list[int]:
        """Seeds that arms are judged on."""
        return self.seeds.judging if isinstance(self.seeds, SeedsConfig) else list(self.seeds)

    @property
    def selection(self) -> list[int]:
        """Seeds that an arm's configuration is chosen on."""
        return self.seeds.selection if isinstance(self.seeds, SeedsConfig) else []

    @property
    def new_tasks(self) -> list[str]:
        """The tasks of the new data."""
        return [self.new] if isinstance(self.new, str) else list(self.new)


@dataclass(frozen=True)
class Choice:
    """One configuration of an arm: a multiple of the learning rate, and a strength where the arm has one."""

    rate: float = 1.0
    strength: float | None = None


def configurations(arm: ArmConfig) -> list[Choice]:
    """The grid of an arm: rates times strengths.

    >>> [choice.strength for choice in configurations(ArmConfig(strength=StrengthConfig("stages.1.beta", [0.1, 1.0])))]
    [0.1, 1.0]
    """
    strengths: Sequence[float | None] = arm.shares or (arm.strength.values if arm.strength else [None])
    return [Choice(rate, strength) for rate in arm.rates for strength in strengths]


def slug(name: str) -> str:
    """A name as a part of a folder's name.

    >>> slug("KL on 25 % old rows")
    'KL-on-25-old-rows'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")


@dataclass(frozen=True)
class Study:
    """A checked study with its base config, whose curriculum is written as `stages`.

    Args:
        path: its file.
        job: the job of all runs.
        values: all options of the base, by path.
    """

    path: Path
    config: StudyConfig
    job: str
    values: Json

    @property
    def name(self) -> str:
        """The folder of its runs."""
        return self.config.name or self.path.stem

    @property
    def stages(self) -> list[Json]:
        """The base's stages."""
        return list(self.values[STAGES])

    def folder(self, out: Path) -> Path:
        """Where its runs and its results are."""
        return out / "study" / self.name


def read_study(path: Path) -> Study:
    """Read and check the file of a study."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected the YAML file of a study")
    values = read_yaml(path)
    if isinstance(values.get("arms"), str):
        values["arms"] = _beside(path, "arms", values["arms"])
    try:
        seeds = values.get("seeds")
        if isinstance(seeds, list | dict):  # of the two that it may be, the one that it is says what is wrong
            convert(seeds if isinstance(seeds, dict) else {"judging": seeds}, SeedsConfig, f"{path}/seeds")
        config = convert(values, StudyConfig, str(path))
    except ConfigError as error:
        shown = error.path.removeprefix(str(path)).removeprefix("/")
        at = f"{path}: {shown}" if shown else str(path)
        raise ConfigError(at, error.value, error.expected, error.fix) from None
    except UserError as error:  # a key that nobody knows
        raise UserError(f"{path}: {str(error).replace(f'{path}/', '')}") from None
    check_name(config.name or path.stem, f"{path}: name")
    base = _beside(path, "base", config.base) if config.base is not None else {}
    base = overlaid(base, config.config or {})
    job = base.pop(JOB_KEY, None)
    if not isinstance(job, str):
        raise UserError(f"{path}: {JOB_KEY}: expected the name of a job: {', '.join(registry.jobs.names())}")
    if job not in registry.jobs:
        registry.jobs.get(job, path=f"{path}: {JOB_KEY}")  # raises, with the nearest name
    try:
        made = Study(path, config, job, as_stages(job, base))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if len(made.stages) <= config.first_stage:
        raise ConfigError(
            f"{path}: first_stage", config.first_stage, f"the index of a later stage: there are {len(made.stages)}"
        )
    return made


def _beside(path: Path, key: str, name: str) -> Json:
    """The mapping in a file that a study names, relative to its own."""
    if not (path.parent / name).is_file():
        raise ConfigError(
            f"{path}: {key}", name, "a file, relative to the study's", f"there is no {path.parent / name}"
        )
    return read_yaml(path.parent / name)


def overlaid(base: Json, over: Json) -> Json:
    """A config with another's sections over its own.

    >>> overlaid({"training": {"seed": 1, "ema": 0.5}}, {"training": {"seed": 2}})
    {'training': {'seed': 2, 'ema': 0.5}}
    """
    made = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        made[key] = overlaid(base[key], value) if both else value
    return made


def as_stages(job: str, values: Json) -> Json:
    """All options of a config by path, a curriculum in parallel lists written as `stages`."""
    classes = config_classes(job)
    entries = schema(*classes)
    if STAGES not in entries:
        raise UserError(f"{JOB_KEY}: {job} has no stages, and a study needs an old one and a new one")
    flat = flatten(merge(classes, values), classes)
    if not flat[STAGES]:
        flat[STAGES] = stages_of_lists(flat)
    return {path: value for path, value in flat.items() if entries[path].replaced_by != STAGES}


def stages_of_lists(flat: Json) -> list[Json]:
    """The spec's parallel lists as stages.

    >>> stages_of_lists({"training/tokens": [8, 4], "training/dataset": [[], []], "optimization/kl/beta": 0.5})[1]
    {'tokens': 4, 'data': [], 'beta': 0.5, 'update_reference': True}
    """
    tokens, data = flat["training/tokens"], flat["training/dataset"]
    betas = flat.get("optimization/kl/betas") or [0.0] * (len(tokens) - 1) + [flat.get("optimization/kl/beta", 0.0)]
    taken = flat.get("optimization/kl/reference_update_stages", [1])
    check_equal_lengths(tokens, data, betas)
    return [
        {"tokens": count, "data": mixture, "beta": beta, "update_reference": index in taken and any(betas)}
        for index, (count, mixture, beta) in enumerate(zip(tokens, data, betas, strict=True))
    ]


def nested(flat: Json) -> Json:
    """Options by path as the sections of a config."""
    tree: Json = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


def scaled_stages(stages: Sequence[Json], first: int, rate: float) -> list[Json]:
    """Stages whose learning rate is multiplied from one on."""
    return [
        {**stage, "lr": round(stage.get("lr", 1.0) * rate, 12)} if index >= first and rate != 1 else dict(stage)
        for index, stage in enumerate(stages)
    ]


def bound_stages(stages: Sequence[Json], bound: str, tokens_per_step: int) -> list[Json]:
    """The stages of a bound: all data mixed in every stage, or the last stage's data alone, without penalties."""
    plain = [{key: value for key, value in stage.items() if key in ("name", "tokens", "data")} for stage in stages]
    if bound == "single":
        # A curriculum has two stages at least: the last one's, in two halves.
        steps = plain[-1]["tokens"] // tokens_per_step
        if steps < 2:
            raise ConfigError("bounds", bound, "a last stage of at least 2 steps")
        halves = (steps // 2, steps - steps // 2)
        return [{"tokens": half * tokens_per_step, "data": plain[-1]["data"]} for half in halves]
    shares: dict[tuple[str, str], float] = {}
    total = sum(stage["tokens"] for stage in plain)
    for stage in plain:
        for each in stage["data"]:
            key = (each["name"], str(each.get("style", "PMD")))
            shares[key] = shares.get(key, 0.0) + each.get("rate", 1.0) * stage["tokens"] / total
    whole = sum(shares.values())
    data = [{"name": name, "style": style, "rate": share / whole} for (name, style), share in shares.items()]
    return [{**stage, "data": data} for stage in plain]


def early_steps(config: StudyConfig, stages: Sequence[Json], tokens_per_step: int) -> list[int]:
    """Steps after which runs are measured before their end, by the shares of `plain/early`.

    >>> given = StudyConfig(["a"], "b", [0], {}, base="x.yaml", plain=PlainConfig(early=[0.25, 0.5]))
    >>> early_steps(given, [{"tokens": 80}, {"tokens": 40}], 10)
    [9, 10]
    """
    tokens = [stage["tokens"] for stage in stages]
    start, end = -(-sum(tokens[: config.first_stage]) // tokens_per_step), sum(tokens) // tokens_per_step
    found = {start + round(share * (end - start)) for share in config.plain.early}
    return sorted(step for step in found if start < step < end)
