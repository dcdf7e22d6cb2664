"""Rows of local files: JSON lines, JSON, parquet, arrow, csv and plain text, with the place of every row.

JSON lines, csv and text are read here, since broken rows must be counted one by one and with their lines; every other
format goes through Hugging Face `datasets`, streamed.
"""

import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from holdfast.data.documents import SourceContext
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.execution.storage import unreachable
from holdfast.types import Json

# The format that a file's ending names; all but parquet and arrow, which pack by themselves, may also be packed.
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".md": "txt",
}
PACKED = (".gz", ".zst")
UNPACKED_ONLY = ("parquet", "arrow")
KNOWN = (
    f"{', '.join(ENDINGS)}, and all but {' and '.join(UNPACKED_ONLY)} also with {' or '.join(PACKED)} after it; "
    "token ids in .bin, .npy and .ds"
)
DELIMITERS = (",", ";", "\t", "|")  # that are tried for a csv file, in this order
SNIFFED = 1 << 16  # bytes of it that are looked at
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
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    if last not in PACKED:
        return ENDINGS.get(last)
    found = ENDINGS.get(before[-1])
    return None if found in UNPACKED_ONLY else found


class Reading(NamedTuple):
    """How files are read, where their endings do not say it all.

    Args:
        format: one of FORMATS; None goes by each file's ending.
        sample_by: what a document of a plain text file is.
        delimiter: between the fields of csv; None finds it.
        encodings: of texts, tried in this order; none is UTF-8, or what a byte order mark says.
    """

    format: str | None = None
    sample_by: str = "chunk"
    delimiter: str | None = None
    encodings: tuple[str, ...] = ()


BY_ENDING = Reading()


def saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a dataset that `datasets` saved with `save_to_disk`, in order; None where it is none."""
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in known["_data_files"]]
        shuffled = bool(known.get("_indices_files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{state}: a damaged dataset of save_to_disk: {error!r}") from None
    if shuffled:
        raise UserError(f"{folder}: its rows are in an order of its own; save it again after flatten_indices()")
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UserError(f"{state}: a damaged dataset of save_to_disk: it names files outside of its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder}: a dataset of save_to_disk without its file {missing[0]}")
    return [folder / name for name in names]


def saved_splits(folder: Path) -> dict[str, list[Path]] | None:
    """The files of each split of a folder of `save_to_disk`; None where it is none."""
    whole = saved_dataset(folder)
    if whole is not None:
        return {"train": whole}
    if not (folder / "dataset_dict.json").is_file():
        return None
    found = {split: saved_dataset(folder / split) for split in ("train", "validation", "test")}
    return {split: paths for split, paths in found.items() if paths}


def say_left_out(where: str, paths: Iterable[Path]) -> None:
    """Tell on stderr, once in a process, which files of a folder are not read."""
    counts = Counter("".join(path.suffixes[-2:] if path.suffix in PACKED else path.suffixes[-1:]) for path in paths)
    if counts:
        _say_once(f"{where}: left out: {listed_endings(counts)}; known are {KNOWN}")


def listed_endings(counts: Counter[str]) -> str:
    """Endings with how many files have them.

    >>> listed_endings(Counter({".png": 2, "": 1}))
    '2 × .png, 1 × without an ending'
    """
    return ", ".join(f"{count} × {ending or 'without an ending'}" for ending, count in counts.most_common(10))


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def read_files(paths: list[Path], reading: Reading, context: SourceContext) -> Iterator[Row]:
    """All rows of some files, in order; what cannot be read as a row goes to `context.broken`."""
    total = sum(path.stat().st_size for path in paths) or 1
    before = 0
    for path in paths:
        size = path.stat().st_size
        kind = reading.format or format_of(path)
        if kind is None:
            raise UserError(f"{path}: an ending that is not known; known are {KNOWN}; or set format")
        yield from _read_file(path, kind, reading, context, (before / total, size / total))
        before += size
        context.fraction = before / total


def _read_file(
    path: Path, kind: str, reading: Reading, context: SourceContext, part: tuple[float, float]
) -> Iterator[Row]:
    if kind in UNPACKED_ONLY or (kind == "json" and _is_array(path)):
        yield from _read_table(path, kind)
        return
    readers = {"txt": _read_text, "jsonl": _read_lines, "json": _read_lines}
    with (
        _faults_of(path),
        path.open("rb") as raw,
        _unpacked(path, raw) as packed,
        _as_utf8(packed, reading) as file,
    ):
        rows = readers.get(kind, partial(_read_csv, tabs=kind == "tsv"))(file, path, reading, context)
        for number, row in enumerate(rows):
            if number % BATCH == 0:
                context.fraction = part[0] + part[1] * min(raw.tell() / max(path.stat().st_size, 1), 1.0)
            yield row


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """A file that cannot be unpacked or read is the user's to mend."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        if unreachable(error) is not None:
            raise  # not the file's fault
        raise UserError(f"{path}: cannot be read: {error}") from None


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix.lower() == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"), 1 << 20)
    return gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw  # type: ignore[return-value]  # file-like


def _as_utf8(file: IO[bytes], reading: Reading) -> IO[bytes]:
    """The same file without a byte order mark, and in UTF-8 where its own encoding has no plain line ends."""
    whole = io.BufferedReader(file, 1 << 16)  # type: ignore[type-var]  # file-like
    start = whole.peek(4)[:4]
    if start.startswith(codecs.BOM_UTF8):
        whole.read(len(codecs.BOM_UTF8))
        return whole
    wide = None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        wide = "utf-16"
    elif reading.encodings and all(map(_is_wide, reading.encodings)):
        wide = reading.encodings[0]
    if wide is None:
        return whole
    return io.BufferedReader(_Recoded(codecs.EncodedFile(whole, "utf-8", wide)), 1 << 16)


