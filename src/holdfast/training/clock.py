"""Where the time of a run goes."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Seconds spent on each kind of work since it was last read."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Count the block as that kind of work."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - started)

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds as that kind of work."""
        self._spent[kind] = self._spent.get(kind, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """What was spent, rounded; the clock starts again."""
        spent, self._spent = self._spent, {}
        return {kind: round(seconds, 4) for kind, seconds in spent.items()}
