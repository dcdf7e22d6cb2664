"""Every way to look at a run, tried on one that may be damaged, beside one that is good."""

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from holdfast.errors import UserError
from holdfast.report import compare, live, print_summary, readable, write_report

SECONDS = 60


class TookTooLongError(BaseException):
    """A look at a run that did not end."""


def looks(good: Path, bad: Path) -> dict[str, Callable[[], object]]:
    """The commands, by name."""

    def show() -> None:
        with readable(bad):
            print_summary(bad, Console(file=io.StringIO()))

    def report() -> None:
        with readable(bad):
            write_report(bad, pictures=False)

    def comparison() -> None:
        with readable(bad):
            found = compare.compare([good, bad])
            compare.print_comparison(found, Console(file=io.StringIO()))
            compare.render(found)

    def board() -> None:
        listed = {status.path: status for status in live.statuses(good.parent)}
        assert listed[good.name].state == "finished", "a bad run hides a good one"

    return {"show": show, "report": report, "compare": comparison, "board": board}


def tried(good: Path, bad: Path) -> Iterator[tuple[str, str, bool]]:
    """Each command with what came of it, and whether that is right: shown, or one message."""
    for name, look in looks(good, bad).items():
        try:
            with _limited(SECONDS):
                look()
            yield name, "shown", True
        except (UserError, OSError) as error:
            line = str(error)
            yield name, "one message", len(line) < 2000 and "\n" not in line.strip()
        except BaseException as error:
            yield name, f"{type(error).__name__}: {error}"[:200], False


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TookTooLongError(f"{seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
