"""Write a report beside the run that it is of."""

from pathlib import Path

from holdfast.execution.files import write_atomically
from holdfast.report import heat, page, svg
from holdfast.report.run_files import Run, open_run

REPORT, FIGURES = "report.html", "figures"


def write_report(run_dir: Path, *, pictures: bool | None = True) -> Path:
    """Write `report.html`, and with `pictures` an SVG and a PNG file of each picture; returns the page's path.

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
            write_atomically(folder / f"{chart.name}.svg", svg.draw(chart, alone=True))
        for table in heats:
            write_atomically(folder / f"{table.name}.svg", heat.svg(table))
        from holdfast.report import png

        for name, data in png.draw_all(charts, heats):
            write_atomically(folder / f"{name}.png", data)
    return path


def _wanted(run: Run) -> bool:
    logging = run.config.get("logging") or {}
    return run.finished and any(logging.get(name) for name in ("wandb", "tensorboard", "trackers"))
