"""The pictures of a report: functions from a run to a chart, or None where nothing was measured."""

from collections.abc import Callable

from holdfast.report.drawing.chart import Chart
from holdfast.report.pictures import curriculum, curves, keep, kl, work
from holdfast.report.run_files import Run

PICTURES: tuple[Callable[[Run], Chart | None], ...] = (
    curriculum.picture,
    curves.loss,
    curves.forgetting,
    keep.picture,
    kl.picture,
    kl.against_forgetting,
    curves.dip,
    work.picture,
)
