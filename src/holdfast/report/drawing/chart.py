"""Pictures as data: lines in panels that stand below each other over one axis. Drawing is done elsewhere."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.tracking.console import count

Value = float | None
MOST_POINTS = 400


@dataclass(frozen=True)
class Line:
    """One named series.

    Args:
        color: number in the palette.
        style: `line`, `both` (with a mark at every point), `points`, or `step`.
        low, high: a band around it.
        tips: a text for each point, shown when it is pointed at.
        labels: a short text beside each point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[Value]
    color: int = 0
    style: str = "line"
    dash: bool = False
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    tips: Sequence[str] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over one y-axis.

    Args:
        label: what the y-axis is, with its unit.
        stacked: the lines are areas, each on top of those before.
        zero: the axis begins at 0.
        level: a horizontal line, such as 0 for differences.
        y_range: ends of the axis where they are not those of the values; lines may leave it.
        marks: (x, text) of triangles on the axis.
    """

    label: str
    lines: Sequence[Line]
    height: int = 200
    stacked: bool = False
    zero: bool = False
    level: float | None = None
    y_range: tuple[float, float] | None = None
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Span:
    """A named part of the x-axis: a stage."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Chart:
    """A picture.

    Args:
        name: a short name for files and anchors.
        note: one or two sentences on how to read it.
        alt: what it shows, for those who do not see it.
        spans: stages, shaded in turn.
        fades: blending regions.
        scatter: points are pointed at one by one; otherwise all lines are read at one x.
    """

    name: str
    title: str
    note: str
    alt: str
    panels: Sequence[Panel]
    x_label: str = "tokens"
    spans: Sequence[Span] = ()
    fades: Sequence[tuple[float, float]] = ()
    scatter: bool = False
    x_range: tuple[float, float] | None = None

    @property
    def legend(self) -> dict[str, int]:
        """Names of all lines with their colours, each once."""
        return {line.name: line.color for panel in self.panels for line in panel.lines}

    def x_limits(self) -> tuple[float, float]:
        """The ends of the x-axis."""
        if self.x_range is not None:
            return self.x_range
        values = [x for panel in self.panels for line in panel.lines for x in line.x]
        return limits(values, pad=0.06 if self.scatter else 0.0)


def limits(values: Iterable[Value], pad: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """The ends of an axis that holds all values.

    >>> limits([1.0, None, 3.0], pad=0.0)
    (1.0, 3.0)
    >>> limits([])
    (0.0, 1.0)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    width = high - low
    if width == 0:
        width = abs(high) or 1.0
        return (0.0, high * 1.1) if zero and high > 0 else (low - width * 0.1, high + width * 0.1)
    bottom = low if zero and low == 0 else low - pad * width
    return bottom, high + pad * width


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """About as many round numbers as wanted between two ends.

    >>> ticks(0, 10, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high - low > 1e-12 * max(abs(low), abs(high)):  # nothing between them that a float could tell apart
        return [low]
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


def number(value: Value, digits: int = 4) -> str:
    """A figure for people; a dash where there is none.

    >>> number(0.123456), number(None), number(1234567.0), number(0.00001234), number(0.0)
    ('0.1235', '–', '1.23M', '1.23e-05', '0')
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 10_000:
        return count(value)
    if size < 0.001:
        return f"{value:.3g}"
    return f"{value:.{digits}g}" if size >= 1 else f"{value:.{digits}f}".rstrip("0").rstrip(".")


def thin(x: Sequence[float], y: Sequence[Value], most: int = MOST_POINTS) -> tuple[list[float], list[Value]]:
    """Fewer points that look the same: of each piece its lowest and its highest.

    >>> thin([0, 1, 2, 3, 4, 5], [0, 9, 1, 2, -3, 4], most=4)
    ([0, 1, 4, 5], [0, 9, -3, 4])
    """
    if len(x) <= most:
        return list(x), list(y)
    pieces = most // 2
    kept: list[int] = []
    for piece in range(pieces):
        indices = range(piece * len(x) // pieces, (piece + 1) * len(x) // pieces)
        known = [index for index in indices if y[index] is not None]
        if known:
            kept += sorted({min(known, key=lambda i: y[i] or 0.0), max(known, key=lambda i: y[i] or 0.0)})
        else:
            kept.append(indices[0])
    return [x[index] for index in kept], [y[index] for index in kept]
