"""Forecasts of a run: where the losses of its stage will end, from what its files tell so far.

Probes look at fewer rows than full evaluations, and at the first of the same: a change is taken over the rows that
all measurements have. What full evaluations saw of the same steps says how far the two differ. Nothing here imports
JAX, nor, until there is something to fit, SciPy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast import registry
from holdfast.analysis.forecast import Course, Curve, Floats, Forecast, Refusal, Share, cheapest_share, forecast
from holdfast.config import JOB_KEY, merge
from holdfast.curriculum import Curriculum
from holdfast.errors import UserError
from holdfast.evaluation.matrix import Point
from holdfast.evaluation.results import FOLDER
from holdfast.evaluation.sums import HeldOut, TaskSums, read_sums
from holdfast.optim import learning_rates
from holdfast.report.run_files import Run
from holdfast.training.config import RunOptions, config_classes
from holdfast.training.resolve import curriculum_for, read_options, schedule_for

MEASURE = "bits_per_byte"
SELF_QUALITY = 0.5  # what a row that the model sampled itself brings back, over what an old one does
SAME_GRADIENT = "nll_difference"  # an estimator of the KL whose gradient is that of plain training
LIKE_PLAIN = "agem"  # a method whose old rows bend the gradient and are not trained on
LONGEST_WARMUP = 0.15  # of a stage


@dataclass(frozen=True)
class StageAhead:
    """A stage that follows a switch, as the options of a run plan it.

    Args:
        rates: the learning rate of each of its steps, as a share of the largest one before the switch.
        replay: share of old rows in its batches.
        effective: the same, less where they repeat or the model sampled them.
        ready: steps after its start until it is warmed up.
        unlike: why forecasts do not know such a stage; empty where they do.
    """

    index: int
    name: str
    start: int
    end: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    rates: Floats
    replay: float
    effective: float
    ready: int
    anchored: bool
    unlike: str

    @property
    def course(self) -> Course:
        """What acts on the stage."""
        return Course(self.rates, self.effective, self.anchored)


def stages_ahead(job: str, options: RunOptions, curriculum: Curriculum) -> list[StageAhead]:
    """Every stage after the first."""
    schedule = schedule_for(job, options, curriculum)
    rates = np.asarray(learning_rates(schedule, np.arange(curriculum.total_steps)), float)
    return [_stage_ahead(options, curriculum, rates, index) for index in range(1, len(curriculum.stages))]


def _stage_ahead(options: RunOptions, curriculum: Curriculum, rates: Floats, index: int) -> StageAhead:
    start, end = curriculum.stage_start(index), curriculum.stage_end(index)
    own = rates[start:end] / max(float(rates[:start].max()), 1e-30)
    homes = {source.name: curriculum.home(source) for source in curriculum.datasets}
    replay, effective = _replay(options, curriculum, index)
    ready = int(np.argmax(own >= 0.9 * own.max()))
    beta = curriculum.stages[index].beta
    return StageAhead(
        index=index,
        name=curriculum.stages[index].name,
        start=start,
        end=end,
        old=tuple(name for name, home in homes.items() if home == index - 1),
        new=tuple(name for name, home in homes.items() if home == index),
        rates=own,
        replay=replay,
        effective=effective,
        ready=ready,
        anchored=beta > 0 and options.penalty.estimator != SAME_GRADIENT,
        unlike=_unlike(options, curriculum, index, ready / len(own)),
    )


def _replay(options: RunOptions, curriculum: Curriculum, index: int) -> tuple[float, float]:
    """The share of old rows in a stage, and what it counts for."""
    steps = curriculum.stage_end(index) - curriculum.stage_start(index)
    shares = {
        sampling.name: sampling.rate
        for sampling in curriculum.stages[index].mixture
        if curriculum.is_sampled(sampling.name) or _home(curriculum, sampling.name) < index
    }
    whole = sum(shares.values())
    if LIKE_PLAIN in options.run.methods:
        return whole, 0.0
    sampled = sum(share for name, share in shares.items() if curriculum.is_sampled(name))
    counted = whole - (1 - SELF_QUALITY) * sampled
    if curriculum.memory is not None and whole > 0:
        drawn = whole * curriculum.batch_size * steps
        counted *= min(1.0, float(np.sqrt(curriculum.memory.rows / drawn)))
    return whole, counted


def _home(curriculum: Curriculum, name: str) -> int:
    return min(curriculum.home(source) for source in curriculum.datasets if source.name == name)


def _unlike(options: RunOptions, curriculum: Curriculum, index: int, warmup: float) -> str:
    """Why a stage is unlike those that forecasts were tuned on."""
    others = [name for name in options.run.methods if name != LIKE_PLAIN]
    if others:
        return f"forecasts were not tuned on runs with {', '.join(others)}"
    if options.keep.limits or options.penalty.target is not None:
        return "a budget steers the run, so what it did so far does not tell what it will do"
    if options.optim.lora.rank:
        return "forecasts were not tuned on adapters"
    if curriculum.fade_steps(index - 1)[1] > curriculum.stage_start(index):
        return "the stage fades in, and forecasts were tuned on hard switches"
    if warmup > LONGEST_WARMUP:
        return f"warm-up takes {warmup:.0%} of the stage (forecasts know up to {LONGEST_WARMUP:.0%})"
    return ""


def planned(run: Run) -> list[StageAhead]:
    """The stages after the first of a run, as its options plan them; none where this installation cannot read them."""
    if run.job not in registry.jobs:
        return []
    values = {key: value for key, value in run.config.items() if key != JOB_KEY}
    try:
        options = read_options(run.job, merge(config_classes(run.job), values))
        return stages_ahead(run.job, options, curriculum_for(run.job, options))
    except Exception:  # whatever the reason: the options are not ours to mend, and other parts of a page need none
        return []


def curves(run: Run, stage: StageAhead) -> dict[str, Curve]:
    """How the losses of the old and the new datasets changed since a stage began, as far as they were measured."""
    points = [point for point in run.points if stage.start <= point.step <= stage.end]
    measured = [(point, read_sums(run.path / FOLDER / str(point.step))) for point in points]
    made = {name: _curve(stage, name, measured) for name in (*stage.old, *stage.new)}
    return {name: curve for name, curve in made.items() if curve is not None}


def _curve(stage: StageAhead, name: str, measured: Sequence[tuple[Point, Mapping[str, TaskSums]]]) -> Curve | None:
    """How the loss of a dataset changed; None where it was not measured at the switch, or not since."""
    seen = [
        (point, score, sums.get(name, TaskSums()).rows)
        for point, sums in measured
        if (score := point.scores.get(name, {}).get(MEASURE)) is not None
    ]
    if not seen or seen[0][0].step != stage.start or seen[0][0].at == "probe":
        return None
    _, level, before = seen.pop(0)
    fewest = min((len(rows.nll) for _, _, rows in seen if rows is not None), default=0)
    steps, changes, full = [], [], []
    for point, score, rows in seen:
        alone = before is None or rows is None  # a run without sums by row has its full evaluations alone
        change = score - level if alone else _change(before, rows, fewest)
        if change is None or (alone and point.at == "probe"):
            continue
        steps.append(point.step - stage.start)
        changes.append(change)
        if point.at != "probe":
            full.append((point.step - stage.start, score - level, change))
    narrow = before is not None and fewest < len(before.nll)
    return Curve(np.array(steps, float), np.array(changes), level, tuple(full), narrow) if steps else None


def _change(before: HeldOut | None, after: HeldOut | None, count: int) -> float | None:
    """The change in bits per byte over the first rows; None where they are others."""
    if before is None or after is None:
        return None
    first, second = before.num_bytes[:count], after.num_bytes[:count]
    if len(first) < count or not np.array_equal(first, second) or not first.sum():
        return None
    bits = (after.nll[:count].sum() - before.nll[:count].sum()) / np.log(2)
    return float(bits / first.sum())


def stage_now(run: Run) -> StageAhead | None:
    """The stage that a run is in, where that follows a switch."""
    return next((stage for stage in reversed(planned(run)) if stage.start <= run.step < stage.end), None)


def of_stage(stage: StageAhead, known: Mapping[str, Curve]) -> dict[str, Forecast | Refusal]:
    """The forecast of every dataset of a stage and of the one before, or why there is none."""
    names = (*stage.old, *stage.new)
    last = max((curve.steps[-1] for curve in known.values()), default=0)
    if stage.unlike:
        return dict.fromkeys(names, Refusal(stage.unlike))
    if last and last < stage.ready:
        return dict.fromkeys(names, Refusal("the learning rate is still warming up"))
    missing = {name: Refusal("it was not measured at the switch and since") for name in names if name not in known}
    new, old = ({name: known[name] for name in part if name in known} for part in (stage.new, stage.old))
    made = missing | forecast(stage.course, new, old)
    return {name: made[name] for name in names}


def forecast_lines(run: Run) -> list[str]:
    """What a run that goes on is told, one sentence each; nothing where it is over or has one stage."""
    if run.finished or len(run.timeline.stages) < 2:
        return []
    stage = stage_now(run)
    if stage is None:
        return ["no forecast: the run has not switched to its second stage yet"] if planned(run) else []
    known = curves(run, stage)
    made = of_stage(stage, known)
    reasons = {each.reason for each in made.values() if isinstance(each, Refusal)}
    if len(reasons) == 1 and not any(isinstance(each, Forecast) for each in made.values()):
        return [f"no forecast: {reasons.pop()}"]
    return [
        f"no forecast of {name}: {each.reason}" if isinstance(each, Refusal) else _line(stage, name, known[name], each)
        for name, each in made.items()
    ]


def _line(stage: StageAhead, name: str, curve: Curve, made: Forecast) -> str:
    role, now = "old" if name in stage.old else "new", curve.corrected()[-1]
    end, low, high = (curve.level + change for change in made)
    return (
        f"forecast: {name} ({role}) ends stage {stage.name} at {end:.3f} bits per byte, with 90 % between {low:.3f} "
        f"and {high:.3f}; since the switch {now:+.3f} by step {int(curve.steps[-1]):,} of {stage.end - stage.start:,}, "
        f"{made.change:+.3f} then"
    )


@dataclass(frozen=True)
class Pilot:
    """What a short run says of a longer one.

    Args:
        ends: the forecast of each dataset at the end of the planned stage.
    """

    name: str
    stage: StageAhead
    ends: Mapping[str, Forecast | Refusal]


SAME_RATE = 0.25  # how far a pilot's learning rate may be off the plan's


def pilot(run: Run, stages: Sequence[StageAhead]) -> Pilot:
    """What a run says of the stage of a plan that has the same datasets; a run without such a stage is refused."""
    pairs = [(own, stage) for own in planned(run) for stage in stages if (own.old, own.new) == (stage.old, stage.new)]
    if not pairs:
        wanted = ", ".join(f"{' and '.join(stage.old)}, then {' and '.join(stage.new)}" for stage in stages)
        raise UserError(f"--pilot {run.path}: no stage of this run has the data of the plan; expected {wanted}")
    own, stage = pairs[-1]
    steps = min(len(own.rates), len(stage.rates))
    warm = max(own.ready, stage.ready)
    off = np.abs(own.rates[:steps] / np.maximum(stage.rates[:steps], 1e-30) - 1) > SAME_RATE
    off[:warm] = False
    same = int(np.argmax(off)) if off.any() else steps
    known = {name: curve.until(same) for name, curve in curves(run, own).items()}
    known = {name: curve for name, curve in known.items() if len(curve.steps)}
    ahead = replace(own, rates=np.concatenate([own.rates[:same], stage.rates[same:]]))
    return Pilot(run.name, ahead, of_stage(ahead, known))


def cheapest(pilots: Sequence[Pilot], name: str, budget: float) -> Share | Refusal:
    """The smallest share of replay with which an old loss keeps its budget, as pilots tell it."""
    by_share: dict[float, list[Forecast]] = {}
    for each in pilots:
        end = each.ends.get(name)
        if isinstance(end, Forecast):
            by_share.setdefault(round(each.stage.replay, 6), []).append(end)
    means = {share: Forecast(*np.mean(ends, axis=0).tolist()) for share, ends in by_share.items()}
    return cheapest_share(means, budget)


def pilot_lines(pilots: Sequence[Pilot], budgets: Mapping[str, float]) -> list[str]:
    """What pilots say, one line each, and the cheapest replay rate for each budget."""
    lines = []
    for each in pilots:
        told = [
            f"{name} {end.change:+.3f} [{end.low:+.3f}, {end.high:+.3f}]"
            for name, end in each.ends.items()
            if isinstance(end, Forecast)
        ]
        reasons = dict.fromkeys(end.reason for end in each.ends.values() if isinstance(end, Refusal))
        said = "; ".join([*([f"{', '.join(told)} bits per byte"] if told else []), *reasons])
        said = said if told else f"no forecast: {said}"
        lines.append(f"pilot {each.name} (replay {each.stage.replay:.3g}), end of stage {each.stage.name}: {said}")
    for name, budget in budgets.items():
        found = cheapest(pilots, name, budget)
        if isinstance(found, Refusal):
            lines.append(f"budget: no replay rate for {name} by {budget:g}: {found.reason}")
            continue
        lines.append(
            f"budget: {name} may rise by {budget:g} bits per byte: a replay rate of {found.share:.3g} is the cheapest, "
            f"with 90 % between {found.low:.3g} and {found.high:.3g}"
        )
    return lines
