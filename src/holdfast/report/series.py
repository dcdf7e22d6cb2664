"""Curves of runs for the board: columns that grow with the file of a live run, smoothed and thinned for a window."""

import bisect
import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.execution.files import open_regular
from holdfast.report.drawing.chart import thin
from holdfast.report.records import BLOCK, LONGEST, PARSED, TRAIN, parse
from holdfast.tracking.jsonl import FILE_NAME
from holdfast.types import Json

MOST_POINTS = 600  # of a curve on the screen
KEPT = 20_000  # of a curve in memory, at least
OPEN_RUNS = 64
MOST_METRICS = 500
TRAINED = ("loss", "ce", "penalty", "beta", "learning_rate", "grad_norm")
AXES = ("tokens", "step")


@dataclass
class Column:
    """One curve: tokens, steps and values, in order of the file."""

    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    step: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, tokens: float, step: float, value: float) -> None:
        """Append a point; what grows too long keeps the lowest and the highest of each four."""
        if self.step and step <= self.step[-1]:
            self._forget(step)
        self.tokens.append(tokens)
        self.step.append(step)
        self.values.append(value)
        if len(self.values) >= 2 * KEPT:
            kept = [0]
            for start in range(1, len(self.values), 4):
                piece = range(start, min(start + 4, len(self.values)))
                kept += sorted({min(piece, key=self.values.__getitem__), max(piece, key=self.values.__getitem__)})
            self._keep(kept)

    def _forget(self, step: float) -> None:
        """A run that went on from an earlier checkpoint takes its steps again."""
        end = bisect.bisect_left(self.step, step)
        del self.tokens[end:], self.step[end:], self.values[end:]

    def _keep(self, indices: Sequence[int]) -> None:
        for name in ("tokens", "step", "values"):
            column = getattr(self, name)
            setattr(self, name, array("d", [column[index] for index in indices]))


def points(record: Json) -> Iterator[tuple[str, float | None]]:
    """The named values of a record.

    >>> list(points({"kind": "evaluation", "step": 1, "scores": {"sst2": {"accuracy": 0.5}}}))
    [('accuracy/sst2', 0.5)]
    """
    kind = record["kind"]
    if kind == "train":
        for name in TRAINED:
            yield f"train/{name}", record.get(name)
    elif kind == "validation":
        yield "validation/loss", record.get("loss")
        for name, value in record.get("losses", {}).items():
            yield f"validation/{name}", value
    elif kind == "evaluation" and record.get("at") != "probe":
        for task, scores in record.get("scores", {}).items():
            for measure, value in scores.items():
                yield f"{measure}/{task}", value


class Curves:
    """All curves of one run, read once and then only as far as its file has grown."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._lock = threading.Lock()
        self._clear((0, 0))

    def _clear(self, identity: tuple[int, int]) -> None:
        self._identity, self._offset, self._seen, self._every = identity, 0, 0, 1
        self.columns: dict[str, Column] = {}

    def update(self) -> None:
        """Read what was written since the last time; a file that was cut back or exchanged is read again."""
        with self._lock:
            try:
                file = open_regular(self._path)
            except OSError:
                self._clear((0, 0))
                return
            with file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset:
                    self._clear((found.st_dev, found.st_ino))
                file.seek(self._offset)
                rest = b""
                while data := file.read(BLOCK):
                    head, newline, tail = (rest + data).rpartition(b"\n")
                    rest = tail if newline or len(tail) <= LONGEST else b"\0"
                    if newline:
                        self._take(head.split(b"\n"), found.st_size)
                        self._offset = file.tell() - len(tail)

    def _take(self, lines: list[bytes], size: int) -> None:
        if not self._offset:
            self._every = max(1, math.ceil(size / max(sum(map(len, lines)), 1) * len(lines) / PARSED))
        for line in lines:
            if self._every > 1 and line.startswith(TRAIN):
                self._seen += 1
                if self._seen % self._every:
                    continue
            record = parse(line)
            if record is None:
                continue
            for name, value in points(record):
                if value is not None and (name in self.columns or len(self.columns) < MOST_METRICS):
                    self.columns.setdefault(name, Column()).add(record["tokens"], record["step"], value)

    def metrics(self) -> list[str]:
        """The names of all curves; a penalty or a beta that is always 0 is none."""
        found = self.columns.items()
        return [name for name, column in found if not name.startswith("train/") or any(column.values)]

    def window(self, metric: str, axis: str, low: float, high: float, smooth: float) -> Json | None:
        """A curve between two places of its axis, thinned to what a screen shows; None where the run has none."""
        with self._lock:
            column = self.columns.get(metric)
            if column is None:
                return None
            places = column.tokens if axis == "tokens" else column.step
            first = max(bisect.bisect_left(places, low) - 1, 0)  # one more on either side: lines reach the edge
            last = min(bisect.bisect_right(places, high) + 1, len(places))
            x, raw = list(places[first:last]), list(column.values[first:last])
            made: Json = {"end": places[-1], "last": column.values[-1]}
            if smooth > 0:
                made |= {"faint": _points(x, raw)}
                raw = smoothed(column.values, smooth)[first:last]
        return made | {"line": _points(x, raw)}


def _points(x: Sequence[float], y: Sequence[float]) -> Json:
    places, values = thin(x, y, MOST_POINTS)
    return {"x": places, "y": [None if value is None else float(f"{value:.6g}") for value in values]}


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """An exponential moving average that does not begin at 0.

    >>> smoothed([1.0, 1.0, 4.0], 0.5)
    [1.0, 1.0, 2.7142857142857144]
    """
    made, mean, share = [], 0.0, 0.0
    for value in values:
        mean, share = weight * mean + (1 - weight) * value, weight * share + (1 - weight)
        made.append(mean / share)
    return made


class OpenCurves:
    """The curves of the runs that were asked for last."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run_dir: Path) -> Curves:
        """The curves of a run, as far as its file reaches now."""
        with self._lock:
            curves = self._open.pop(run_dir, None) or Curves(run_dir)
            self._open[run_dir] = curves
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
        curves.update()
        return curves
