"""Preparation in several jobs: the documents of a split are dealt out in portions, which any process can make and use.

Where a portion begins and ends follows from the documents alone, not from the number of jobs. A job reads all
documents, tokenises the portions that are its own, and writes each as one file, whole or not at all. Whoever prepares
the split afterwards takes the portions that are there and tokenises the others itself: so jobs may run in any order, be
killed at any instant and be started again, with another number of jobs too, and the store is the same to the last bit.
"""

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data import encode
from holdfast.data.encode import Encoded
from holdfast.data.store import RECORD
from holdfast.errors import UserError
from holdfast.execution.files import write_atomically

FORMAT = 1
PORTION = 16  # batches of documents: some 16 million characters
MOST_SHARDS = 100_000
_SHARD = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


@dataclass(frozen=True)
class Shard:
    """One of several jobs that prepare the same data.

    >>> Shard.parse("2/4")
    Shard(number=2, count=4)
    """

    number: int  # from 1
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The job that `--shard I/N` names."""
        match = _SHARD.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_SHARDS:
            raise UserError(f"--shard {text}: expected I/N with I from 1 to N, such as 1/4")
        return cls(int(match[1]), int(match[2]))

    def has(self, store: str, portion: int) -> bool:
        """Whether a portion of a store is this job's; small stores, of one portion, are dealt out too."""
        return (portion + zlib.crc32(store.encode())) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class _Head(NamedTuple):
    """What stands before the ids of a portion."""

    tokens: list[int]  # of each batch
    documents: list[int]
    masked: bool  # as the batches of chats are
    checksum: int
    size: int  # of the line itself


def portions_path(store: Path) -> Path:
    """Where the portions of a store are until it is made."""
    return store.with_name(f".{store.name}.portions")


class Portions:
    """The portions of a store that are there.

    Args:
        store: the store's path.
        dtype: of its ids.
    """

    def __init__(self, store: Path, dtype: type[np.generic]) -> None:
        self.folder = portions_path(store)
        self._dtype = np.dtype(dtype)
        self._loaded: tuple[int, list[Encoded]] = (-1, [])
        self._counted: dict[int, int] = {}
        self._prefix = (0, 0)  # portions from the first one without a gap, and their ids

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:08}.bin"

    def write(self, number: int, made: list[Encoded]) -> None:
        """Keep the batches of a portion."""
        content = b"".join(part.tobytes() for encoded in made for part in encoded if part is not None)
        counts = [[len(encoded.flat) for encoded in made], [len(encoded.records) for encoded in made]]
        masked = any(encoded.loss_mask is not None for encoded in made)
        head = [FORMAT, _rules(), *counts, masked, zlib.crc32(content)]
        write_atomically(self._file(number), json.dumps(head).encode() + b"\n" + content)
        self._counted[number] = sum(counts[0])

    def _head(self, line: bytes) -> _Head | None:
        try:
            form, rules, tokens, documents, masked, checksum = json.loads(line)
        except ValueError:
            return None
        if (form, rules) != (FORMAT, _rules()):  # of another version
            return None
        return _Head(tokens, documents, masked, checksum, len(line))

    def num_tokens(self, number: int) -> int | None:
        """How many ids a portion has; None where it is not there or not whole."""
        if number not in self._counted:
            try:
                with self._file(number).open("rb") as file:
                    head = self._head(file.readline())
                size = self._file(number).stat().st_size
            except FileNotFoundError:
                return None
            if head is None or size != head.size + self._bytes(head):
                return None
            self._counted[number] = sum(head.tokens)
        return self._counted[number]

    def _bytes(self, head: _Head) -> int:
        return sum(head.tokens) * (self._dtype.itemsize + head.masked) + sum(head.documents) * RECORD.itemsize

    def load(self, number: int) -> list[Encoded]:
        """The batches of a portion; none where it is not there or not as it was written."""
        try:
            whole = self._file(number).read_bytes()
        except FileNotFoundError:
            return []
        head = self._head(whole[: whole.find(b"\n") + 1])
        content = whole[head.size :] if head is not None else b""
        if head is None or len(content) != self._bytes(head) or zlib.crc32(content) != head.checksum:
            return []
        made, place = [], 0
        for tokens, documents in zip(head.tokens, head.documents, strict=True):
            flat: NDArray[Any] = np.frombuffer(content, self._dtype, tokens, place)
            place += flat.nbytes
            records: NDArray[Any] = np.frombuffer(content, RECORD, documents, place)
            place += records.nbytes
            mask: NDArray[np.uint8] | None = np.frombuffer(content, np.uint8, tokens, place) if head.masked else None
            place += tokens if head.masked else 0
            made.append(Encoded(flat, records, mask))
        return made

    def batch(self, number: int, documents: int) -> Encoded | None:
        """A batch that some job has tokenised; None where there is none of so many documents."""
        portion, place = divmod(number, PORTION)
        if self._loaded[0] != portion:
            self._loaded = portion, self.load(portion)
        found = self._loaded[1][place : place + 1]
        return found[0] if found and len(found[0].records) == documents else None

    def prefix_tokens(self) -> int:
        """How many ids the portions have that follow each other from the first one on."""
        number, total = self._prefix
        while (more := self.num_tokens(number)) is not None:
            number, total = number + 1, total + more
        self._prefix = number, total
        return total

    def remove(self) -> None:
        """Delete them all."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _rules() -> list[int]:
    """What decides where a portion begins and ends."""
    return [encode.BATCH_CHARACTERS, encode.BATCH_DOCUMENTS, PORTION]
