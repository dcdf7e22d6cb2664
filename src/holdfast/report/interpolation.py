"""Interpolations between two checkpoints: tables, and a page that draws kept old against learned new."""

from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from holdfast.evaluation.interpolations import RULE, Interpolation, Interpolations
from holdfast.evaluation.matrix import LOWER_IS_BETTER
from holdfast.execution.files import write_atomically
from holdfast.report.drawing import svg
from holdfast.report.drawing.chart import Chart, Line, Panel, number
from holdfast.report.drawing.figures import figure, html_table
from holdfast.report.shell import page
from holdfast.report.verdicts import UNITS
from holdfast.types import JsonView

PAGE, PICTURE = "average.html", "average.svg"
BEST, FRONT = "best", "front"
SHOWN = ("bits_per_byte", "accuracy")  # on the terminal; the page and the JSON file have all measures


def print_interpolations(found: Interpolations, console: Console | None = None) -> None:
    """One table for each measure, and which alpha is best by which rule."""
    console = console or Console(highlight=False)
    for measure in found.measures():
        if measure not in (*SHOWN, found.judged_by()):
            continue
        head, rows = table(found, measure)
        columns = [Column(Text(name), justify="right") for name in head[:-1]]
        made = Table(*columns, Column(Text(head[-1])), title=Text(_title(found, measure)))  # marks are words
        for row in rows:
            made.add_row(*row, style="bold" if BEST in row[-1] else "")
        console.print(made)
    console.print(Text(verdict(found)), soft_wrap=True)


def _title(found: Interpolations, measure: str) -> str:
    better = "lower" if measure in LOWER_IS_BETTER else "higher"
    scaled = "" if found.lines is None else f", layers scaled from {found.lines:g} to 1"
    return f"{_name(found.first)} (0) to {_name(found.second)} (1){scaled}: {UNITS[measure]}, {better} is better"


def _name(end: JsonView) -> str:
    return f"{Path(str(end['run'])).name}@{end['checkpoint']}"


def verdict(found: Interpolations) -> str:
    """Which alpha is best, and by which rule."""
    measure = found.judged_by()
    best = found.best(measure) if measure is not None else None
    if measure is None or best is None:
        return "No measure that all tasks have: nothing is called best."
    return f"Best by {UNITS[measure]}: alpha {best:g} ({RULE}). It was chosen on the very data that it is judged on."


def table(found: Interpolations, measure: str) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of one measure: alpha, each task, what is kept and learned, and marks."""
    tasks = [task for task in found.tasks if any(measure in point.scores.get(task, {}) for point in found.points)]
    front, best, judged = found.front(measure), found.best(measure), found.judged_by() == measure
    rows = []
    for point in found.points:
        marks = [*([FRONT] if point.alpha in front else []), *([BEST] if judged and point.alpha == best else [])]
        means = [_mean(point, group, measure) for group in (found.old, found.new)]
        scores = [number(point.scores.get(task, {}).get(measure)) for task in tasks]
        rows.append([f"{point.alpha:g}", *scores, *means, " ".join(marks)])
    return ["alpha", *tasks, "kept old", "learned new", ""], rows


def _mean(point: Interpolation, tasks: tuple[str, ...], measure: str) -> str:
    mean = Interpolations.mean(point, tasks, measure)
    return number(None if mean is None else abs(mean))


def plane(found: Interpolations, measure: str) -> Chart | None:
    """Kept old against learned new, one point an alpha."""
    if not (found.old and found.new and found.judged(measure)):
        return None
    places = [(point.alpha, learned, kept) for point, kept, learned in found.judged(measure)]
    front, best = found.front(measure), found.best(measure)
    lines = [_line("all alphas", places, 0, "both", labels=True)]
    lines.append(_line("front", [each for each in places if each[0] in front], 2, "points"))
    lines.append(_line(f"best: alpha {best:g}", [each for each in places if each[0] == best], 1, "points"))
    sign = "−" if measure in LOWER_IS_BETTER else ""
    ends = f"{number(places[0][2])} at alpha {places[0][0]:g} to {number(places[-1][2])} at alpha {places[-1][0]:g}"
    scaled = "" if found.lines is None else f", alpha scaled from {found.lines:g} in the first layer to 1 in the last"
    return Chart(
        f"average_{measure}",
        f"Kept old against learned new: {UNITS[measure]}",
        f"Each point is an average of the two checkpoints, (1 − alpha) × {_name(found.first)} + alpha × "
        f"{_name(found.second)}{scaled}; up and to the right is better. Points of the front are surpassed by none in "
        "both.",
        f"{len(places)} interpolations: kept old from {ends}; best alpha {best:g}.",
        [Panel(f"kept old: mean score of {', '.join(found.old)} ({sign}{UNITS[measure]})", lines, 320)],
        x_label=f"learned new: mean score of {', '.join(found.new)} ({sign}{UNITS[measure]})",
        scatter=True,
    )


def _line(name: str, places: list[tuple[float, float, float]], color: int, style: str, *, labels: bool = False) -> Line:
    return Line(
        name,
        [learned for _, learned, _ in places],
        [kept for _, _, kept in places],
        color,
        style,
        tips=[f"alpha {alpha:g}: learned new {number(x)}, kept old {number(y)}" for alpha, x, y in places],
        labels=[f"{alpha:g}" for alpha, _, _ in places] if labels else (),
    )


def write_interpolations(found: Interpolations, folder: Path) -> Path:
    """Write `average.html`, and the picture of the measure that is judged by as `average.svg`; the page's path."""
    measures = sorted(found.measures(), key=lambda name: name != found.judged_by())
    charts = [chart for measure in measures if (chart := plane(found, measure)) is not None]
    tables = [
        f"<section><h2>{escape(_title(found, measure))}</h2>{html_table(*table(found, measure))}</section>"
        for measure in measures
    ]
    title = f"{_name(found.first)} to {_name(found.second)}"
    body = [
        f"<h1>Interpolations of {escape(title)}</h1>",
        f'<p class="lead" id="summary">{escape(verdict(found))}</p>',
        *map(figure, charts),
        *tables,
    ]
    write_atomically(folder / PAGE, page(f"{title} · Holdfast", "\n".join(body)))
    if charts:
        write_atomically(folder / PICTURE, svg.draw(charts[0], alone=True))
    return folder / PAGE
