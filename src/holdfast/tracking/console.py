"""What the user sees: a live progress bar on a terminal, a line every few seconds elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from holdfast.registry import trackers
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink

LINE_SECONDS = 5.0
RATE_SECONDS = 30.0


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


def describe(values: Mapping[str, Any]) -> str:
    """The numbers of an event in one line.

    >>> describe({"loss": 2.34567, "by_source": {"a": 1.5}})
    'loss 2.346 · by_source/a 1.5'
    """
    return " · ".join(f"{name} {value:.4g}" for name, value in scalars(values))


@trackers.register("console", help="progress bar on a terminal, plain lines elsewhere")
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
        self._last_line = -LINE_SECONDS
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
        elif event.kind == "stage":
            name = event.values.get("name", self._info.stage_name(event.step + 1))
            self._print(f"stage {name} begins at step {event.step}")
        elif event.kind == "validation":
            self._print(f"validation at step {event.step}: {describe(event.values)}")
        elif event.kind == "checkpoint" and not self._live:
            self._print(f"checkpoint at step {event.step}")

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
            if now - self._last_line >= LINE_SECONDS or event.step == total:
                self._last_line = now
                self._print(f"{self._stage(event)}step {event.step}/{total} · {self._figures(event)}")
            return
        self._update("train", event.step, total, self._stage(event), self._figures(event), refresh=event.step == total)

    def _stage(self, event: Event) -> str:
        name = event.values.get("stage_name") or self._info.stage_name(event.step)
        return f"{name} · " if name else ""

    def _figures(self, event: Event) -> str:
        parts = []
        loss = event.values.get("loss")
        if loss is not None:
            parts.append(f"loss {float(loss):.4f}")
        speed = self._rate.per_second()
        if speed:
            parts.append(f"{count(speed)} tokens/s")
            left = (self._info.total_steps - event.step) * self._info.tokens_per_step
            parts.append(f"ETA {duration(max(left, 0) / speed)}")
        return " · ".join(parts)

    def _show_preparing(self, values: Mapping[str, Any]) -> None:
        name, done, total = str(values.get("name", "data")), values.get("done", 0), values.get("total")
        finished = total is not None and done >= total
        text = f"{count(done)}{f'/{count(total)}' if total else ''} {values.get('unit', '')}".rstrip()
        if self._live:
            self._update(f"prepare {name}", done, total, f"preparing {name} · ", text, refresh=finished)
            return
        now = self._clock()
        if finished or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._print(f"preparing {name}: {text}")

    def _show_evaluation(self, event: Event) -> None:
        scores = event.values.get("scores")
        if not isinstance(scores, Mapping):
            self._print(f"evaluation at step {event.step}: {describe(event.values)}")
            return
        self._print(f"evaluation at step {event.step}")
        width = max((len(str(task)) for task in scores), default=0)
        for task, measures in scores.items():
            self._print(f"  {task:<{width}}  {describe(measures)}")

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
