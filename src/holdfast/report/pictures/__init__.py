"""The pictures of a report, one file each: a function from a run to a chart, or None where nothing was measured."""

from collections.abc import Callable

from holdfast.report.chart import Chart
from holdfast.report.pictures import curriculum, dip, forgetting, kl, loss, work
from holdfast.report.run_files import Run

PICTURES: tuple[Callable[[Run], Chart | None], ...] = (
    curriculum.picture,
    loss.picture,
    forgetting.picture,
    kl.picture,
    kl.against_forgetting,
    dip.picture,
    work.picture,
)
