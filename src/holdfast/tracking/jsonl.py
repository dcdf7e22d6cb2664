"""`metrics.jsonl`: one JSON object a line, cut back to a known length when a run resumes."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.execution.storage import Patience
from holdfast.registry import trackers
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import Json, JsonView

FILE_NAME = "metrics.jsonl"


def encode(record: JsonView) -> str:
    """One line of JSON: numbers in full precision, non-finite ones as null.

    >>> encode({"kind": "train", "loss": float("nan"), "rows": {"a": 2}})
    '{"kind": "train", "loss": null, "rows": {"a": 2}}'
    """
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    # Whatever is left is a number or an array of numpy or JAX; float32 to float is exact.
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return _plain(array.tolist())


def truncate(path: Path, length: int | None = None) -> int:
    """Cut a metrics file back to a length, and to its last whole line; returns the length it has then.

    Args:
        length: bytes to keep, as a checkpoint's manifest has it; None keeps every whole line.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _whole_lines(file, size if length is None else min(size, length))
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
    return end


def _whole_lines(file: Any, end: int) -> int:
    """The largest length up to `end` after which a line begins, reading backwards in blocks."""
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return int(start + newline + 1)
        end = start
    return 0


def parsed(line: bytes) -> Json | None:
    """The record of a line; None where the line is no record: damaged, or not of ours.

    >>> parsed(b'{"kind": "train", "step": 3}'), parsed(b'{"kind": "tra'), parsed(b"[1]")
    ({'kind': 'train', 'step': 3}, None, None)
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return record if type(record.get("step")) is int else None


def read_lines(path: Path) -> tuple[list[Json], list[int]]:
    """The records of a metrics file, and the numbers of its lines, from 1, that are damaged and left out.

    A torn last line, of a run that is alive or was killed, is no damage.
    """
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    found = [parsed(line) for line in lines]
    records = [record for record in found if record is not None]
    return records, [number for number, record in enumerate(found, start=1) if record is None]


def read(path: Path) -> list[Json]:
    """The records of a metrics file; damaged lines are left out, and so is a torn last one."""
    return read_lines(path)[0]


def _digest_of(path: Path) -> "hashlib._Hash":
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def digests(path: Path, lengths: Iterable[int]) -> dict[int, str | None]:
    """The digests of the first bytes of a metrics file, by their number; None where it does not have so many.

    A file that is missing has none.
    """
    wanted, found, digest, at = sorted(set(lengths)), {}, hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for length in wanted:
                while at < length and (block := file.read(min(length - at, 1 << 20))):
                    digest.update(block)
                    at += len(block)
                found[length] = digest.hexdigest() if at == length else None
    except (FileNotFoundError, IsADirectoryError):
        return {length: None if length else digest.hexdigest() for length in wanted}
    return found


@trackers.register("jsonl", help="metrics.jsonl in the run directory")
class JsonlSink(Sink):
    """Appends recorded events to `metrics.jsonl`, each as one whole line.

    A line that the disk refuses is written again, over what was torn, as long as the run's patience lasts.
    """

    def __init__(self, info: RunInfo) -> None:
        self.path = info.directory / FILE_NAME
        self._patience = info.patience
        self._file = self._patience.on(str(self.path), self._create)
        self._length = self._file.seek(0, os.SEEK_END)
        self._digest = _digest_of(self.path)

    def log(self, event: Event) -> None:
        """Append one recorded event."""
        if event.recorded:
            line = encode(event.record()).encode() + b"\n"
            self._patience.on(str(self.path), lambda: self._append(line))

    def length(self, *, durable: bool = True) -> int:
        """Bytes written so far, on disk when this returns if `durable`: what a checkpoint's manifest keeps."""
        if durable:
            # Not tried again: what a failed fsync left out is not written by the next one.
            Patience(0).on(str(self.path), lambda: os.fsync(self._file.fileno()))
        return self._length

    def digest(self) -> str:
        """The digest of all bytes written so far, as `digests` has it: what a checkpoint's manifest keeps."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _create(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate(self.path)
        # Unbuffered: a line is one write, so a killed process leaves at most one torn line.
        return self.path.open("ab", buffering=0)

    def _append(self, line: bytes) -> None:
        if self._file.closed:
            self._file = self._opened_again()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the disk took only a part of a line", str(self.path))
        except OSError as error:
            error.filename = str(self.path)  # a write by descriptor names no file
            with contextlib.suppress(OSError):
                self._file.close()
            raise
        self._length += len(line)
        self._digest.update(line)

    def _opened_again(self) -> io.FileIO:
        """The file as it was before the line that failed."""
        file = self.path.open("r+b", buffering=0)
        try:
            if file.seek(0, os.SEEK_END) < self._length:
                raise OSError(errno.EIO, "records that were written are not there any more", str(self.path))
            file.truncate(self._length)
            file.seek(self._length)
        except OSError:
            file.close()
            raise
        return file
