"""A thread that ends a process which waits for something that does not come, and says what it was."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.execution import processes

EXIT_CODE = 124  # as of timeout(1)


@dataclass
class _Wait:
    what: str
    seconds: float = 0.0


class Watchdog:
    """Ends the process when one wait takes too long; use it as a context manager.

    It counts its own ticks, not the clock: while the whole process is stopped, or the machine asleep, no time passes.

    Args:
        seconds: how long a wait may take; 0 watches nothing.
        folder: where the stacks of all threads are written before the end.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds = seconds
        self.report = folder / f"stuck-process-{processes.index()}.txt"
        self._wait: _Wait | None = None
        self._over = threading.Event()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Watch the block, which waits for what is named; a wait inside another is counted by itself."""
        outer, self._wait = self._wait, _Wait(what)
        try:
            yield
        finally:
            self._wait = outer

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        tick = min(1.0, self.seconds / 4)
        while not self._over.wait(tick):
            wait = self._wait
            if wait is None:
                continue
            wait.seconds += tick
            if wait.seconds >= self.seconds:
                self._end(wait.what)

    def _end(self, what: str) -> None:
        with contextlib.suppress(OSError), self.report.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"failed: {self.seconds:g} s passed in waiting for {what} (topology/step_timeout); the stacks of this "
            f"process are in {self.report}; the same command goes on from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CODE)
