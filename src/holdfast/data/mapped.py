"""Ids that lie in files of others, read where they are: mapped into memory, and no block used before it was compared.

A store of such files has no `tokens.bin`: `spans.npy` says where its ids are, `files.json` where the files were found,
and the ledger holds the checksums of the whole files, headers and all, as they were when their ids were checked.
"""

import contextlib
import json
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.checksums import Blocks
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.types import JsonView

SPANS, FILES = "spans.npy", "files.json"
SPARE_FILES = 512  # that a process may want to open besides

Ints = NDArray[np.int64]


class Layout(NamedTuple):
    """Where the ids of a split are.

    Args:
        files: the files that hold them.
        dtype: the type of an id, unsigned: a negative id is one that no vocabulary has.
        spans: a file's number, the first byte, and how many ids follow it, in the order of the stream; (N, 3).
        ends: where each document ends, counted in ids; None where only the end-of-text id tells.
        notes: what the user should know about them.
    """

    files: tuple[Path, ...]
    dtype: str
    spans: Ints
    ends: Ints | None = None
    notes: tuple[str, ...] = ()


class Spans:
    """Ids in several places of several files, end to end.

    Args:
        files: the whole files as arrays of ids.
        spans: as a Layout has them.
    """

    def __init__(self, files: Sequence[NDArray[Any]], spans: Ints) -> None:
        self._files = files
        self.dtype = files[0].dtype
        self._file = spans[:, 0]
        self._first = spans[:, 1] // self.dtype.itemsize  # as a position in the file
        self._starts = np.concatenate([[0], np.cumsum(spans[:, 2])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: "slice | Ints") -> NDArray[Any]:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            found = [part for _, part in self.parts(start, stop)]
            return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])
        span = np.searchsorted(self._starts, index, side="right") - 1
        place = self._first[span] + index - self._starts[span]
        result = np.empty(len(index), self.dtype)
        for file in np.unique(self._file[span]):
            chosen = self._file[span] == file
            result[chosen] = self._files[file][place[chosen]]
        return result

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The file, the first and one past the last position in it, of every piece of a range of ids."""
        span = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            until = min(stop, int(self._starts[span + 1]))
            first = int(self._first[span]) + start - int(self._starts[span])
            yield int(self._file[span]), first, first + until - start
            start, span = until, span + 1

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """The pieces of a range of ids, each with the number of its file."""
        return ((file, self._files[file][first:last]) for file, first, last in self.places(start, stop))


def map_files(layout: Layout) -> Spans:
    """The ids of a layout, mapped."""
    return _spans(map_bytes(layout.files), layout.dtype, layout.spans)


def _spans(files: Sequence[NDArray[np.uint8]], dtype: str, spans: Ints) -> Spans:
    width = np.dtype(dtype).itemsize
    # A mapped file has whole ids; what is left at its end is no id of any span.
    return Spans([each[: len(each) // width * width].view(dtype) for each in files], spans)


def map_bytes(files: Sequence[Path]) -> list[NDArray[np.uint8]]:
    """The bytes of files, mapped; a map holds its file open, so that many files need a higher limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(files) + SPARE_FILES + _open_files()
    if resource.RLIM_INFINITY not in (soft, hard) and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    return [np.memmap(path, np.uint8, mode="r") for path in files]


def _open_files() -> int:
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


class MappedTokens:
    """The ids of a store that lie in files of others.

    Args:
        name: the dataset, for messages.
        files: where the files are now.
        known: their entries in the ledger: size and checksums.
        dtype, spans: as a Layout has them.
    """

    def __init__(self, name: str, files: Sequence[Path], known: Sequence[JsonView], dtype: str, spans: Ints) -> None:
        self._name, self._paths = name, list(files)
        for path, entry in zip(files, known, strict=True):
            self._check_size(path, entry["size"])
        whole = map_bytes(files)
        self.flat = _spans(whole, dtype, spans)
        self._width = self.flat.dtype.itemsize
        self._blocks = [Blocks(data, dict(entry)) for data, entry in zip(whole, known, strict=True)]

    @property
    def left(self) -> int:
        """Blocks that were not looked at yet."""
        return sum(blocks.left for blocks in self._blocks)

    def ensure(self, starts: Ints, stops: Ints) -> None:
        """Compare the blocks of some ranges of ids with their checksums; an error names the file that differs."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            for file, first, last in self.flat.places(start, stop):
                ranges.setdefault(file, []).append((first * self._width, last * self._width))
        for file, found in ranges.items():
            blocks, (firsts, lasts) = self._blocks[file], np.array(found, np.int64).T
            for block in blocks.unseen(firsts, lasts):
                if not blocks.holds(block):
                    raise self._altered(file, f"block {block} of {blocks.count} does not have its checksum")
                blocks.mark(block)

    def _altered(self, file: int, what: str) -> UserError:
        return altered(self._name, self._paths[file], what)

    def _check_size(self, path: Path, size: int) -> None:
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise UserError(f"dataset {self._name}: {path}: the file is gone; put it back") from None
        if found != size:
            cut = "it was cut short" if found < size else "something was appended"
            raise altered(self._name, path, f"{found:,} bytes, when it was first read {size:,}: {cut}")


def altered(name: str, path: Path, what: str) -> UserError:
    """A file of ids that is not what it was."""
    return UserError(
        f"dataset {name}: {path}: not as it was when its ids were checked: {what}; put it back from a copy, or touch "
        "the file and prepare it as another one"
    )


def noted_files(store: Path) -> list[Path]:
    """Where the files of a store were found last."""
    return [Path(name) for name in json.loads((store / FILES).read_text(encoding="utf-8"))]


def note_files(store: Path, files: Sequence[Path]) -> None:
    """Note where the files of a store are, where they were moved; `holdfast data show` looks there."""
    now = [str(path.absolute()) for path in files]
    known: list[str] = []
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = [str(path) for path in noted_files(store)]
    if known != now:
        with contextlib.suppress(OSError):  # a cache that others own is used all the same
            write_json(store / FILES, now)
