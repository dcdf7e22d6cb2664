"""The same pictures as Matplotlib figures and as PNG files."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.report.drawing.chart import Chart, Line, Panel
from holdfast.report.drawing.heat import Heat, color, shown
from holdfast.report.drawing.svg import PALETTE, y_limits
from holdfast.tracking.console import count
from holdfast.types import Json

DPI = 160


def draw_all(charts: Sequence[Chart], heats: Sequence[Heat]) -> Iterator[tuple[str, bytes]]:
    """Names and PNG data of all pictures."""
    for chart in charts:
        yield chart.name, png(chart_figure(chart))
    for heat in heats:
        yield heat.name, png(heat_figure(heat))


def _new(width: float, height: float) -> Any:
    # Figure and canvas by hand: pyplot keeps global state and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """A figure as PNG data."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def chart_figure(chart: Chart) -> Any:
    """One chart as a Matplotlib figure."""
    heights = [panel.height for panel in chart.panels]
    figure = _new(8.8, sum(heights) / 88 + 0.5 * len(heights) + 0.8)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, axis in zip(chart.panels, axes, strict=True):
        _panel(panel, axis)
        for index, span in enumerate(chart.spans):
            axis.axvspan(span.start, span.end, color="#f4f6f8" if index % 2 == 0 else "#ffffff", zorder=-2)
            if index:
                axis.axvline(span.start, color="#888888", linestyle=":", linewidth=0.8)
        for start, end in chart.fades:
            axis.axvspan(start, end, color="#888888", alpha=0.14, linewidth=0)
        axis.set_xlim(*chart.x_limits())
    for span in chart.spans:
        low, high = max(span.start, chart.x_limits()[0]), min(span.end, chart.x_limits()[1])
        if high > low:
            axes[0].annotate(span.name, ((low + high) / 2, 1.16), xycoords=("data", "axes fraction"), ha="center",
                             fontsize=8, annotation_clip=False)  # fmt: skip
    if not chart.scatter:
        axes[-1].xaxis.set_major_formatter(lambda value, _place: count(value))
    axes[-1].set_xlabel(chart.x_label, fontsize=9)
    handles = {line.name: _color(line) for panel in chart.panels for line in panel.lines}
    if len(handles) > 1:
        from matplotlib.lines import Line2D

        marks = [Line2D([], [], color=value, linewidth=3) for value in handles.values()]
        figure.legend(marks, list(handles), loc="outside lower center", ncols=min(len(handles), 5), fontsize=8)
    return figure


def _color(line: Line) -> str:
    return PALETTE[line.color % len(PALETTE)]


def _panel(panel: Panel, axis: Any) -> None:
    axis.set_title(panel.label, fontsize=9, loc="left", color="#555555")
    axis.grid(axis="y", color="#e3e3e3", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.stacked:
        values = [[value or 0.0 for value in line.y] for line in panel.lines]
        axis.stackplot(panel.lines[0].x, values, colors=[_color(line) for line in panel.lines], alpha=0.85)
    else:
        for line in panel.lines:
            _line(line, axis)
    if panel.level is not None:
        axis.axhline(panel.level, color="#999999", linewidth=0.8)
    for x, _ in panel.marks:
        axis.plot([x], [y_limits(panel)[0]], marker="^", color="#333333", clip_on=False)
    axis.set_ylim(*y_limits(panel))


def _line(line: Line, axis: Any) -> None:
    values = [float("nan") if value is None else value for value in line.y]
    look: dict[str, Json] = {
        "line": {},
        "both": {"marker": "o", "markersize": 3},
        "points": {"marker": "o", "linestyle": "none"},
        "step": {"drawstyle": "steps-post"},
    }
    dash = {"linestyle": "--"} if line.dash else {}
    axis.plot(line.x, values, color=_color(line), linewidth=1.4, **look[line.style], **dash)
    for place, value, label in zip(line.x, values, line.labels, strict=False):
        axis.annotate(label, (place, value), (-4, -9), textcoords="offset points", ha="right", fontsize=7)
    known = [(x, a, b) for x, a, b in zip(line.x, line.low, line.high, strict=False) if a is not None and b is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        axis.fill_between(x, low, high, color=_color(line), alpha=0.18, linewidth=0)


def heat_figure(heat: Heat) -> Any:
    """One heat map as a Matplotlib figure."""
    # 0.054 inches hold a letter of the small figures, 0.072 one of the names.
    widest = max((len(cell.ends) for cells in heat.cells for cell in cells), default=0)
    wide = max(1.25, 0.054 * widest + 0.1, *(0.072 * len(name) + 0.1 for name in heat.columns))
    width = 1.0 + 0.072 * max(len(name) for name in heat.rows) + wide * len(heat.columns)
    figure = _new(max(width, 0.09 * len(heat.title)), 0.9 + 0.48 * len(heat.rows))
    axis = figure.subplots()
    for row, cells in enumerate(heat.cells):
        for column, cell in enumerate(cells):
            fill = color(cell.shade) if cell.value is not None else "#f4f4f4"
            edge, wide = ("#333333", 1.4) if cell.home else ("#dddddd", 0.6)
            axis.add_patch(_rectangle(column, row, fill, edge, wide))
            axis.text(column + 0.5, row + 0.42, shown(heat, cell), ha="center", va="center", fontsize=9)
            if cell.value is not None and cell.ends:
                axis.text(column + 0.5, row + 0.78, cell.ends, ha="center", va="center", fontsize=6, color="#555555")
    axis.set_xlim(0, len(heat.columns))
    axis.set_ylim(len(heat.rows), 0)
    axis.set_xticks([index + 0.5 for index in range(len(heat.columns))], heat.columns, fontsize=8)
    axis.set_yticks([index + 0.5 for index in range(len(heat.rows))], heat.rows, fontsize=8)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(heat.title, fontsize=10, loc="left")
    return figure


def _rectangle(column: int, row: int, fill: str, edge: str, wide: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column + 0.02, row + 0.04), 0.96, 0.92, facecolor=fill, edgecolor=edge, linewidth=wide)
