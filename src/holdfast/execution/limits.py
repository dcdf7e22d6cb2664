"""Limits that a process is started with (`ulimit`): too little memory, too few files, said in one line.

Memory is the hard one. XLA ends the process where it cannot have some (a thread, a buffer), in a stack of C++ that
tells a user nothing, and no Python code runs any more. So a command that computes under a limit is started once more
as a child, and its parent says what happened.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import IO

from holdfast.errors import RunError
from holdfast.execution.storage import REASONS

SMALLEST_ADDRESS_SPACE = 384 << 20  # with which the libraries can be imported, with room for a small store
FEWEST_FILES = 64  # that a small run has open at once, with room for its store and a checkpoint's files
MANY_FILES = 4096
WATCHED = "HOLDFAST_WATCHED"  # set in the child, whose parent speaks for it
# The C library has an exit code of its own for a thread that gets no memory.
CRASHED = {127, *(-n for n in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP))}
# The first line of what a library writes when it ends the process: this and what follows is for its developers.
LAST_WORDS = re.compile(
    rb"terminate called|LLVM ERROR|cannot allocate memory|\s*what\(\):|F\d{4} \d\d:\d\d|\*\*\* |Fatal Python error|"
    rb"\s+@\s+0x|PC: @"
)


def address_space() -> int | None:
    """Bytes of memory that this process may have (`ulimit -v`); None where there is no limit."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if allowed == resource.RLIM_INFINITY else allowed


def check_address_space() -> None:
    """Refuse to start in less memory than it takes to import what a command needs.

    Below that, OpenBLAS fails while NumPy is imported: in lines of its own, or by waiting without end. So this comes
    before NumPy. Where there is a limit, OpenBLAS also gets one thread, since each takes tens of megabytes for itself.
    """
    allowed = address_space()
    if allowed is None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if allowed < SMALLEST_ADDRESS_SPACE:
        raise RunError(
            f"{REASONS[errno.ENOMEM]}: this process may have {allowed >> 20} MB, and needs "
            f"{SMALLEST_ADDRESS_SPACE >> 20} MB to start: raise the limit (`ulimit -v`)"
        )


def check_files() -> None:
    """Take as many open files as this process may have, and refuse to compute with very few.

    A checkpoint is written by coroutines, each with files of its own: where they cannot be opened the libraries leave
    coroutines behind that nobody waits for, in hundreds of lines.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        raise RunError(
            f"this process may open {soft} files, and needs {FEWEST_FILES}: "
            f"raise the limit (`ulimit -n {FEWEST_FILES}`)"
        )


def watch_memory() -> None:
    """Where memory is limited, let a child do the work and end with its exit code; where it crashes, say why.

    Returns in the child, and where there is no limit.
    """
    allowed = address_space()
    if allowed is None or os.environ.get(WATCHED):
        return
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]], env={**os.environ, WATCHED: "1"}, stderr=subprocess.PIPE
    )

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C comes to the child too
    assert child.stderr is not None, "asked for"
    reader = threading.Thread(target=_copy, args=(child.stderr,), daemon=True)
    reader.start()
    code = child.wait()
    reader.join(5)
    if code in CRASHED:
        print(
            f"failed: {REASONS[errno.ENOMEM]}: this process may have {allowed >> 20} MB, and a library ended it "
            "when it could not have more; what was saved before is intact: raise the limit (`ulimit -v`), and the same "
            "command goes on",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(128 - code if code < 0 else code)


def _copy(pipe: IO[bytes]) -> None:
    """Pass on what is said, up to a library's last words."""
    crashed = False
    for line in pipe:
        crashed = crashed or LAST_WORDS.match(line) is not None
        if not crashed:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
