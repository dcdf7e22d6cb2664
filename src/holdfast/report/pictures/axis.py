"""The axis of tokens that most pictures share."""

from holdfast.report.drawing.chart import Span
from holdfast.report.run_files import Run
from holdfast.types import Json


def token_axis(run: Run) -> Json:
    """Stages, fades and range of the x-axis, as a chart's arguments; an unfinished run shows what is done."""
    timeline = run.timeline
    planned = timeline.total_tokens
    end = planned if run.finished and planned else max(run.tokens, 1)
    spans = [Span(stage.start, stage.end, stage.name) for stage in timeline.stages if stage.start < end]
    return {"spans": spans, "fades": timeline.fades, "x_range": (0.0, float(end)), "x_label": "tokens"}


def told(names: list[str], most: int = 8) -> str:
    """Names in a sentence.

    >>> told(["a", "b", "c"])
    'a, b and c'
    """
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
