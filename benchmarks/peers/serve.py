"""How a worker talks to the harness: JSON lines on its standard streams; needs nothing but Python.

A worker says once what it is ("parameters", "losses" of its first steps, "versions"), then does timed steps whenever
it is asked to, one worker at a time.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKED_STEPS = 3  # whose losses are compared with ours; they also warm up
THREADS = 2


def peak_memory() -> int:
    """The most bytes this process has had in memory, itself alone."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def open_pipe() -> Callable[[dict[str, Any]], None]:
    """A function that answers the harness; what libraries print goes to the log instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(facts: dict[str, Any]) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    return say


def serve(train: Callable[[int], list[float]], facts: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Answer until standard input ends.

    Args:
        train: takes some steps, waits for them and returns their losses.
        facts: what is known before the first step, such as the number of parameters.
    """
    say({**facts, "losses": train(CHECKED_STEPS)})
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        started = time.perf_counter()
        train(steps)
        say({"seconds": time.perf_counter() - started, "memory": peak_memory()})
