"""Charts as SVG: for the page (colours from its style sheet, legend beside) or as files that stand alone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from holdfast.report.drawing.chart import Chart, Line, Panel, Value, limits, number, ticks
from holdfast.tracking.console import count

WIDE, NARROW = 880, 400
PALETTE = (
    "#2f6fde", "#d9622b", "#1f9d6b", "#b03fa3", "#a8860b", "#0e9bb5", "#d13b54", "#6d5bd0", "#6b8e23", "#7a6a5f",
)  # fmt: skip
LEFT, RIGHT, GAP, AXIS, TOP = 52, 12, 34, 36, 24
LETTER = 6.4  # width of a letter of 11 pixels, roughly


@dataclass(frozen=True)
class Frame:
    """Where a panel lies, in pixels, and what its axes hold."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, value: float) -> float:
        """The place of an x."""
        share = (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        return round(self.left + share * (self.right - self.left), 1)

    def py(self, value: float) -> float:
        """The place of a y; what is far out of the axis stays near, so that numbers stay short."""
        share = (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return round(self.bottom - min(max(share, -9.0), 9.0) * (self.bottom - self.top), 1)


def draw(chart: Chart, width: int = WIDE, *, alone: bool = False) -> str:
    """The picture as an `<svg>` element, or with `alone` as a whole file with legend and colours."""
    frames, height = layout(chart, width)
    parts: list[str] = []
    if frames:
        parts += _spans(chart, frames)
    for index, (panel, frame) in enumerate(zip(chart.panels, frames, strict=True)):
        parts += _axes(panel, frame)
        drawn = _areas(panel, frame) if panel.stacked else _lines(panel, frame, chart.scatter)
        parts += _clipped(drawn, frame, f"{chart.name}-{width}-{index}")
        parts += _marks(panel, frame)
    if frames:
        parts += _x_axis(chart, frames[-1], width)
    legend, extra = _legend(chart, width, height) if alone else ([], 0)
    attributes = (
        f'viewBox="0 0 {width} {height + extra}" role="img" aria-label="{escape(chart.alt)}" '
        f'data-left="{LEFT}" data-right="{width - RIGHT}" data-width="{width}" '
        f'data-x="{json.dumps(list(chart.x_limits()))}" '
        f'data-panels="{json.dumps([[frame.top, frame.bottom, *frame.y] for frame in frames])}"'
    )
    if not alone:
        cursor = "" if chart.scatter or not frames else _cursor(frames)
        size = "wide" if width >= WIDE else "narrow"
        return f'<svg class="chart {size}" tabindex="0" {attributes}>{"".join(parts)}{cursor}</svg>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + extra}" class="chart" '
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}{attributes}>{_style()}{background}{''.join(parts + legend)}</svg>\n"


def layout(chart: Chart, width: int) -> tuple[list[Frame], int]:
    """The frames of the panels and the height of the picture."""
    frames, top = [], float(TOP + (14 if chart.spans else 0))
    for panel in chart.panels:
        bottom = top + panel.height
        frames.append(Frame(LEFT, width - RIGHT, top, bottom, chart.x_limits(), y_limits(panel)))
        top = bottom + GAP
    return frames, int(top - GAP + AXIS)


def y_limits(panel: Panel) -> tuple[float, float]:
    """The ends of a panel's y-axis."""
    if panel.y_range is not None:
        return panel.y_range
    if panel.stacked:
        sums = [sum(value or 0.0 for value in column) for column in zip(*(line.y for line in panel.lines), strict=True)]
        return limits([0.0, *sums], pad=0.0, zero=True)
    values: list[Value] = [value for line in panel.lines for part in (line.y, line.low, line.high) for value in part]
    return limits([*values, panel.level] if panel.level is not None else values, zero=panel.zero)


def _spans(chart: Chart, frames: Sequence[Frame]) -> Iterator[str]:
    first, last = frames[0], frames[-1]
    for index, span in enumerate(chart.spans):
        left = first.px(max(span.start, first.x[0]))
        right = first.px(min(span.end, first.x[1]))
        if right <= left:
            continue
        for frame in frames:
            size = f'x="{left}" y="{frame.top}" width="{right - left:.1f}" height="{frame.bottom - frame.top}"'
            yield f'<rect class="span{index % 2}" {size}/>'
            if index:
                yield f'<line class="boundary" x1="{left}" x2="{left}" y1="{frame.top}" y2="{frame.bottom}"/>'
        name = shortened(span.name, right - left)
        if name:
            yield (
                f'<text class="stage" x="{(left + right) / 2:.1f}" y="12" text-anchor="middle">'
                f"{escape(name)}<title>{escape(span.name)}</title></text>"
            )
    for start, end in chart.fades:
        left, right = first.px(max(start, first.x[0])), first.px(min(end, first.x[1]))
        if right > left:
            height = f'y="{first.top}" width="{right - left:.1f}" height="{last.bottom - first.top}"'
            yield f'<rect class="fade" x="{left}" {height}/>'


def shortened(text: str, width: float) -> str:
    """A text cut to a width in pixels; nothing when not even three letters fit.

    >>> shortened("shakespeare", 46), shortened("shakespeare", 100), shortened("shakespeare", 12)
    ('shake…', 'shakespeare', '')
    """
    letters = int((width - 6) / LETTER)
    if letters >= len(text):
        return text
    return text[: letters - 1] + "…" if letters >= 3 else ""


def _axes(panel: Panel, frame: Frame) -> Iterator[str]:
    yield f'<text class="label" x="{frame.left - 44}" y="{frame.top - 10}">{escape(panel.label)}</text>'
    for tick in ticks(*frame.y, wanted=max(2, panel.height // 45)):
        y = frame.py(tick)
        yield f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{frame.left - 6}" y="{y + 4}" text-anchor="end">{_tick(tick)}</text>'
    if panel.level is not None:
        y = frame.py(panel.level)
        yield f'<line class="level" x1="{frame.left}" x2="{frame.right}" y1="{y}" y2="{y}"/>'


def _tick(value: float) -> str:
    return number(value, 3) if abs(value) < 1000 else count(value)


def _x_axis(chart: Chart, frame: Frame, width: int) -> Iterator[str]:
    for tick in ticks(*frame.x, wanted=max(4, width // 130)):
        x = frame.px(tick)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>'
        anchor = "end" if x > frame.right - 12 else "middle"
        yield f'<text class="tick" x="{x}" y="{frame.bottom + 17}" text-anchor="{anchor}">{_tick(tick)}</text>'
    middle = (frame.left + frame.right) / 2
    place = f'x="{middle}" y="{frame.bottom + 32}" text-anchor="middle"'
    yield f'<text class="label" {place}>{escape(chart.x_label)}</text>'


def _clipped(drawn: Iterator[str], frame: Frame, name: str) -> Iterator[str]:
    """What a panel shows, without what leaves it; dots at its edge stay whole."""
    size = f'y="{frame.top - 4}" width="{frame.right - frame.left + 8}" height="{frame.bottom - frame.top + 8}"'
    yield f'<clipPath id="{name}"><rect x="{frame.left - 4}" {size}/></clipPath><g clip-path="url(#{name})">'
    yield from drawn
    yield "</g>"


def _group(line: Line, content: str) -> str:
    return f'<g data-line="{escape(line.name)}" class="c{line.color % len(PALETTE)}">{content}</g>'


def _areas(panel: Panel, frame: Frame) -> Iterator[str]:
    base = [0.0] * (len(panel.lines[0].x) if panel.lines else 0)
    for line in panel.lines:
        top = [low + (value or 0.0) for low, value in zip(base, line.y, strict=True)]
        if any(value for value in line.y):
            forth = [f"{frame.px(x)},{frame.py(y)}" for x, y in zip(line.x, top, strict=True)]
            back = [f"{frame.px(x)},{frame.py(y)}" for x, y in zip(line.x, base, strict=True)]
            points = " ".join([*forth, *reversed(back)])
            yield _group(line, f'<polygon class="area" points="{points}"/>')
        base = top


def _lines(panel: Panel, frame: Frame, scatter: bool) -> Iterator[str]:
    for line in panel.lines:
        content = _band(line, frame)
        dash = ' stroke-dasharray="5 4"' if line.dash else ""
        if line.style != "points":
            content += f'<path class="line" d="{_path(line, frame)}"{dash}/>'
        if line.style in ("both", "points"):
            content += "".join(_dots(line, frame, scatter))
        yield _group(line, content)


def _path(line: Line, frame: Frame) -> str:
    parts, pen_up, last = [], True, 0.0
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            pen_up = True
            continue
        if line.style == "step" and not pen_up:
            parts.append(f"L{frame.px(x)} {last}")
        last = frame.py(y)
        parts.append(f"{'M' if pen_up else 'L'}{frame.px(x)} {last}")
        pen_up = False
    return "".join(parts)


def _dots(line: Line, frame: Frame, scatter: bool) -> Iterator[str]:
    for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if y is not None:
            tip = line.tips[index] if index < len(line.tips) else f"{line.name}: {number(y)}"
            shown = f' data-tip="{escape(tip)}" tabindex="0"' if scatter else ""
            yield f'<circle cx="{frame.px(x)}" cy="{frame.py(y)}" r="{5 if scatter else 3}"{shown}/>'
            if index < len(line.labels):
                place = f'x="{frame.px(x) - 8}" y="{frame.py(y) + 14}" text-anchor="end"'
                yield f'<text class="tick" {place}>{escape(line.labels[index])}</text>'


def _band(line: Line, frame: Frame) -> str:
    ends = [
        (frame.px(x), frame.py(low), frame.py(high))
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    if not ends:
        return ""
    forth = [f"{x},{high}" for x, _, high in ends]
    back = [f"{x},{low}" for x, low, _ in reversed(ends)]
    return f'<polygon class="band" points="{" ".join(forth + back)}"/>'


def _marks(panel: Panel, frame: Frame) -> Iterator[str]:
    for x, text in panel.marks:
        if frame.x[0] <= x <= frame.x[1]:
            at, base = frame.px(x), frame.bottom
            shape = f"M{at} {base - 10}l6 10h-12z"
            yield f'<path class="mark" d="{shape}" data-tip="{escape(text)}"><title>{escape(text)}</title></path>'


def _cursor(frames: Sequence[Frame]) -> str:
    top, bottom = frames[0].top, frames[-1].bottom
    return f'<line class="cursor" x1="0" x2="0" y1="{top}" y2="{bottom}" visibility="hidden"/>'


def _legend(chart: Chart, width: int, height: int) -> tuple[list[str], int]:
    parts, x, y = [], float(LEFT), height + 14
    for name, color in chart.legend.items():
        needed = 26 + LETTER * len(name)
        if x + needed > width - RIGHT and x > LEFT:
            x, y = float(LEFT), y + 18
        parts.append(f'<g class="c{color % len(PALETTE)}"><circle cx="{x + 5}" cy="{y - 4}" r="5"/></g>')
        parts.append(f'<text class="tick" x="{x + 14}" y="{y}">{escape(name)}</text>')
        x += needed
    return parts, y - height + 10


def _style() -> str:
    colors = "".join(
        f".c{index} .line{{stroke:{color}}}.c{index} .area,.c{index} .band,.c{index} circle{{fill:{color}}}"
        for index, color in enumerate(PALETTE)
    )
    return (
        "<style>text{font:11px sans-serif;fill:#333}.label{fill:#555}.line{fill:none;stroke-width:1.6}"
        ".area{opacity:.85}.band{opacity:.18}.grid{stroke:#e3e3e3}.level{stroke:#999}"
        ".boundary{stroke:#888;stroke-dasharray:2 3}"
        ".span0{fill:#f7f7f7}.span1{fill:#fff}.fade{fill:#888;opacity:.12}.mark{fill:#333}" + colors + "</style>"
    )
