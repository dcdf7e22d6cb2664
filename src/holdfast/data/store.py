"""The prepared store: a split of a source as flat tokens on disk, memory-mapped, never changed once published.

| file | what |
|---|---|
| `tokens.bin` | all ids end to end, uint16 or uint32, each document ended by the end-of-text id |
| `offsets.npy` | where each document starts, and where the last one ends |
| `prompt_lengths.npy` | how many tokens of each document are its prompt (0 for text) |
| `doc_bytes.npy` | utf-8 bytes of each document, prompt and answer |
| `keys.npy` | two 64-bit hashes a document: its normalised text or prompt, and its group |
| `token_bytes.npy` | how many bytes of text each id stands for |
| `ledger.json` | fingerprint, counts, tokenizer, options, and the report of broken rows |
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import UserError
from holdfast.execution.files import sync, write_json

FORMAT = 1
LEDGER = "ledger.json"
RECORD = np.dtype(
    [("length", "<u4"), ("prompt", "<u4"), ("bytes", "<u4"), ("key", "<u8"), ("group", "<u8")]
)  # what preparation notes of each document
CHUNK = 1 << 20  # documents converted at a time, so that memory stays bounded


class Prepared:
    """A published store, opened read-only."""

    def __init__(self, path: Path, ledger: dict[str, Any]) -> None:
        self.path = path
        self.ledger = ledger
        self.name: str = ledger["source"]
        self.split: str = ledger["split"]
        self.kind: str = ledger["kind"]
        self.fingerprint: str = ledger["fingerprint"]
        self.num_documents: int = ledger["documents"]
        self.num_tokens: int = ledger["tokens"]
        self.num_bytes: int = ledger["bytes"]
        self.flat: NDArray[Any] = np.memmap(path / "tokens.bin", ledger["dtype"], mode="r", shape=(self.num_tokens,))
        self.offsets: NDArray[np.int64] = np.load(path / "offsets.npy", mmap_mode="r")
        self.prompt_lengths: NDArray[np.uint32] = np.load(path / "prompt_lengths.npy", mmap_mode="r")
        self.doc_bytes: NDArray[np.uint32] = np.load(path / "doc_bytes.npy", mmap_mode="r")
        self.keys: NDArray[np.uint64] = np.load(path / "keys.npy", mmap_mode="r")
        self.token_bytes: NDArray[np.int32] = np.load(path / "token_bytes.npy")

    @classmethod
    def open(cls, path: Path) -> "Prepared":
        """Open a published store."""
        try:
            ledger = json.loads((path / LEDGER).read_text(encoding="utf-8"))
            if ledger["format"] != FORMAT:
                raise UserError(f"{path}: a store of format {ledger['format']}, expected {FORMAT}; remove it")
            return cls(path, ledger)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: not a prepared store ({error}); remove it and prepare again") from None

    def tokens(self, index: int) -> NDArray[Any]:
        """The ids of a document, the end-of-text id last."""
        return np.asarray(self.flat[self.offsets[index] : self.offsets[index + 1]])

    def prompt_length(self, index: int) -> int:
        """How many tokens of a document are its prompt."""
        return int(self.prompt_lengths[index])

    def __len__(self) -> int:
        return self.num_documents


def finish(folder: Path, ledger: dict[str, Any], token_bytes: NDArray[np.int32]) -> None:
    """Turn the records of a finished preparation into a store's arrays; the ledger is written last."""
    records = np.memmap(folder / "documents.bin", RECORD, mode="r", shape=(ledger["documents"],))
    _write_offsets(folder / "offsets.npy", records)
    _write_column(folder / "prompt_lengths.npy", records, "prompt", np.dtype("<u4"))
    _write_column(folder / "doc_bytes.npy", records, "bytes", np.dtype("<u4"))
    keys = _new_array(folder / "keys.npy", np.dtype("<u8"), (len(records), 2))
    for start in range(0, len(records), CHUNK):
        part = records[start : start + CHUNK]
        keys[start : start + CHUNK] = np.stack([part["key"], part["group"]], axis=1)
    _flush(keys)
    np.save(folder / "token_bytes.npy", token_bytes)
    for file in folder.iterdir():
        sync(file)
    write_json(folder / LEDGER, ledger)


def _new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file whose room is there: a page that a full disk has no room for would end the process."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _write_offsets(path: Path, records: NDArray[Any]) -> None:
    offsets = _new_array(path, np.dtype("<i8"), (len(records) + 1,))
    total = 0
    for start in range(0, len(records), CHUNK):
        ends = total + np.cumsum(records["length"][start : start + CHUNK], dtype=np.int64)
        offsets[start + 1 : start + 1 + len(ends)] = ends
        total = int(ends[-1])
    _flush(offsets)


def _write_column(path: Path, records: NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    column = _new_array(path, dtype, (len(records),))
    for start in range(0, len(records), CHUNK):
        column[start : start + CHUNK] = records[name][start : start + CHUNK]
    _flush(column)


def _flush(array: NDArray[Any]) -> None:
    assert isinstance(array, np.memmap)
    array.flush()


def stores_folder(cache: Path) -> Path:
    """Where the stores of a cache are."""
    return cache / "prepared"


def stores(cache: Path) -> Iterator[Prepared]:
    """All published stores of a cache, by name."""
    folder = stores_folder(cache)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and (path / LEDGER).is_file():
                yield Prepared.open(path)


def partial_path(path: Path) -> Path:
    """Where a store is made before it is published under its own name."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a store's lock file; the kernel lets go of it when the process ends, however it ends.

    Args:
        path: the store's path.
        waiting: called before waiting for another process; None does not wait, and yields False.
    """
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                yield False
                return
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def remove_unfinished(cache: Path) -> list[str]:
    """Delete what killed preparations left, unless a process is at work on it; the names of what went."""
    gone = []
    for path in sorted(stores_folder(cache).glob(".*.partial")):
        name = path.name[1 : -len(".partial")]
        with lock(path.with_name(name)) as mine:
            if mine and path.exists():
                shutil.rmtree(path)
                gone.append(name)
    return gone


def remove(path: Path) -> None:
    """Delete a store: it disappears at once under its name, then its files go."""
    grave = path.with_name(f".{path.name}.removed.{os.getpid()}")
    path.rename(grave)
    shutil.rmtree(grave)
