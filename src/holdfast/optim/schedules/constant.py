"""The same learning rate at every step, without a warm-up."""

from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, piecewise
from holdfast.registry import schedules


@schedules.register("constant", help="lr at every step, no warm-up")
def constant(context: ScheduleContext) -> PiecewiseSchedule:
    """`lr` at every step."""
    return piecewise(context.total_steps, (context.total_steps, context.lr, context.lr, "linear"))
