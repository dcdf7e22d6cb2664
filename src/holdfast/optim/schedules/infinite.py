"""The infinite schedule (Ibrahim et al. 2024): stages can be added as long as it stays on its constant part."""

from dataclasses import dataclass

from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, first_lr, piecewise
from holdfast.registry import schedules


@dataclass(frozen=True)
class InfiniteConfig:
    """Options of the infinite schedule."""

    cooldown_pct: float = field(
        "optimization/infinite/cooldown_pct", default=0.2, ge=0, le=1, help="share of the run in the cosine part"
    )
    constant_lr_ratio: float = field(
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
        (cooldown, context.lr, level, "cosine"),
        (context.total_steps - warmup - cooldown - decay, level, level, "linear"),
        (decay, level, min(level, context.final_lr), "linear"),
    )
