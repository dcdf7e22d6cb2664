"""One tracker that hands every event to its sinks; a sink that fails is dropped and never stops training.

All but one: without its records a run could not be resumed, so the sink of `metrics.jsonl` waits for its disk and then
ends the run.
"""

import abc
import bisect
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast import registry
from holdfast.conversion import without_places
from holdfast.errors import RunError, UserError
from holdfast.execution.storage import Patience
from holdfast.tracking.events import Event, message
from holdfast.types import JsonView


@dataclass(frozen=True)
class RunInfo:
    """What sinks know about the run before it starts.

    Args:
        directory: the run's directory; sinks write nowhere else.
        stages: (first step, name) of each stage.
        start_step: the step that the run goes on from; above 0 for a resumed run.
        config: the resolved configuration as plain containers.
        patience: how long what the run cannot do without waits for its disk.
    """

    directory: Path
    name: str = "default"
    project: str = "general"
    group: str = "default"
    id: str = ""
    total_steps: int = 0
    tokens_per_step: int = 1
    stages: tuple[tuple[int, str], ...] = ()
    start_step: int = 0
    config: JsonView = field(default_factory=dict)
    patience: Patience = field(default_factory=lambda: Patience(0))

    def stage_name(self, steps_completed: int) -> str:
        """The stage of the last completed step.

        >>> info = RunInfo(Path("."), stages=((0, "a"), (4, "b")))
        >>> [info.stage_name(step) for step in (0, 4, 5)]
        ['a', 'a', 'b']
        """
        if not self.stages:
            return ""
        starts = [start for start, _ in self.stages]
        index = bisect.bisect_right(starts, max(steps_completed - 1, 0)) - 1
        return self.stages[max(index, 0)][1]


class Sink(abc.ABC):
    """Where events go; `flush` and `close` do nothing unless a sink has something to do there."""

    @abc.abstractmethod
    def log(self, event: Event) -> None:
        """Write one event down."""

    def summarize(self, step: int, results: JsonView, pictures: Mapping[str, Path]) -> None:  # noqa: B027
        """Take the results of a whole run, as `results.json` has them, and its pictures as PNG files by name."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Hand everything logged so far to the operating system or service."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release files, threads and connections."""


class Tracker:
    """Hands events to sinks. Use it as a context manager, so that sinks are closed whatever happens."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    @classmethod
    def open(cls, names: Sequence[str], info: RunInfo) -> "Tracker":
        """Open registered sinks by name; a missing extra is a UserError, any other failure only a warning."""
        tracker = cls({})
        info = dataclasses.replace(info, config=without_places(info.config))  # trackers share what they are told
        try:
            for name in dict.fromkeys(names):
                make = registry.trackers.get(name, path="logging/trackers")
                tracker._attempt(name, lambda name=name, make=make: tracker._sinks.__setitem__(name, make(info)))
        except BaseException:
            tracker.close()
            raise
        return tracker

    def log(self, kind: str, step: int = 0, tokens: int = 0, values: JsonView | None = None) -> None:
        """Hand one event to every sink."""
        self.emit(Event(kind, step, tokens, values or {}))

    def message(self, text: str, step: int = 0, tokens: int = 0) -> None:
        """Show one line to the user."""
        self.emit(message(text, step, tokens))

    def emit(self, event: Event) -> None:
        """Hand one event to every sink."""
        for name, sink in list(self._sinks.items()):
            self._attempt(name, lambda sink=sink: sink.log(event))

    def summarize(self, step: int, directory: Path) -> None:
        """Hand the results of a run and the pictures below its `figures` to every sink; without results nothing."""
        try:
            results = json.loads((directory / "results.json").read_bytes())
        except (OSError, ValueError):
            return
        pictures = {path.stem: path for path in sorted((directory / "figures").glob("*.png"))}
        for name, sink in list(self._sinks.items()):
            self._attempt(name, lambda sink=sink: sink.summarize(step, results, pictures))

    def flush(self) -> None:
        """Flush every sink."""
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.flush)

    def sink(self, name: str) -> Sink | None:
        """The sink of that name, unless it failed."""
        return self._sinks.get(name)

    def close(self) -> None:
        """Close every sink, each whether or not another fails."""
        for name, sink in reversed(list(self._sinks.items())):
            self._attempt(name, sink.close)
        self._sinks.clear()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, name: str, action: Any) -> None:
        try:
            action()
        except (UserError, RunError):
            raise
        except Exception as error:
            self._sinks.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: the tracker {name!r} failed and is switched off: {reason}", file=sys.stderr)
