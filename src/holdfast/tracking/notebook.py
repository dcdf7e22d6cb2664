"""Progress in a notebook: one display that moves while the cell runs and stays as its last state."""

import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from holdfast.tracking.console import Rate, count, figures, row_name, told_scores
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import RunInfo, Sink

SECONDS = 0.25  # at least, between two changes of the display
BAR = (
    '<div style="height:.5em;max-width:40em;border-radius:.25em;background:rgba(128,128,128,.25)">'
    '<div style="height:100%;width:{percent:.1f}%;border-radius:.25em;background:#1f9d6b"></div></div>'
)


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookSink(Sink):
    """Shows how far a run is, and a line for each row of its score matrix.

    Args:
        show: takes HTML and returns what changes it; IPython's display unless given.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        info: RunInfo,
        show: Callable[[str], Callable[[str], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._show = show or _display
        self._clock = clock
        self._change: Callable[[str], None] | None = None
        self._changed = -SECONDS
        self._rate = Rate()
        self._validation: float | None = None
        self._step = info.start_step
        self._now = "starting"
        self._lines: list[str] = []

    def log(self, event: Event) -> None:
        """Show one event."""
        due = False
        if event.kind in ("train", "progress"):
            self._rate.add(self._clock(), event.tokens)
            stage = event.values.get("stage_name") or self._info.stage_name(event.step)
            self._step = event.step
            steps = f"step {event.step}/{self._info.total_steps}"
            told = figures(self._info, event, self._validation, self._rate)
            self._now = " · ".join(part for part in (stage, steps, told) if part)
            due = event.step == self._info.total_steps
        elif event.kind == "prepare":
            name, done, total = event.values.get("name", "data"), event.values.get("done", 0), event.values.get("total")
            self._now = f"preparing {name}: {count(done)}{f'/{count(total)}' if total else ''}"
        elif event.kind == "validation":
            self._validation = event.values.get("loss")
        elif event.kind == "message":
            self._lines.append(str(event.values.get("text", "")))
            due = True
        elif event.kind == "evaluation" and isinstance(event.values.get("scores"), Mapping):
            row = event.values.get("row", 0)
            if row is not None:
                self._lines.append(f"{row_name(self._info, row)}: {told_scores(event.values['scores'])}")
                due = True
        self._draw(due)

    def close(self) -> None:
        """Leave the last state."""
        self._draw(due=True)

    def _draw(self, due: bool) -> None:
        now = self._clock()
        if not due and now - self._changed < SECONDS:
            return
        self._changed = now
        if self._change is None:
            self._change = self._show(self._html())
        else:
            self._change(self._html())

    def _html(self) -> str:
        percent = 100 * self._step / max(self._info.total_steps, 1)
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        return (
            f'<div class="holdfast-progress"><div><b>{escape(self._info.name)}</b> {escape(self._now)}</div>'
            f'{BAR.format(percent=percent)}<div style="opacity:.8;font-size:.9em">{lines}</div></div>'
        )


def _display(html: str) -> Callable[[str], None]:
    from IPython.display import HTML, display

    handle: Any = display(HTML(html), display_id=True)
    return lambda text: handle.update(HTML(text))
