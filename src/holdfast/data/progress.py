"""Progress of preparation: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

PLAIN_SECONDS = 30.0  # between two plain lines
WORTH_SECONDS = 5.0  # what took less is not told


class Progress:
    """Shows documents, tokens, rows a second and the time that is left."""

    def __init__(self, title: str, enabled: bool) -> None:
        self._title = title
        self._enabled = enabled
        self._live: Any = None
        self._opened = self._start = self._shown = time.monotonic()
        self._first = (0, 0.0)

    def __enter__(self) -> "Progress":
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
            self._live = Bar(*columns, console=Console(stderr=True))
            self._task = self._live.add_task(f"prepare {self._title}", total=None, state="")
            self._live.start()
        return self

    def begin(self, documents: int, fraction: float | None) -> None:
        """Say what an earlier, killed preparation had done already."""
        self._first = (documents, fraction or 0.0)
        self._start = time.monotonic()

    def update(self, documents: int, tokens: int, fraction: float | None, *, last: bool = False) -> None:
        """Show the state; `fraction` is how much of the source has been read, where known."""
        now = time.monotonic()
        if not self._enabled:
            return
        state = self._state(documents, tokens, fraction, now - self._start)
        if self._live is not None:
            self._live.update(self._task, total=1.0 if fraction is not None else None, completed=fraction, state=state)
        elif now - self._shown >= PLAIN_SECONDS or (last and now - self._opened >= WORTH_SECONDS):
            self._shown = now
            print(f"prepare {self._title}: {state}", file=sys.stderr, flush=True)

    def _state(self, documents: int, tokens: int, fraction: float | None, seconds: float) -> str:
        seconds = max(seconds, 1e-3)
        state = f"{documents:,} documents, {tokens:,} tokens, {(documents - self._first[0]) / seconds:,.0f} rows/s"
        done = (fraction or 0.0) - self._first[1]
        if fraction is not None and done > 0 and fraction < 1:
            left = seconds * (1 - fraction) / done
            state += f", {fraction:.0%}, {left:,.0f} s left"
        return state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
