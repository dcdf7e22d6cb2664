"""One warm-up and one cosine decay per stage, so that every dataset is learned at the full learning rate."""

from itertools import pairwise

from holdfast.optim.schedule import PiecewiseSchedule, ScheduleContext, Shape, first_lr, piecewise
from holdfast.registry import schedules


@schedules.register("cosine_rewarm", help="a warm-up and a cosine decay in every stage")
def cosine_rewarm(context: ScheduleContext) -> PiecewiseSchedule:
    """In each stage a warm-up over `warmup_pct` of the stage, from where the last one ended, then a cosine decay."""
    context.steps("warmup_pct")
    parts: list[tuple[int, float, float, Shape]] = []
    for start, end in pairwise((*context.stage_starts, context.total_steps)):
        warmup = round(context.warmup_pct * (end - start))
        first = first_lr(context.lr, warmup) if start == 0 else context.final_lr
        parts.append((warmup, first, context.lr, "linear"))
        parts.append((end - start - warmup, context.lr, context.final_lr, "cosine"))
    return piecewise(context.total_steps, *parts)
