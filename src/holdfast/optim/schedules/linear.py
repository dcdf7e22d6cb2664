"""A warm-up, then a linear decay over the rest of the run."""

from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, first_lr, piecewise
from holdfast.registry import schedules


@schedules.register("linear", help="warm-up, then a linear decay to final_lr_ratio x lr")
def linear(context: ScheduleContext) -> PiecewiseSchedule:
    """Warm-up over `warmup_pct`, then a linear decay that ends with the run."""
    (warmup,) = context.steps("warmup_pct")
    return piecewise(
        context.total_steps,
        (warmup, first_lr(context.lr, warmup), context.lr, "linear"),
        (context.total_steps - warmup, context.lr, context.final_lr, "linear"),
    )
