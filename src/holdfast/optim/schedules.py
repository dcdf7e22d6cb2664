"""Learning-rate schedules: a schedule is data, segments of the run that are each a ramp between two learning rates.

One formula evaluates it in float32, with numpy for `holdfast plan` and with jax.numpy inside a compiled step.
`schedule(step)` is the learning rate of the optimizer step with that index, counted from 0. The built-in ones stand at
the end, by name; importing this module registers them.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from holdfast import registry
from holdfast.config import field as option
from holdfast.errors import ConfigError
from holdfast.optim.config import OptimConfig
from holdfast.registry import schedules

Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class ScheduleContext:
    """What a schedule is made from.

    Args:
        lr: the largest learning rate.
        total_steps: optimizer steps of the whole run.
        stage_starts: the first step of each stage, beginning with 0.
        warmup_pct, decay_pct, constant_pct: shares of the total steps, between 0 and 1.
        optim: the options that all schedules share.
        options: the schedule's own config instance, when its plug-in has a config class.
        section: where the trainer's config has the shares, for messages.
    """

    lr: float
    total_steps: int
    stage_starts: tuple[int, ...] = (0,)
    warmup_pct: float = 0.01
    decay_pct: float = 0.1
    constant_pct: float = 0.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    options: Any = None
    section: str = "optimization"

    @property
    def final_lr(self) -> float:
        """The learning rate after decay."""
        return self.lr * self.optim.final_lr_ratio

    def steps(self, *names: str) -> list[int]:
        """The shares of those names in whole steps; shares that do not fit into one run are refused."""
        shares = {name: float(getattr(self, name)) for name in names}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"{self.section}/{name}", share, "a share of the run between 0 and 1")
        if sum(shares.values()) > 1 + 1e-9:
            shown = " + ".join(f"{self.section}/{name}" for name in names)
            raise ConfigError(shown, sum(shares.values()), "shares of the run that sum to at most 1", "lower one")
        # Edges are rounded, not lengths, so that the parts never add up to more than the run.
        edges = np.rint(np.cumsum([0.0, *shares.values()]) * self.total_steps).astype(int)
        return [int(length) for length in np.diff(edges)]


Shape = Literal["linear", "cosine"]


@dataclass(frozen=True)
class Segment:
    """A ramp from `lr0` to `lr1`.

    Args:
        start: its first step.
        lr0, lr1: a warm-up has `lr0` at its first step and `lr1` at the step after its last one.
        shape: of the way between them.
        arrives: it has `lr1` at its last step, and `lr0` at the step before its first one: a decay.
    """

    start: int
    lr0: float
    lr1: float
    shape: Shape = "linear"
    arrives: bool = False


class Part(NamedTuple):
    """A segment by its length in steps instead of its start."""

    steps: int
    lr0: float
    lr1: float
    shape: Shape = "linear"
    arrives: bool = False


@dataclass(frozen=True)
class PiecewiseSchedule:
    """Segments one after the other up to `end`; from there on the last learning rate holds.

    >>> ramp = PiecewiseSchedule((Segment(0, 0.0, 1.0), Segment(4, 1.0, 1.0)), end=8)
    >>> [float(ramp(step)) for step in (0, 3, 4, 100)]
    [0.0, 0.75, 1.0, 1.0]
    """

    segments: tuple[Segment, ...]
    end: int

    def __post_init__(self) -> None:
        starts = [segment.start for segment in self.segments]
        assert starts[0] == 0, "the first segment starts at step 0"
        assert all(a < b for a, b in zip(starts, [*starts[1:], self.end], strict=True)), "segments are in order"

    def __call__(self, step: Any) -> Any:
        """The learning rate of a step (or an array of steps) as float32, in numpy or, for JAX arrays, in JAX."""
        if isinstance(step, int | float | np.generic | np.ndarray):
            return self._evaluate(np, np.asarray(step))
        import jax.numpy as jnp

        return self._evaluate(jnp, step)

    def _evaluate(self, xp: Any, step: Any) -> Any:
        starts = np.array([segment.start for segment in self.segments], np.int32)
        lengths = np.diff(starts, append=np.int32(self.end)).astype(np.float32)
        lr0 = np.array([segment.lr0 for segment in self.segments], np.float32)
        lr1 = np.array([segment.lr1 for segment in self.segments], np.float32)
        cosine = np.array([segment.shape == "cosine" for segment in self.segments])
        ahead = np.array([segment.arrives for segment in self.segments], np.int32)

        index = xp.searchsorted(xp.asarray(starts), step, side="right") - 1
        index = xp.clip(index, 0, len(starts) - 1)

        def pick(values: np.ndarray) -> Any:
            return xp.asarray(values)[index]

        u = xp.clip((step - pick(starts) + pick(ahead)).astype(np.float32) / pick(lengths), 0, 1)
        weight = xp.where(pick(cosine), (1 - xp.cos(np.float32(np.pi) * u)) / 2, u)
        # Both ends are met exactly: the weight is exactly 0 at the one, and lr0 + (lr1 - lr0) may be rounded.
        between = pick(lr0) + (pick(lr1) - pick(lr0)) * weight
        return xp.where(u >= 1, pick(lr1), between).astype(np.float32)


@dataclass(frozen=True)
class ScaledSchedule:
    """A schedule times a factor that is constant within each stage.

    >>> half = ScaledSchedule(PiecewiseSchedule((Segment(0, 1.0, 1.0),), end=4), (0, 2), (1.0, 0.5))
    >>> half(np.array([0, 1, 2, 3])).tolist()
    [1.0, 1.0, 0.5, 0.5]
    """

    schedule: Schedule
    starts: tuple[int, ...]
    factors: tuple[float, ...]

    def __call__(self, step: Any) -> Any:
        """The learning rate of a step, or an array of steps, in numpy or in JAX."""
        if isinstance(step, int | float | np.generic | np.ndarray):
            return self.schedule(step) * _factors(self, np.asarray(step))
        import jax.numpy as jnp

        index = jnp.searchsorted(jnp.asarray(self.starts, jnp.int32), step, side="right") - 1
        return self.schedule(step) * jnp.asarray(self.factors, jnp.float32)[index]


def scaled(schedule: Schedule, starts: tuple[int, ...], factors: tuple[float, ...]) -> Schedule:
    """A schedule times a factor for each stage; the schedule itself where every factor is 1."""
    return schedule if all(factor == 1 for factor in factors) else ScaledSchedule(schedule, starts, factors)


def piecewise(total_steps: int, *parts: Part | tuple[int, float, float, Shape]) -> PiecewiseSchedule:
    """A schedule from parts one after the other; parts without steps are left out.

    >>> piecewise(4, (0, 0.0, 1.0, "linear"), (4, 1.0, 1.0, "linear")).segments
    (Segment(start=0, lr0=1.0, lr1=1.0, shape='linear', arrives=False),)
    """
    segments, start = [], 0
    for part in (Part(*part) for part in parts):
        if part.steps > 0:
            segments.append(Segment(start, part.lr0, part.lr1, part.shape, part.arrives))
            start += part.steps
    assert start == total_steps, f"parts of {start} steps in a run of {total_steps}"
    return PiecewiseSchedule(tuple(segments), end=total_steps)


def decayed(stable: int, decay: int, lr: float, final: float, shape: Shape = "linear") -> tuple[Part, Part]:
    """Some steps at a learning rate, then a decay whose last step has the final one.

    A decay of two or more steps that would begin at once leaves its first step the full learning rate.

    >>> one_by_one = piecewise(4, *decayed(0, 4, 1.0, 0.25))
    >>> one_by_one(np.arange(5)).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.25]
    >>> piecewise(3, *decayed(2, 1, 1.0, 0.25))(np.arange(3)).tolist()
    [1.0, 1.0, 0.25]
    """
    peak = 1 if stable == 0 and decay > 1 else 0
    return Part(stable + peak, lr, lr), Part(decay - peak, lr, final, shape, arrives=True)


def first_lr(lr: float, warmup_steps: int) -> float:
    """The learning rate of step 0 in a warm-up: one part of the ramp, because a step with 0 teaches nothing."""
    return lr / (warmup_steps + 1)


def build_schedule(choice: "str | Schedule | None", context: ScheduleContext, plugin_config: Any = None) -> Schedule:
    """The schedule for a registered name, a function of the step of the user's own, or, for None, a constant.

    Args:
        choice: what a trainer's `schedule()` returned; `context.optim.schedule` replaces it when set.
        plugin_config: an instance of the schedule's config class; its defaults unless given.
    """
    choice = context.optim.schedule or choice or "constant"
    if not isinstance(choice, str):
        return choice
    make = registry.schedules.get(choice, path="optimization/schedule")
    config_class = registry.schedules.config(choice)
    if plugin_config is None and config_class is not None:
        plugin_config = config_class()
    schedule: Schedule = make(replace(context, options=plugin_config))
    return schedule


def learning_rates(schedule: Schedule, steps: Sequence[int] | np.ndarray) -> np.ndarray:
    """The learning rates of many steps as float32, also for schedules that take one step at a time."""
    if isinstance(schedule, ScaledSchedule):
        return np.asarray(learning_rates(schedule.schedule, steps) * _factors(schedule, np.asarray(steps)), np.float32)
    if isinstance(schedule, PiecewiseSchedule):
        return np.asarray(schedule(np.asarray(steps)), np.float32)
    return np.array([float(schedule(int(step))) for step in steps], np.float32)


def _factors(schedule: ScaledSchedule, steps: np.ndarray) -> np.ndarray:
    index = np.searchsorted(np.array(schedule.starts), steps, side="right") - 1
    factors: np.ndarray = np.array(schedule.factors, np.float32)[index]
    return factors


@schedules.register("constant", help="lr at every step, no warm-up")
def constant(context: ScheduleContext) -> PiecewiseSchedule:
    """`lr` at every step."""
    return piecewise(context.total_steps, (context.total_steps, context.lr, context.lr, "linear"))


@schedules.register("cosine", help="warm-up, then a cosine decay to final_lr_ratio x lr")
def cosine(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, then a cosine decay whose last step is the run's."""
    (warmup,) = context.steps("warmup_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        *decayed(0, context.total_steps - warmup, context.lr, context.final_lr, "cosine"),
    )


