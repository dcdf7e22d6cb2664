"""Warm-up, stable, decay: the decay ends with the run, at `final_lr_ratio` x lr (0 is allowed)."""

from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, first_lr, piecewise
from holdfast.registry import schedules


@schedules.register("wsd", help="warm-up, stable, linear decay to final_lr_ratio x lr")
def wsd(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, then `lr`, then a linear decay over the last `decay_pct` of the run."""
    warmup, decay = context.steps("warmup_pct", "decay_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        (context.total_steps - warmup - decay, context.lr, context.lr, "linear"),
        (decay, context.lr, context.final_lr, "linear"),
    )
