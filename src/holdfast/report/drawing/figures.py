"""A chart in a page: drawn for wide and for narrow screens, with a legend, its numbers, and a table behind it."""

import json
import re
from collections.abc import Sequence
from html import escape

from holdfast.report.drawing.chart import Chart, Line, Value, number
from holdfast.report.drawing.svg import NARROW, PALETTE, WIDE, draw

MOST_ROWS = 120


def figure(chart: Chart) -> str:
    """The whole figure."""
    legend = "".join(
        f'<li><button type="button" aria-pressed="true" data-toggle="{escape(name)}" class="c{color % len(PALETTE)}">'
        f"<i></i>{escape(name)}</button></li>"
        for name, color in chart.legend.items()
    )
    return (
        f'<figure id="{chart.name}" data-chart="{chart.name}"{" data-scatter" if chart.scatter else ""}>'
        f"<h2>{escape(chart.title)}</h2><p>{escape(chart.note)}</p>"
        f'<ul class="legend" aria-label="lines; press to hide">{legend}</ul>'
        f'<div class="plot">{draw(chart, WIDE)}{draw(chart, NARROW)}</div>'
        f'<script type="application/json">{values(chart)}</script>'
        f"<figcaption>{escape(chart.alt)}</figcaption>{table(chart)}</figure>"
    )


def values(chart: Chart) -> str:
    """What the page's script needs to show values under the pointer, as JSON that cannot end its element."""
    panels = [
        {"label": panel.label, "lines": [] if chart.scatter else [_series(line) for line in panel.lines]}
        for panel in chart.panels
    ]
    return json.dumps({"x": chart.x_label, "panels": panels}, allow_nan=False).replace("<", "\\u003c")


def _series(line: Line) -> dict[str, object]:
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    return {
        "name": line.name,
        "color": line.color % len(PALETTE),
        "x": [x for x, _ in known],
        "y": [float(f"{y:.8g}") for _, y in known],
    }


def table(chart: Chart) -> str:
    """The numbers behind a chart, folded away."""
    parts = []
    for panel in chart.panels:
        if chart.scatter:
            head, rows = ["", chart.x_label, panel.label], _pairs(panel.lines)
        else:
            head, rows = [chart.x_label, *(line.name for line in panel.lines)], _columns(panel.lines)
        every = -(-len(rows) // MOST_ROWS)
        thinned = rows[::every] if every > 1 else rows
        note = f" (every {every}th row; all are in metrics.jsonl)" if every > 1 else ""
        parts.append(html_table(head, thinned, caption=panel.label + note))
    return f"<details><summary>Table</summary>{''.join(parts)}</details>"


def _columns(lines: Sequence[Line]) -> list[list[str]]:
    columns = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    places = sorted({x for column in columns for x, y in column.items() if y is not None})
    return [[f"{x:,.0f}", *(_shown(column.get(x)) for column in columns)] for x in places]


def _pairs(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [line.tips[i] if i < len(line.tips) else line.name, number(x), number(y)]
        for line in lines
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
    ]


def _shown(value: Value) -> str:
    return "" if value is None else number(value, 5)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", safe: bool = False) -> str:
    """A table whose first column names the rows.

    Args:
        safe: the cells are HTML already.
    """
    show = (lambda text: text) if safe else escape
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kinds = [_kind([row[column] for row in rows if column < len(row)]) for column in range(1, len(head))]
    top = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, ["", *kinds], strict=True))
    body = "".join(
        f'<tr><th scope="row">{show(row[0])}</th>'
        + "".join(f"<td{kind}>{show(cell)}</td>" for cell, kind in zip(row[1:], kinds, strict=False))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(cells: Sequence[str]) -> str:
    """The class of a column: numbers stand to the right, words to the left.

    >>> _kind(["1.2 ± 0.1", "–", "+3 [1, 5]"]), _kind(["<b>bits</b> per byte", "3"])
    (' class="number"', '')
    """
    texts = [re.sub(r"<[^>]*>", "", cell).strip() for cell in cells]
    return ' class="number"' if texts and all(re.match(r"$|[–+\-−]?$|[+\-−]?[.\d]", text) for text in texts) else ""