@schedules.register("cosine_rewarm", help="a warm-up and a cosine decay in every stage")
def cosine_rewarm(context: ScheduleContext) -> PiecewiseSchedule:
    """In each stage a warm-up over `warmup_pct` of the stage, from where the last one ended, then a cosine decay."""
    context.steps("warmup_pct")
    parts: list[Part] = []
    for start, end in itertools.pairwise((*context.stage_starts, context.total_steps)):
        warmup = round(context.warmup_pct * (end - start))
        first = first_lr(context.lr, warmup) if start == 0 else context.final_lr
        parts.append(Part(warmup, first, context.lr))
        parts += decayed(0, end - start - warmup, context.lr, context.final_lr, "cosine")
    return piecewise(context.total_steps, *parts)


@dataclass(frozen=True)
class InfiniteConfig:
    """The infinite schedule (Ibrahim et al. 2024): stages can be added while it stays on its constant part."""

    cooldown_pct: float = option(
        "optimization/infinite/cooldown_pct", default=0.2, ge=0, le=1, help="share of the run in the cosine part"
    )
    constant_lr_ratio: float = option(
        "optimization/infinite/constant_lr_ratio", default=0.5, gt=0, le=1, help="constant learning rate over lr"
    )


@schedules.register("infinite", config=InfiniteConfig, help="warm-up, cosine to a constant, linear anneal at the end")
def infinite(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up, cosine to `constant_lr_ratio` x lr, constant, then a linear anneal over the last `decay_pct`."""
    options: InfiniteConfig = context.options or InfiniteConfig()
    warmup, decay = context.steps("warmup_pct", "decay_pct")
    cooldown = round(options.cooldown_pct * context.total_steps)
    if warmup + decay + cooldown > context.total_steps:
        room = max(0.0, 1 - context.warmup_pct - context.decay_pct)
        raise ConfigError(
            "optimization/infinite/cooldown_pct",
            options.cooldown_pct,
            f"at most {room:g}, what warm-up and decay leave of the run",
            "lower it",
        )
    level = context.lr * options.constant_lr_ratio
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        *decayed(0, cooldown, context.lr, level, "cosine"),
        *decayed(context.total_steps - warmup - cooldown - decay, decay, level, min(level, context.final_lr)),
    )


@schedules.register("linear", help="warm-up, then a linear decay to final_lr_ratio x lr")
def linear(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, then a linear decay whose last step is the run's."""
    (warmup,) = context.steps("warmup_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        *decayed(0, context.total_steps - warmup, context.lr, context.final_lr),
    )


@schedules.register("wsd", help="warm-up, stable, linear decay to final_lr_ratio x lr")
def wsd(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, then `lr`, then a linear decay over the last `decay_pct` of the run."""
    warmup, decay = context.steps("warmup_pct", "decay_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        *decayed(context.total_steps - warmup - decay, decay, context.lr, context.final_lr),
    )


@schedules.register("wsds", help="warm-up, stable, linear decay, stable tail at final_lr_ratio x lr")
def wsds(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, `lr`, a linear decay over `decay_pct`, then a tail over the last `constant_pct`."""
    warmup, decay, tail = context.steps("warmup_pct", "decay_pct", "constant_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        *decayed(context.total_steps - warmup - decay - tail, decay, context.lr, context.final_lr),
        (tail, context.final_lr, context.final_lr, "linear"),
    )
