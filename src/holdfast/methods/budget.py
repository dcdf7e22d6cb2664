"""A budget in the user's unit: `keep: {tinystories: 0.05}`, its options and where it makes sense. No JAX here.

At the end the loss of a source may be at most so many bits per byte above what it was when its own stage ended. It is a
constraint, not a weight: `controller.py` moves the weight of old rows so that it holds.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict

from holdfast.config import field
from holdfast.curriculum import Budget, Curriculum
from holdfast.data.sampling import SELF, SourceKey
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.data.plan import DataPlan

CERTIFY = "certify"  # the one key of the section that is no dataset
LEAST_CONTROL = 64  # control rows that a stage must have, drawn and different ones


@dataclass(frozen=True)
class KeepConfig:
    """How much of what may be forgotten."""

    keep: Dict[str, float | bool] = field(
        "keep",
        resume="unused",
        default_factory=dict,
        help="NAME: bits per byte that its loss may rise once it is old; certify: true steps back to what is proved",
        gt=0,
        le=100,
    )

    def __post_init__(self) -> None:
        for name, value in self.keep.items():
            if name == CERTIFY and not isinstance(value, bool):
                raise ConfigError(f"keep/{CERTIFY}", value, "true or false", "no dataset of this name can be kept")
            if name != CERTIFY and isinstance(value, bool):
                raise ConfigError(f"keep/{name}", value, "a number of bits per byte", f"write keep/{name}: 0.05")

    @property
    def limits(self) -> dict[str, float]:
        """Bits per byte by name, in the order given."""
        return {name: float(value) for name, value in self.keep.items() if name != CERTIFY}

    @property
    def certify(self) -> bool:
        """Whether weights step back towards the snapshot as far as the certificate says."""
        return bool(self.keep.get(CERTIFY, False))


def with_budgets(curriculum: Curriculum, keep: KeepConfig, options: Any) -> Curriculum:
    """A curriculum with budgets, which takes a snapshot where each of them begins.

    Args:
        options: of the run, a `holdfast.training.config.RunOptions`.
    """
    if keep.certify and not keep.limits:
        raise ConfigError("keep/certify", True, "a budget to certify", "name a dataset: keep/NAME: bits per byte")
    if not keep.limits:
        return curriculum
    budgets = tuple(_budget(name, limit, curriculum, keep, options) for name, limit in keep.limits.items())
    kept = dataclasses.replace(curriculum, budgets=budgets)
    for budget in budgets:
        _check_stages(budget, kept, options)
    _check_options(kept, keep, options)
    made = list(kept.stages)
    for index in range(len(made)):
        begins = any(budget.since == index for budget in budgets)
        # Rows of `self` are sampled anew in every stage, and drift is from the model that they are samples of.
        renewed = any(kept.is_sampled(budget.name) and budget.since <= index for budget in budgets)
        if begins or renewed:
            made[index] = dataclasses.replace(made[index], update_reference=True)
    first = min(budget.since for budget in budgets)
    looking = {*kept.referenced, *range(first, len(made))}
    return dataclasses.replace(kept, stages=tuple(made), referenced=tuple(sorted(looking)))


def _budget(name: str, limit: float, curriculum: Curriculum, keep: KeepConfig, options: Any) -> Budget:
    """The budget of a name: from when on it holds."""
    path, count = f"keep/{name}", len(curriculum.stages)
    known = {source.name: _since(source, curriculum, keep, options) for source in curriculum.sources}
    drawn = [{s.name for s in stage.mixture if s.rate > 0} for stage in curriculum.stages]
    old = [each for each, since in known.items() if any(each in drawn[stage] for stage in range(since, count))]
    if not old:
        raise ConfigError(
            path,
            limit,
            "old rows, and this run has none: a budget is steered by rows of what is to be kept",
            "mix the old data into later stages (training/replay: {rate: 0.25}), or without old data let the model "
            "replay its own samples (training/replay: {source: self, rate: 0.25} and keep/self)",
        )
    if name not in old:
        what = "is never drawn once it is old" if name in known else "is none"
        expected = f"an old source of a stage ({', '.join(old)}); {name} {what}"
        raise ConfigError(path, limit, expected, _mended(name, known.get(name, count) < count))
    styles = [source.style.name for source in curriculum.sources if source.name == name]
    if len(styles) > 1:
        raise ConfigError(path, limit, f"a dataset in one style; {name} has {' and '.join(styles)}")
    return Budget(name, limit, known[name])


def _mended(name: str, could_be: bool) -> str:
    """What to do about a name that is never old, but could be."""
    if name == SELF.name:
        return "set training/replay: {source: self, rate: 0.25}"
    return f"replay it (training/replay: {{rate: 0.25, from: [{name}]}}) or name one" if could_be else "name one"


def _since(source: SourceKey, curriculum: Curriculum, keep: KeepConfig, options: Any) -> int:
    """The first stage in which a source is old: after its own, or from the first on where a model brings it along."""
    if curriculum.is_sampled(source.name):
        return next(
            index for index, stage in enumerate(curriculum.stages) if any(s.name == source.name for s in stage.mixture)
        )
    home = curriculum.home(source)
    beside = [s.name for s in curriculum.datasets_of(0) if s.name not in keep.limits]
    brought = options.architecture.source is not None and source.name in keep.limits and bool(beside)
    return 0 if brought and home == 0 else home + 1


def _check_stages(budget: Budget, curriculum: Curriculum, options: Any) -> None:
    """Refuse stages in which a budget could not be steered."""
    replay, penalty = options.stages.replay, options.penalty
    objective = replay.objective if replay else "both"
    for index in range(budget.since, len(curriculum.stages)):
        stage = curriculum.stages[index]
        if not any(s.name == budget.name and s.rate > 0 for s in stage.mixture):
            raise ConfigError(
                f"keep/{budget.name}",
                budget.limit,
                f"old rows of {budget.name} in every stage from {budget.since} on; stage {index} has none",
                f"replay it there (training/replay, or {curriculum.spelling.data.format(index)})",
            )
        if stage.beta > 0 and not (penalty.on == "batch" and objective == "ce"):
            raise ConfigError(
                curriculum.spelling.beta.format(index),
                stage.beta,
                "0 beside keep, whose multiplier takes the place of beta on old rows",
                "set it to 0, or let the anchor see new rows alone (optimization/kl/on: batch and "
                "training/replay/objective: ce)",
            )


def _check_options(curriculum: Curriculum, keep: KeepConfig, options: Any) -> None:
    """Refuse other options that keep what a budget needs from happening."""
    penalty, replay = options.penalty, options.stages.replay
    if penalty.reference_from is not None:
        raise ConfigError(
            "optimization/kl/reference_from",
            penalty.reference_from,
            "null beside keep, which counts from this run's own snapshot",
        )
    if penalty.reference_at != "boundary":
        raise ConfigError(
            "optimization/kl/reference_at", penalty.reference_at, "boundary beside keep, which counts from there"
        )
    if "agem" in options.run.methods:
        index = list(options.run.methods).index("agem")
        raise ConfigError(f"training/methods/{index}", "agem", "no agem beside keep: it takes old rows out of the loss")
    if options.architecture.dropout:
        raise ConfigError(
            "architecture/dropout",
            options.architecture.dropout,
            "0 beside keep: control rows would be measured under dropout, which looks like a loss",
        )
    if keep.certify and options.optim.lora.rank:
        raise ConfigError(
            "keep/certify",
            True,
            "false with adapters: a step back to merged weights is no adapter",
            "set optimization/lora/rank to 0, or keep/certify to false",
        )
    if replay is not None and replay.objective == "kl":
        for index, stage in enumerate(curriculum.stages):
            held = {budget.name for budget in curriculum.budgets_in(index)}
            for s in stage.mixture:
                if curriculum.is_old(SourceKey(s.name, s.style), index) and s.name not in held and stage.beta == 0:
                    raise ConfigError(
                        "training/replay/objective",
                        "kl",
                        f"ce or both: {s.name} is old in stage {index} and has neither a budget nor a penalty",
                        f"give it a budget (keep/{s.name})",
                    )


def check_control(plan: "DataPlan") -> None:
    """Refuse a budget that too few control rows would steer; `plan` and `run` ask."""
    for each in control_facts(plan):
        reason = fix = ""
        if each["drawn"] < LEAST_CONTROL:
            reason = (
                f"stage {each['stage']} draws {each['drawn']}, a tenth of its {each['old_rows']} old rows outside fades"
            )
            fix = "raise training/replay/rate or the stage's tokens"
        elif each["different"] is not None and each["different"] < LEAST_CONTROL:
            reason = f"stage {each['stage']} has {each['different']}, half of its rows"
            source = next(source for source in plan.sources if source.name == each["name"])
            limited = plan.curriculum.is_sampled(source.name) or plan.control.from_memory(source)
            fix = "give it more rows (training/replay/rows)" if limited else "give it more data"
        if reason:
            expected = f"at least {LEAST_CONTROL} control rows of {each['name']} in a stage; {reason}"
            raise ConfigError(f"keep/{each['name']}", each["limit"], expected, fix)


def control_facts(plan: "DataPlan") -> list[dict[str, Any]]:
    """What every stage has of every budget: old rows, control rows drawn, and different ones where data is known."""
    curriculum, found = plan.curriculum, []
    for budget in curriculum.budgets:
        source = next(source for source in curriculum.sources if source.name == budget.name)
        for stage in range(budget.since, len(curriculum.stages)):
            ends = (curriculum.stage_end(stage), curriculum.stage_start(stage))
            after, before = (plan.drawn_before(at)[source] for at in ends)
            known = plan.sizes is not None or curriculum.is_sampled(budget.name) or plan.control.from_memory(source)
            found.append(
                {
                    "name": budget.name,
                    "limit": budget.limit,
                    "stage": stage,
                    "old_rows": after - before,
                    "drawn": plan.control.drawn(source, stage),
                    "different": plan.control.size(source, stage) if known else None,
                }
            )
    return found
