"""Files of a run: written whole or not at all, and held by one process at a time."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from holdfast.errors import UserError
from holdfast.execution.faults import fault_point

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # as `tempfile.mkstemp` makes names


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(
                OSError
            ):  # tells `remove_leftovers` that somebody writes; not every disk has locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
            Path(name).chmod(0o644)
            fault_point("replace")
            Path(name).replace(path)
        sync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed processes left of `write_atomically` anywhere below a folder; what is being written stays."""
    removed = []
    for path in folder.rglob(".*"):
        if not _TEMPORARY.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        with contextlib.suppress(OSError), locked(path) as (mine, _):
            if mine:
                path.unlink()
                removed.append(path)
    return removed


def file_digests(folder: Path, root: Path) -> dict[str, str]:
    """The digest of every file below a folder, by its path below the root."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def altered_files(root: Path, known: Mapping[str, str]) -> list[str]:
    """The files, by their paths below the root, that are not there any more or have another digest than was known."""
    altered = []
    for name, digest in known.items():
        path = root / name
        same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()[: len(digest)] == digest
        altered += [] if same else [name]
    return altered


def make_private(folder: Path) -> str | None:
    """Make a folder that only this user may look into; why one that is there is not to be trusted, else None."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder of its own"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write in {folder}"
    return None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; what is no regular file, such as a pipe that would never answer, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = 1 << 28) -> bytes:
    """The content of a regular file that is read as a whole; one that is too large for that is an OSError."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
        return file.read()


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
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[tuple[bool, IO[str]]]:
    """Hold a lock file; the kernel lets go of it when the process ends, however it ends.

    Args:
        waiting: called before waiting for another process; None does not wait, and yields False.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another, or a file that this process may not lock
            if waiting is None:
                yield False, file
                return
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True, file


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder; a second process that wants it is refused."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(lock_file(run_dir)) as (mine, file):
        if not mine:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UserError(
                f"{run_dir}: another process ({holder}) is working on this run; wait for it, or choose another --name"
            )
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
    if not path.is_file():  # a pipe of that name would never open
        return False
    with locked(path) as (mine, _):
        return not mine
