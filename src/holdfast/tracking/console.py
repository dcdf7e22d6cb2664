"""What the user sees: a live progress bar on a terminal, a few lines elsewhere.

Without a terminal a run is told in a line for each row of its score matrix and a few between them: one where a quarter
of the run, or two minutes, went by without any.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from holdfast.registry import trackers
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import JsonView

LINE_SHARE = 1 / 4  # of the run, at most, between two plain lines
LINE_SECONDS = 120.0  # at most, between two plain lines
PREPARING_SECONDS = 30.0  # between two plain lines while data is prepared
RATE_SECONDS = 30.0
MAIN_MEASURES = ("accuracy", "bits_per_byte", "nll")  # the first that a task has tells how it stands


class Rate:
    """Tokens a second over the last half minute, so that compilation is soon forgotten."""

    def __init__(self, window_seconds: float = RATE_SECONDS) -> None:
        self._window = window_seconds
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        """Note how many tokens were done at a time."""
        self._marks.append((now, tokens))
        while len(self._marks) > 2 and self._marks[0][0] < now - self._window:
            self._marks.popleft()

    def per_second(self) -> float | None:
        """Tokens a second, or None until two times are known."""
        if len(self._marks) < 2:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else None


def duration(seconds: float) -> str:
    """A time span for people.

    >>> duration(75), duration(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """A large number in three digits.

    >>> count(950), count(12_345), count(2_500_000)
    ('950', '12.3k', '2.5M')
    """
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000 or unit == "G":
            return f"{number:.3g}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def describe(values: JsonView) -> str:
    """The numbers of an event in one line.

    >>> describe({"loss": 2.34567, "by_source": {"a": 1.5}})
    'loss 2.346 · by_source/a 1.5'
    """
    return " · ".join(f"{name} {value:.4g}" for name, value in scalars(values))


def told_scores(scores: Mapping[str, Mapping[str, float | None]]) -> str:
    """The main measure of every task in one line, tasks of one measure together.

    >>> told_scores({"sst2": {"accuracy": 0.75, "nll": 1.0}, "web": {"accuracy": None, "bits_per_byte": 1.25}})
    'accuracy sst2 0.75 · bits per byte web 1.25'
    """
    by_measure: dict[str, list[str]] = {}
    for task, measures in scores.items():
        known = {name: value for name, value in measures.items() if value is not None}
        measure = next((name for name in (*MAIN_MEASURES, *known) if name in known), None)
        if measure is not None:
            by_measure.setdefault(measure, []).append(f"{task} {known[measure]:.3g}")
    return " · ".join(f"{measure.replace('_', ' ')} {', '.join(told)}" for measure, told in by_measure.items())


def figures(info: RunInfo, event: Event, validation: float | None, rate: Rate) -> str:
    """How training stands in one line: losses, speed, time left."""
    parts = []
    loss = event.values.get("loss")
    if loss is not None:
        parts.append(f"loss {float(loss):.4f}")
    if validation is not None:
        parts.append(f"validation {validation:.4f}")
    speed = rate.per_second()
    if speed:
        parts.append(f"{count(speed)} tokens/s")
        left = (info.total_steps - event.step) * info.tokens_per_step
        parts.append(f"ETA {duration(max(left, 0) / speed)}")
    return " · ".join(parts)


def row_name(info: RunInfo, row: int) -> str:
    """Which row of the score matrix an evaluation is."""
    return f"after {info.stages[row - 1][1]}" if 0 < row <= len(info.stages) else "before training"


@trackers.register("console", help="progress: a bar on a terminal, a display in a notebook, plain lines elsewhere")
def console_sink(info: RunInfo) -> Sink:
    """The sink for whoever watches: on a terminal, in a notebook, or in a log."""
    from holdfast.tracking.notebook import NotebookSink, in_notebook

    return NotebookSink(info) if in_notebook() else ConsoleSink(info)


class ConsoleSink(Sink):
    """Shows progress and results on standard error.

    Args:
        console: where to write; standard error unless given.
        clock: seconds that only go forward.
    """

    def __init__(
        self, info: RunInfo, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._info = info
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._rate = Rate()
        self._last_line: tuple[float, int] | None = None  # time and step of the last plain line
        self._last_preparing = -PREPARING_SECONDS
        self._validation: float | None = None
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def log(self, event: Event) -> None:
        """Show one event."""
        if event.kind in ("train", "progress"):
            self._show_training(event)
        elif event.kind == "prepare":
            self._show_preparing(event.values)
        elif event.kind == "message":
            self._print(str(event.values.get("text", "")))
        elif event.kind == "evaluation":
            self._show_evaluation(event)
        elif event.kind == "validation":
            self._validation = event.values.get("loss")  # told by the next line of progress

    def close(self) -> None:
        """Leave the last state of the bar on the screen and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_training(self, event: Event) -> None:
        now = self._clock()
        self._rate.add(now, event.tokens)
        total = self._info.total_steps
        if not self._live:
            if self._is_due(now, event.step):
                self._last_line = now, event.step
                self._print(f"{self._stage(event)}step {event.step}/{total} · {self._figures(event)}")
            return
        self._update("train", event.step, total, self._stage(event), self._figures(event), refresh=event.step == total)

    def _is_due(self, now: float, step: int) -> bool:
        """Whether a plain line is due: the first, the last, and one where much was done or much time went by."""
        total = self._info.total_steps
        if self._last_line is None or step in (self._info.start_step + 1, total):
            return True
        last_time, last_step = self._last_line
        return now - last_time >= LINE_SECONDS or step - last_step >= max(LINE_SHARE * total, 1)

    def _stage(self, event: Event) -> str:
        name = event.values.get("stage_name") or self._info.stage_name(event.step)
        return f"{name} · " if name else ""

    def _figures(self, event: Event) -> str:
        return figures(self._info, event, self._validation, self._rate)

    def _show_preparing(self, values: JsonView) -> None:
        name, done, total = str(values.get("name", "data")), values.get("done", 0), values.get("total")
        finished = total is not None and done >= total
        text = f"{count(done)}{f'/{count(total)}' if total else ''} {values.get('unit', '')}".rstrip()
        if self._live:
            self._update(f"prepare {name}", done, total, f"preparing {name} · ", text, refresh=finished)
            return
        now = self._clock()
        if finished or now - self._last_preparing >= PREPARING_SECONDS:
            self._last_preparing = now
            self._print(f"preparing {name}: {text}")

    def _show_evaluation(self, event: Event) -> None:
        """One line for a row of the score matrix; the smaller looks between them are for the curves alone."""
        row = event.values.get("row", 0)
        scores = event.values.get("scores")
        if row is None:
            return
        if not isinstance(scores, Mapping):
            self._print(f"evaluation at step {event.step}: {describe(event.values)}")
            return
        self._last_line = self._clock(), event.step
        self._print(f"{row_name(self._info, row)} (step {event.step}): {told_scores(scores)}")

    def _update(
        self, key: str, done: float, total: float | None, head: str, tail: str, *, refresh: bool = False
    ) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.fields[head]}{task.completed:.0f}/{task.total:.0f}", markup=False),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[tail]}", markup=False),
                console=self._console,
                refresh_per_second=4,
                expand=True,
            )
            self._bar.start()
        if key not in self._tasks:
            self._tasks[key] = self._bar.add_task("", total=total or 1, head=head, tail=tail)
        self._bar.update(self._tasks[key], completed=done, total=total or max(done, 1), head=head, tail=tail)
        if refresh:
            self._bar.refresh()

    def _print(self, line: str) -> None:
        # As Text: what a dataset or a path is called is never read as markup.
        self._console.print(Text(line), highlight=False, soft_wrap=True)
