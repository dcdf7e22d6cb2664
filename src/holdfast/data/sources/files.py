"""Rows of local files: JSON lines, JSON, parquet, arrow, csv and plain text, with the place of every row.

JSON lines and text are read here, since broken rows must be counted one by one and with their lines; every other
format goes through Hugging Face `datasets`, streamed.
"""

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from holdfast.data.documents import SourceContext
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.execution.storage import unreachable
from holdfast.types import Json

ENDINGS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "txt",
    ".txt.gz": "txt",
}
TOKEN_ENDINGS = {".bin": "bin", ".npy": "npy", ".ds": "ds"}  # files of ids, which `tokens.py` reads
LONGEST = 1 << 24  # bytes of one row; a longer one is broken, so that memory stays bounded
CHUNK = 2000  # bytes after which a text is cut at the next end of a paragraph
LONGEST_CHUNK = 8 * CHUNK  # a text without paragraphs is cut at a line's end before this
SMALL = 1 << 26  # files up to here are hashed each time, larger ones once
BATCH = 256  # rows asked of `datasets` at a time


class Row(NamedTuple):
    """The fields of a row and where it stands."""

    fields: Json
    file: str
    line: int


def format_of(path: Path) -> str | None:
    """The format that a file's ending names.

    >>> format_of(Path("train.json.gz"))
    'json'
    """
    for ending in ("".join(path.suffixes[-2:]), path.suffix):
        if ending.lower() in ENDINGS:
            return ENDINGS[ending.lower()]
    return None


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder: `train.jsonl`, `train-00000-of-00002.parquet`, or a folder `train`."""
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if path.is_file()
        and format_of(path)
        and (path.name.split(".")[0] == split or path.name.startswith(f"{split}-"))
    ]
    inside = folder / split
    if not found and inside.is_dir():
        found = [path for path in inside.rglob("*") if path.is_file() and format_of(path)]
    return sorted(found)


def read_files(paths: list[Path], format: str | None, sample_by: str, context: SourceContext) -> Iterator[Row]:
    """All rows of some files, in order; what cannot be read as a row goes to `context.broken`."""
    total = sum(path.stat().st_size for path in paths) or 1
    before = 0
    for path in paths:
        size = path.stat().st_size
        kind = format or format_of(path) or "txt"
        yield from _read_file(path, kind, sample_by, context, before / total, size / total)
        before += size
        context.fraction = before / total


def _read_file(
    path: Path, kind: str, sample_by: str, context: SourceContext, start: float, share: float
) -> Iterator[Row]:
    if kind == "txt" or kind == "jsonl" or (kind == "json" and not _is_array(path)):
        try:
            with path.open("rb") as raw, _unpacked(path, raw) as file:
                rows = _read_text(file, path, sample_by, context) if kind == "txt" else _read_lines(file, path, context)
                for number, row in enumerate(rows):
                    if number % BATCH == 0:
                        context.fraction = start + share * min(raw.tell() / max(path.stat().st_size, 1), 1.0)
                    yield row
        except (EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            if unreachable(error) is not None:
                raise  # not the file's fault
            raise UserError(f"{path}: cannot be read: {error}") from None
    else:
        yield from _read_table(path, kind)


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[return-value]  # file-like


def _is_array(path: Path) -> bool:
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            return file.read(64).lstrip()[:1] == b"["
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _lines(file: IO[bytes], path: Path, context: SourceContext) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, no longer than LONGEST."""
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST)
            context.broken.add("too long", path.name, number, f"more than {LONGEST} bytes")
            continue
        yield number, line


def _read_lines(file: IO[bytes], path: Path, context: SourceContext) -> Iterator[Row]:
    broken = context.broken
    for number, line in _lines(file, path, context):
        if line.isspace():
            broken.add("empty line", path.name, number)
            continue
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            broken.add("invalid UTF-8", path.name, number, f"byte {error.start}: {error.reason}")
        except (ValueError, RecursionError) as error:
            broken.add("bad JSON", path.name, number, str(error))
        else:
            if isinstance(fields, dict):
                yield Row(fields, path.name, number)
            else:
                broken.add("not a mapping", path.name, number, f"it is {type(fields).__name__}")


def _read_text(file: IO[bytes], path: Path, sample_by: str, context: SourceContext) -> Iterator[Row]:
    if sample_by == "line":
        pieces: Iterator[tuple[int, bytes]] = _lines(file, path, context)
    elif sample_by == "file":
        content = file.read(LONGEST + 1)
        pieces = iter([(1, content)])
        if len(content) > LONGEST:
            context.broken.add("too long", path.name, 1, f"more than {LONGEST} bytes; use sample_by: chunk")
            return
    else:
        pieces = _chunks(file)
    for number, piece in pieces:
        try:
            text = piece.decode().strip("\r\n")
        except UnicodeDecodeError as error:
            line = number + piece[: error.start].count(b"\n")
            context.broken.add("invalid UTF-8", path.name, line, f"{error.reason}")
            continue
        if text and not text.isspace():  # blank lines separate texts, they are none
            yield Row({"text": text}, path.name, number)


def _chunks(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """A text cut at ends of paragraphs after every CHUNK bytes, with the lines where the pieces start."""
    buffer, line, ended = b"", 1, False
    while not ended or buffer:
        if not ended:
            block = file.read(1 << 20)
            ended = not block
            buffer += block
        start = 0
        while len(buffer) - start > (0 if ended else LONGEST_CHUNK):
            stop = _cut(buffer, start)
            yield line, buffer[start:stop]
            line += buffer.count(b"\n", start, stop)
            start = stop
        buffer = buffer[start:]


def _cut(buffer: bytes, start: int) -> int:
    paragraph = buffer.find(b"\n\n", start + CHUNK, start + LONGEST_CHUNK)
    if paragraph >= 0:
        return paragraph + 2
    if len(buffer) - start <= LONGEST_CHUNK:
        return len(buffer)
    for mark in (b"\n", b" "):
        found = buffer.rfind(mark, start + 1, start + LONGEST_CHUNK)
        if found >= 0:
            return found + 1
    stop = min(start + LONGEST_CHUNK, len(buffer))
    while stop < len(buffer) and stop > start + 1 and buffer[stop] & 0xC0 == 0x80:
        stop -= 1  # never inside a character
    return stop


def _read_table(path: Path, kind: str) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = load_dataset(kind, data_files=[str(path)], split="train", streaming=True)
        for number, fields in enumerate(batched_rows(rows), 1):
            yield Row(fields, path.name, number)
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # pyarrow, fsspec and datasets raise their own types for a bad file
        raise UserError(f"{path}: cannot be read as {kind}: {error}") from None


def batched_rows(rows: Any) -> Iterator[Json]:
    """The rows of a dataset of the `datasets` library, fetched many at a time."""
    for batch in rows.iter(batch_size=BATCH):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def file_hash(path: Path, cache: Path) -> str:
    """A hash of a file's content; that of a large file is remembered until its size or time changes."""
    status = path.stat()
    if status.st_size <= SMALL:
        return _hash(path)
    state = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    note = cache / "hashes" / f"{hashlib.sha256(str(state[0]).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no note, or a damaged one
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["state"] == state:
            return str(known["hash"])
    found = _hash(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"state": state, "hash": found})
    return found


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
