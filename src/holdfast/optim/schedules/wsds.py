"""Warm-up, stable, decay, stable: later stages train on a low, constant tail, as the ABCD trainers do."""

from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, first_lr, piecewise
from holdfast.registry import schedules


@schedules.register("wsds", help="warm-up, stable, linear decay, stable tail at final_lr_ratio x lr")
def wsds(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, `lr`, a linear decay over `decay_pct`, then a tail over the last `constant_pct`."""
    warmup, decay, tail = context.steps("warmup_pct", "decay_pct", "constant_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        (context.total_steps - warmup - decay - tail, context.lr, context.lr, "linear"),
        (decay, context.lr, context.final_lr, "linear"),
        (tail, context.final_lr, context.final_lr, "linear"),
    )