def _is_wide(encoding: str) -> bool:
    """Whether a line end in that encoding is more than one byte."""
    return codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))


class _Recoded(io.RawIOBase):
    """What `codecs.EncodedFile` gives, as a file that can be read line by line."""

    def __init__(self, file: codecs.StreamRecoder) -> None:
        self._file, self._left = file, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._left = self._left or self._file.read(1 << 16)
        except UnicodeError as error:
            raise OSError(f"it is not {error.encoding}: {error.reason}") from None  # type: ignore[attr-defined]
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _decoded(piece: bytes, reading: Reading) -> str:
    """Bytes as text, by the first encoding that fits; UnicodeDecodeError where none does."""
    *others, last = [name for name in reading.encodings if not _is_wide(name)] or ["utf-8"]
    for name in others:
        with contextlib.suppress(UnicodeDecodeError):
            return piece.decode(name)
    return piece.decode(last)


def _not_utf8(error: UnicodeDecodeError, reading: Reading) -> tuple[str, str]:
    """The kind and the detail of a broken row of bytes that are no text."""
    if reading.encodings:
        return f"not {' nor '.join(reading.encodings)}", f"byte {error.start}: {error.reason}"
    return (
        "invalid UTF-8",
        f"byte {error.start}: {error.reason}; another encoding must be named, for example encoding: cp1252",
    )


def _is_array(path: Path) -> bool:
    with _faults_of(path), path.open("rb") as raw, _unpacked(path, raw) as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


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


def _read_lines(file: IO[bytes], path: Path, reading: Reading, context: SourceContext) -> Iterator[Row]:
    broken = context.broken
    for number, line in _lines(file, path, context):
        if line.isspace():
            broken.add("empty line", path.name, number)
            continue
        try:
            fields = json.loads(_decoded(line, reading))
        except UnicodeDecodeError as error:
            kind, detail = _not_utf8(error, reading)
            broken.add(kind, path.name, number, detail)
        except (ValueError, RecursionError) as error:
            broken.add("bad JSON", path.name, number, str(error))
        else:
            if isinstance(fields, dict):
                yield Row(fields, path.name, number)
            else:
                broken.add("not a mapping", path.name, number, f"it is {type(fields).__name__}")


def _read_csv(file: IO[bytes], path: Path, reading: Reading, context: SourceContext, *, tabs: bool) -> Iterator[Row]:
    """Rows of csv: the first line names the fields, empty ones are absent, quotes hold line ends and delimiters."""
    whole = io.BufferedReader(file, SNIFFED)  # type: ignore[type-var]  # file-like
    delimiter = reading.delimiter or ("\t" if tabs else _delimiter(whole.peek(SNIFFED)[:SNIFFED]))
    texts = _TextLines(whole, path, reading, context)
    csv.field_size_limit(LONGEST)
    rows = csv.reader(texts, delimiter=delimiter, strict=False)
    names: list[str] | None = None
    while True:
        first = texts.number + 1
        try:
            cells = next(rows, None)
        except csv.Error as error:
            context.broken.add("bad csv", path.name, first, str(error))
            continue
        if cells is None:
            return
        if texts.broken or not cells:
            texts.broken = False
        elif names is None:
            names = _header(cells, path, delimiter)
        elif len(cells) != len(names):
            context.broken.add(
                "other columns",
                path.name,
                first,
                f"{len(cells)} fields, {len(names)} expected; is {delimiter!r} not the delimiter? set delimiter",
            )
        else:
            yield Row({name: cell or None for name, cell in zip(names, cells, strict=True)}, path.name, first)


def _header(cells: list[str], path: Path, delimiter: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"{path}: its first line, which names the fields, has {twice[0]!r} twice; the delimiter is {delimiter!r}"
        )
    return names


class _TextLines:
    """The lines of a csv file as text, their number, and whether one of the current row was no text."""

    def __init__(self, file: IO[bytes], path: Path, reading: Reading, context: SourceContext) -> None:
        self._lines = _lines(file, path, context)
        self._path, self._reading, self._context = path, reading, context
        self.number = 0
        self.broken = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        try:
            return _decoded(line, self._reading).replace("\0", "")
        except UnicodeDecodeError as error:
            kind, detail = _not_utf8(error, self._reading)
            if not self.broken:
                self._context.broken.add(kind, self._path.name, self.number, detail)
            self.broken = True
            return line.decode("latin-1")  # only so that the row ends where it does


def _delimiter(start: bytes) -> str:
    """The delimiter with which the first rows have equally many fields, and more than one."""
    lines = start.decode("latin-1").splitlines(keepends=True)
    if len(start) >= SNIFFED:
        lines = lines[:-1]  # it may be cut
    for delimiter in DELIMITERS:
        with contextlib.suppress(csv.Error):
            sizes = {len(cells) for cells in csv.reader(lines[:50], delimiter=delimiter) if cells}
            if len(sizes) == 1 and sizes != {1}:
                return delimiter
    head = lines[0] if lines else ""
    return max(DELIMITERS, key=head.count)


def _read_text(file: IO[bytes], path: Path, reading: Reading, context: SourceContext) -> Iterator[Row]:
    sample_by = reading.sample_by
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
            text = _decoded(piece, reading).strip("\r\n")
        except UnicodeDecodeError as error:
            line = number + piece[: error.start].count(b"\n")
            kind, detail = _not_utf8(error, reading)
            context.broken.add(kind, path.name, line, detail.partition(": ")[2])
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
