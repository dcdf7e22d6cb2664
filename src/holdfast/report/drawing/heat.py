"""Heat maps: tables whose cells are shaded, as HTML with every number in it and as SVG files."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell, ScoreMatrix
from holdfast.report.drawing.chart import number
from holdfast.report.run_files import Run

MEASURE_NAMES = {
    "accuracy": "accuracy",
    "nll": "held-out NLL (nats per token)",
    "bits_per_byte": "bits per byte",
    "kl_forward": "KL(reference ‖ model), nats per token",
    "kl_reverse": "KL(model ‖ reference), nats per token",
}
NOTE = (
    "Rows: before training and after each stage; columns: tasks in order of their stages. The deeper the shade the "
    "better, within its column; framed: just after the task's own stage. Small figures are 95 % intervals and, in "
    "brackets, over how many documents or questions."
)


@dataclass(frozen=True)
class HeatCell:
    """One cell: its value, its interval if known, and how good it is from 0 to 1 (-1 to 1 in a difference)."""

    value: Cell
    interval: tuple[float, float] | None = None
    shade: float = 0.0
    home: bool = False
    count: int | None = None

    @property
    def ends(self) -> str:
        """The interval, and how many documents or questions it is over where that is known."""
        if self.interval is None:
            return ""
        over = f" ({self.count})" if self.count else ""
        return f"{number(self.interval[0], 3)} … {number(self.interval[1], 3)}{over}"


@dataclass(frozen=True)
class Heat:
    """A shaded table.

    Args:
        diverging: shades run from -1 (worse) to 1 (better) instead of 0 to 1.
    """

    name: str
    title: str
    note: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[HeatCell]]
    diverging: bool = False
    marked: Sequence[str] = ()


def matrix_heat(run: Run, measure: str) -> Heat | None:
    """The score matrix of one measure; columns that were never measured are left out."""
    matrix = run.matrix
    if matrix is None or measure not in matrix.measures:
        return None
    values = matrix.measures[measure]
    columns = [column for column in column_order(matrix) if any(row[column] is not None for row in values)]
    if not columns:
        return None
    points = [run.row_point(row) for row in range(len(values))]
    cells = []
    for row, line in enumerate(values):
        point = points[row]
        intervals, counts = (point.intervals, point.counts) if point is not None else ({}, {})
        cells.append(
            [
                HeatCell(
                    line[column],
                    intervals.get(matrix.tasks[column], {}).get(measure),
                    shade(line[column], [each[column] for each in values], measure),
                    matrix.homes[column] == row,
                    counts.get(matrix.tasks[column], {}).get(measure),
                )
                for column in columns
            ]
        )
    better = "lower" if measure in LOWER_IS_BETTER else "higher"
    return Heat(
        f"matrix_{measure}",
        f"{MEASURE_NAMES.get(measure, measure.replace('_', ' '))} ({better} is better)",
        NOTE,
        ["before training", *(f"after {stage}" for stage in matrix.stages)],
        [matrix.tasks[column] for column in columns],
        cells,
        marked=[task for task in matrix.tasks if task in matrix.not_learned] if measure == "accuracy" else (),
    )


def column_order(matrix: ScoreMatrix) -> list[int]:
    """The columns in order of their own stages, those without one last: framed cells run down the diagonal.

    >>> column_order(ScoreMatrix(("a", "b"), ("second", "none", "first"), (2, None, 1), {}))
    [2, 0, 1]
    """
    return sorted(range(len(matrix.tasks)), key=lambda column: matrix.homes[column] or len(matrix.stages) + 1)


def shade(value: Cell, column: Sequence[Cell], measure: str) -> float:
    """How good a value is among those of its column, 0 to 1; small differences do not look large.

    >>> shade(0.9, [0.1, 0.9], "accuracy"), shade(2.0, [2.0, 4.0], "nll"), shade(4.0, [2.0, 4.0], "nll")
    (1.0, 1.0, 0.0)
    """
    known = [each for each in column if each is not None]
    if value is None or not known:
        return 0.0
    lower = measure in LOWER_IS_BETTER
    worst, best = (max(known), min(known)) if lower else (min(known), max(known))
    least = 0.2 * abs(best) if lower else 0.2
    width = max(abs(best - worst), least, 1e-12)
    return 1.0 - abs(best - value) / width


def html(heat: Heat) -> str:
    """The heat map as a table; every cell carries its exact value."""
    head = "".join(f'<th scope="col">{escape(name)}{_mark(heat, name)}</th>' for name in heat.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell(heat), row))}</tr>'
        for name, row in zip(heat.rows, heat.cells, strict=True)
    )
    return (
        f'<div class="scroll"><table class="heat" data-matrix="{escape(heat.name)}">'
        f"<caption>{escape(heat.title)}</caption><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _mark(heat: Heat, column: str) -> str:
    return (
        ' <span class="warn" title="not above chance and majority">not learned</span>' if column in heat.marked else ""
    )


def _cell(heat: Heat):  # type: ignore[no-untyped-def]  # a closure for map
    def cell(item: HeatCell) -> str:
        if item.value is None:
            return '<td class="none" data-value="">–</td>'
        interval = f"<small>{item.ends}</small>" if item.ends else ""
        kind = ("better" if item.shade >= 0 else "worse") + (" home" if item.home else "")
        return (
            f'<td class="{kind} s{round(20 * min(abs(item.shade), 1.0))}" data-value="{item.value!r}">'
            f"{shown(heat, item)}{interval}</td>"
        )

    return cell


# Widths of a letter in pixels where the font is a wide one: files are drawn with whatever sans serif there is.
LETTER, BOLD, SMALL = 7.6, 8.6, 5.8


def svg(heat: Heat) -> str:
    """The heat map as a file that stands alone; columns are as wide as their widest name, number or interval."""
    values = [item for cells in heat.cells for item in cells]
    names = [name + (" (not learned)" if name in heat.marked else "") for name in heat.columns]
    needed = [
        8 * LETTER,
        *(len(name) * LETTER for name in names),
        *(len(shown(heat, item)) * LETTER for item in values),
    ]
    wide = round(max(*needed, *(len(item.ends) * SMALL for item in values)) + 14)
    left = round(max(len(name) for name in heat.rows) * LETTER + 16)
    width = max(left + wide * len(names) + 10, round(len(heat.title) * BOLD + 16))
    height = 60 + 40 * len(heat.rows)
    parts = [f'<text class="t" x="8" y="18">{escape(heat.title)}</text>']
    for column, name in enumerate(names):
        parts.append(f'<text x="{left + wide * (column + 0.5)}" y="44" text-anchor="middle">{escape(name)}</text>')
    for row, (name, cells) in enumerate(zip(heat.rows, heat.cells, strict=True)):
        top = 52 + 40 * row
        parts.append(f'<text x="{left - 8}" y="{top + 24}" text-anchor="end">{escape(name)}</text>')
        for column, item in enumerate(cells):
            parts += _svg_cell(heat, item, left + wide * column, top, wide)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(heat.title)}"><style>text{{font:12px sans-serif;fill:#222}}'
        f'.t{{font-weight:bold}}.i{{font-size:9px;fill:#555}}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def shown(heat: Heat, item: HeatCell) -> str:
    """What a cell says: its number, with a sign where the map shows differences."""
    sign = "+" if heat.diverging and item.value is not None and item.value > 0 else ""
    return f"{sign}{number(item.value)}"


def color(shade_value: float) -> str:
    """The fill of a cell on white.

    >>> color(0.0), color(1.0), color(-1.0)
    ('#ffffff', '#7fc4a6', '#e8a184')
    """
    end = (127, 196, 166) if shade_value >= 0 else (232, 161, 132)
    share = min(abs(shade_value), 1.0)
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in end)


def _svg_cell(heat: Heat, item: HeatCell, left: float, top: float, wide: float) -> list[str]:
    stroke = ' stroke="#333" stroke-width="1.5"' if item.home else ' stroke="#ddd"'
    fill = color(item.shade) if item.value is not None else "#f4f4f4"
    middle = left + (wide - 2) / 2
    parts = [f'<rect x="{left}" y="{top}" width="{wide - 2}" height="38" fill="{fill}"{stroke}/>']
    parts.append(f'<text x="{middle}" y="{top + 18}" text-anchor="middle">{shown(heat, item)}</text>')
    if item.value is not None and item.ends:
        parts.append(f'<text class="i" x="{middle}" y="{top + 31}" text-anchor="middle">{item.ends}</text>')
    return parts
