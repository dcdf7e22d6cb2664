"""Write a report beside the run that it is of."""

import importlib.util
import re
import sys
from pathlib import Path

from holdfast.execution.files import write_atomically
from holdfast.report import page
from holdfast.report.drawing import heat, svg
from holdfast.report.run_files import Run, open_run

REPORT, FIGURES = "report.html", "figures"


def write_report(run_dir: Path, *, pictures: bool | None = True) -> Path:
    """Write `report.html`, and with `pictures` an SVG and a PNG file of each picture; returns the page's path.

    PNG files need the extra `figures`; without it the SVG files are all, and a line says so.

    Args:
        pictures: None writes them where a tracker shows them: at the end of a run that has one.
    """
    run = open_run(run_dir)
    path = run_dir / REPORT
    write_atomically(path, page.render(run))
    if _wanted(run) if pictures is None else pictures:
        folder = run_dir / FIGURES
        charts, heats = page.charts(run), page.heats(run)
        for chart in charts:
            write_atomically(folder / _file(chart.name, "svg"), svg.draw(chart, alone=True))
        for table in heats:
            write_atomically(folder / _file(table.name, "svg"), heat.svg(table))
        if importlib.util.find_spec("matplotlib") is None:
            print(
                f"{folder}: SVG files alone; PNG files need matplotlib: pip install 'holdfast[figures]'",
                file=sys.stderr,
            )
            return path
        from holdfast.report.drawing import png

        for name, data in png.draw_all(charts, heats):
            write_atomically(folder / _file(name, "png"), data)
    return path


def _file(name: str, ending: str) -> str:
    """A picture's file; its name may be made of names in a run's files, which could lead elsewhere.

    >>> _file("matrix_a/b", "svg")
    'matrix_a_b.svg'
    """
    return f"{re.sub(r'[^A-Za-z0-9._+=-]', '_', name)[:100]}.{ending}"


def _wanted(run: Run) -> bool:
    logging = run.config.get("logging") or {}
    return run.finished and any(logging.get(name) for name in ("wandb", "tensorboard", "trackers"))
