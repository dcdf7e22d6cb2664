"""Files of a run: written whole or not at all, and held by one process at a time."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import UserError


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
        sync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make a file or folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; what JSON cannot hold (nan) is an error, never a broken file."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def lock_file(run_dir: Path) -> Path:
    """The file that is held while a process works on a run."""
    return run_dir / "lock"


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder; a second process that wants it is refused.

    The kernel lets go of the lock when the process ends, however it ends.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = lock_file(run_dir)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UserError(
                f"{run_dir}: another process ({holder}) is working on this run; wait for it, or choose another --name"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {os.uname().nodename}")
        file.flush()
        try:
            yield
        finally:
            # A disk that has turned read-only keeps the name of a process that ended.
            with contextlib.suppress(OSError):
                file.truncate(0)


def is_locked(run_dir: Path) -> bool:
    """Whether a live process holds the run."""
    path = lock_file(run_dir)
    if not path.exists():
        return False
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
