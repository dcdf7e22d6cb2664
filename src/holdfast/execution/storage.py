"""Disks that fill up, turn read-only or vanish for a while: wait for them, then end with one line.

What a run writes, it writes whole or not at all, so anything that failed can be tried again. A folder that vanished
may come back as an empty one (a mount point without its mount); before writing, the lock that the run holds is looked
for, so that nothing is written beside the run.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import RunError

T = TypeVar("T")

REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "a file may not become larger here",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOENT: "the folder is gone",
    errno.ENOTDIR: "the folder is gone",
    errno.ESTALE: "the shared folder is gone",
    errno.ENODEV: "the disk is gone",
    errno.ENOTCONN: "the shared folder is not connected",
    errno.EHOSTDOWN: "the host of the shared folder is down",
    errno.EHOSTUNREACH: "the host of the shared folder cannot be reached",
    errno.ETIMEDOUT: "the disk does not answer",
    errno.EIO: "the disk reports an error",
    errno.ENAMETOOLONG: "a name is too long for this disk",
    errno.EMFILE: "this process may not open more files: raise the limit (`ulimit -n`)",
    errno.ENFILE: "this machine cannot open more files",
    errno.ENOMEM: "there is too little memory",
}
_LIMITS = {REASONS[number] for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)}
# How libraries say that memory, or a thread, was not to be had.
_NO_MEMORY = re.compile(
    "RESOURCE_EXHAUSTED|bad_alloc|[Cc]annot allocate memory|failed to map segment|can't start new thread"
)
# Not the fault of the file that is read, so no reason to think it damaged.
_NOT_THE_FILE = {
    reason for number, reason in REASONS.items() if number not in (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EFBIG)
}
# A connection over the network raises these too, but names no file.
_ALSO_NETWORK = {errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT}
_NUMBER = re.compile(r"(?:OS error |os_error_code=')(\d+)")  # as the versions of TensorStore write it
# What TensorStore or Orbax wrote a moment ago is not there when they go on: no call failed, so there is no number.
_VANISHED = re.compile(
    r"NOT_FOUND:.*(?:Error writing .*local file|local file .*\.orbax-checkpoint-tmp)"
    r"|No ArrayMetadata found .*\.orbax-checkpoint-tmp",
    re.DOTALL,
)
LONGEST_PAUSE = 5.0


def disk_reason(error: BaseException | None) -> str | None:
    """What is wrong with the disk, if that is why this was raised; None for any other error.

    Libraries wrap an error of the system in their own, or write its number into their text.

    >>> disk_reason(OSError(28, "No space left on device"))
    'the disk is full'
    >>> disk_reason(ValueError('INTERNAL: Error writing "x" [OS error 30: EROFS Read-only file system]'))
    'the disk is read-only'
    >>> disk_reason(ValueError("shapes differ")) is None
    True
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return REASONS[errno.ENOMEM]
        numbers: list[int | None] = [int(number) for number in _NUMBER.findall(str(error))]
        if isinstance(error, OSError) and (error.filename is not None or error.errno not in _ALSO_NETWORK):
            numbers.append(error.errno)
        for number in numbers:
            if number in REASONS:
                return REASONS[number]
        if _NO_MEMORY.search(str(error)):
            return REASONS[errno.ENOMEM]
        if _VANISHED.match(str(error)):
            return REASONS[errno.ENOENT]
        error = error.__cause__ or error.__context__
    return None


def unreachable(error: BaseException) -> str | None:
    """What is wrong with the disk as a whole, if that is why a file could not be read; None if the file may be bad."""
    reason = disk_reason(error)
    return reason if reason in _NOT_THE_FILE else None


def remedy(reason: str) -> str:
    """What the user can do about a reason."""
    return "give this process more of it" if reason in _LIMITS else "mend the disk"


def failed_line(error: BaseException) -> str | None:
    """What to tell the user when a disk, or a limit, is why this was raised; None for any other error."""
    reason = unreachable(error) or _limit_reached()
    return None if reason is None else f"failed: {reason}: {' '.join(str(error).split())[:300]}"


def _limit_reached() -> str | None:
    """Whether no more files can be opened: an import then fails as if the module did not exist."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        reason = REASONS.get(error.errno or 0)
        return reason if reason in _LIMITS else None
    return None


class Patience:
    """How long a run waits for its disk, and what it has to find there before it writes.

    Args:
        seconds: from the first refusal to giving up.
        marker: a file that must be the one that was there when this was made; None looks for nothing.
        say: shows a line to the user.
    """

    def __init__(self, seconds: float, marker: Path | None = None, say: Callable[[str], object] | None = None) -> None:
        self.seconds = seconds
        self._marker = marker
        self._identity = _identity(marker) if marker is not None else None
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    def check(self) -> None:
        """Raise an OSError if the folder is not the one that the run holds."""
        if self._marker is not None and _identity(self._marker) != self._identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._marker.parent))

    def on(self, what: str, action: Callable[[], T]) -> T:
        """Do what writes; while the disk refuses, pause and do it again, then give up with a RunError.

        Args:
            what: what is written, for the user.
            action: must leave nothing behind that a second try would trip over.
        """
        refused_at: float | None = None
        pause = 0.1
        while True:
            try:
                self.check()
                done = action()
            except Exception as error:
                reason = disk_reason(error)
                if reason is None:
                    raise
                now = time.monotonic()
                if refused_at is None:
                    refused_at = now
                    if self.seconds > 0:
                        self.say(f"{what}: {reason}; trying again for up to {self.seconds:g} s")
                if now - refused_at >= self.seconds:
                    raise RunError(gave_up(what, reason, self.seconds)) from error
                time.sleep(min(pause, max(0.0, refused_at + self.seconds - now)))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if refused_at is not None:
                self.say(f"{what}: written after {time.monotonic() - refused_at:.1f} s")
            return done


def gave_up(what: str, reason: str, seconds: float) -> str:
    """The message of a run that its disk has stopped."""
    waited = f", after {seconds:g} s" if seconds else ""
    return f"{what}: {reason}{waited}; what was saved before is intact: {remedy(reason)}, and the same command goes on"


def _identity(path: Path) -> int:
    # Not the device: a shared folder that is mounted again may have another one.
    return path.stat().st_ino
