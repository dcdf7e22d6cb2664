"""Named points of the program at which a test may stop it: the process is killed there, or a hook is called.

Nothing happens at a point unless the environment variable `HOLDFAST_FAULT` names it, or a hook was set in this process.
`HOLDFAST_FAULT=NAME:COUNT` kills the process without warning when it passes the point for the COUNTth time.
"""

import os
import signal
from collections.abc import Callable

VARIABLE = "HOLDFAST_FAULT"
# In the order in which a run passes them; `campaign kills` tries each.
POINTS = (
    "start",  # the folder is held, nothing is read
    "prepared",  # the data is there
    "restored",  # the state is there, nothing is written yet
    "run files",  # config and tokenizer are written
    "replace",  # a file is written under its temporary name, not yet renamed
    "first step",
    "sampled",  # rows of self-replay are made
    "stage entered",
    "step",  # after an optimizer step, before what is due after it
    "evaluated",  # a measurement is made, its record is not
    "checkpoint",  # before one is begun
    "checkpoint pruned",  # old ones are removed
    "checkpoint begun",  # the background writes
    "checkpoint written",  # it is complete
    "results",  # results.json is written, the report is not
    "report",  # the report is written
    "trained",  # all steps are done
    "end",  # everything is written, the folder is still held
)

_hook: Callable[[str], None] | None = None


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call something at every point; None calls nothing."""
    global _hook
    _hook = hook


def fault_point(name: str) -> None:
    """A point at which the process may be made to die; does nothing otherwise."""
    if _hook is not None:
        _hook(name)


def at_point(wanted: str, count: int, act: Callable[[], object]) -> Callable[[str], None]:
    """A hook that does something when the process passes a point for the given time."""
    left = count

    def hook(name: str) -> None:
        nonlocal left
        if name == wanted:
            left -= 1
            if left == 0:
                act()

    return hook


def kill_at(wanted: str, count: int = 1) -> Callable[[str], None]:
    """A hook that kills the process when it passes a point for the given time."""
    return at_point(wanted, count, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _from_environment() -> None:
    name, _, count = os.environ.get(VARIABLE, "").partition(":")
    if name in POINTS:
        set_hook(kill_at(name, int(count) if count.isdigit() else 1))


_from_environment()
