"""Several local processes started together: one port, one output with prefixes, and one end for all of them."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for the others to say something before they are ended, and again before they are killed
# Lines of the libraries below that tell a user nothing; a stack of C++ tells something only of the process that failed.
NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected")
STACK = re.compile(rb"\s+@\s+0x[0-9a-f]+|\*\*\* Check failure stack trace")
DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child_environment(environ: Mapping[str, str], index: int, count: int, devices: int) -> dict[str, str]:
    """The environment of one process: its devices, whatever they are, and its share of the processors.

    CPUs pose as that many devices; of GPUs each process takes the next so many.
    """
    env = dict(environ)
    env["XLA_FLAGS"] = DEVICE_COUNT.sub("", env.get("XLA_FLAGS", "")).strip()
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
    env["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + number) for number in range(devices))
    env.setdefault("PJRT_NPROC", str(max(1, len(os.sched_getaffinity(0)) // count)))
    env["PYTHONUNBUFFERED"] = "1"
    return env


def describe(code: int) -> str:
    """How a process ended, for people.

    >>> describe(-9), describe(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run_all(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> int:
    """Run commands side by side to their common end; returns the exit code of the first that failed, or 0.

    A signal to this process goes on to all of them. When one fails, the others are ended.
    """
    # Groups of their own, so that a terminal's Ctrl-C comes once, from here; the threads come after the last start.
    started = [
        subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_end_with_parent,  # there are no threads yet
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    output = _Output()
    with _forwarding(started) as forwarded:
        try:
            readers = [
                output.forward(index, pipe, target)
                for index, process in enumerate(started)
                for pipe, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
                if pipe is not None
            ]
            failed = _first_failure(started)
            output.failed = failed is not None
            if failed is not None and not forwarded:
                _end_others(started)
            for process in started:
                process.wait()
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
    for reader in readers:
        reader.join(GRACE_SECONDS)
    if failed is None:
        return 0
    index, code = failed
    if not (forwarded and code == 128 + forwarded[0]):
        print(
            f"failed: process {index} of {len(started)} {describe(code)}, so all were ended; "
            "the same command goes on from the newest checkpoint",
            file=sys.stderr,
        )
    return 128 - code if code < 0 else code


def _first_failure(started: Sequence["subprocess.Popen[bytes]"]) -> tuple[int, int] | None:
    """Wait until one fails or all have ended well; its number and how it ended, as `Popen` tells it."""
    while True:
        codes = [process.poll() for process in started]
        # Of several that are found ended at once, one that was killed is the cause and the others its consequence.
        ended = sorted((code, index) for index, code in enumerate(codes) if code)
        if ended:
            return ended[0][1], ended[0][0]
        if None not in codes:
            return None
        time.sleep(POLL_SECONDS)


def _end_others(started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in started if process.poll() is None]
        for process in alive:
            if number is not None:
                process.send_signal(number)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in alive):
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _forwarding(started: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[int]]:
    """Send signals that ask to stop on to all processes; yields those that came."""
    forwarded: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        forwarded.append(number)
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield forwarded
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Output:
    """Whole lines of all processes, each after the number of its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.failed = False

    def forward(self, index: int, pipe: IO[bytes], target: IO[bytes]) -> threading.Thread:
        """Copy lines from a pipe in the background until it ends."""

        def copy() -> None:
            for line in pipe:
                if NOISE.search(line) or (self.failed and STACK.match(line)):
                    continue
                with self._lock, contextlib.suppress(BrokenPipeError):
                    target.write(b"[%d] %s\n" % (index, line.rstrip(b"\r\n")))
                    target.flush()

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        return thread


def _end_with_parent() -> None:
    """Ask the kernel to stop this process politely when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
