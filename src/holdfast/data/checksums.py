"""Checksums of blocks: a large file can be checked where it is used, before it is used, without being read whole.

The sum of a block is the CRC-32 of the CRC-32s of its pieces of PIECE bytes: sums can be taken while a file is
appended to, before anybody knows how large it, and therefore a block, will be. They tell damage, not an attack.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.types import Json

PIECE = 1 << 16
MOST_BLOCKS = 1 << 17  # of a file: one megabyte of sums


class PieceSums:
    """The sums of the pieces of a file that is being appended to."""

    def __init__(self) -> None:
        self._whole = bytearray()  # of the pieces that are full, four bytes each
        self._sum = self._filled = 0  # of the last piece
        self._before = 0  # the sum of all sums of full pieces

    def update(self, data: bytes) -> None:
        """Take in what was appended."""
        view = memoryview(data)
        while view:
            part, view = view[: PIECE - self._filled], view[PIECE - self._filled :]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            if self._filled == PIECE:
                own = self._sum.to_bytes(4, "big")
                self._whole += own
                self._before = zlib.crc32(own, self._before)
                self._sum = self._filled = 0

    def total(self) -> int:
        """One number for all that was appended so far."""
        return zlib.crc32(self._sum.to_bytes(4, "big"), self._before)

    def blocks(self, pieces: int) -> str:
        """The sums of blocks of so many pieces, as hexadecimal digits."""
        found = bytes(self._whole) + (self._sum.to_bytes(4, "big") if self._filled else b"")
        parts = (found[start : start + 4 * pieces] for start in range(0, len(found), 4 * pieces))
        return "".join(f"{zlib.crc32(part):08x}" for part in parts)

    @classmethod
    def of(cls, path: Path, size: int | None = None) -> "PieceSums":
        """Of a file, or of its first bytes."""
        found, left = cls(), path.stat().st_size if size is None else size
        with path.open("rb") as file:
            while left > 0 and (part := file.read(min(left, 1 << 22))):
                found.update(part)
                left -= len(part)
        return found


def pieces_of(size: int) -> int:
    """How many pieces a block of a file of that size has.

    >>> pieces_of(10**9), pieces_of(10**12)
    (1, 128)
    """
    pieces = 1
    while size > pieces * PIECE * MOST_BLOCKS:
        pieces *= 2
    return pieces


def checksums(sums: dict[str, PieceSums], sizes: dict[str, int]) -> Json:
    """The sums of some files as a ledger holds them."""
    return {name: {"pieces": (count := pieces_of(sizes[name])), "sums": sums[name].blocks(count)} for name in sums}


class Blocks:
    """The blocks of a file, compared with their sums when they are first used.

    Args:
        data: the file's bytes.
        known: its entry in a ledger; None where there is none, and nothing is compared.
    """

    def __init__(self, data: NDArray[np.uint8], known: Json | None) -> None:
        self._data = data
        pieces = known["pieces"] if known is not None else pieces_of(len(data))
        self.size: int = pieces * PIECE
        self.count = -(-len(data) // self.size)
        self.seen = np.zeros(self.count, bool)
        self.left = self.count  # blocks that were not looked at yet
        self._sums: NDArray[Any] | None = None
        if known is not None:
            self._sums = np.frombuffer(bytes.fromhex(known["sums"]), ">u4")
            if len(self._sums) != self.count or self.count > MOST_BLOCKS:
                raise ValueError(f"{len(self._sums)} checksums of {self.count} blocks")

    def unseen(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[int]:
        """The blocks of some ranges of bytes, none of them empty, that were not looked at yet."""
        first, last = starts // self.size, (stops - 1) // self.size
        most = int((last - first).max(initial=0))
        found = np.unique([np.minimum(first + step, last) for step in range(most + 1)])
        yield from found[~self.seen[found]].tolist()

    def bytes(self, block: int) -> NDArray[np.uint8]:
        """The bytes of a block."""
        return self._data[block * self.size : (block + 1) * self.size]

    def holds(self, block: int) -> bool:
        """Whether a block is as it was written; True where nobody noted how that was."""
        if self._sums is None:
            return True
        sums = PieceSums()
        sums.update(memoryview(np.ascontiguousarray(self.bytes(block))))  # type: ignore[arg-type]  # bytes-like
        return int(self._sums[block]) == int(sums.blocks(self.size // PIECE), 16)

    def mark(self, block: int) -> None:
        """Note that a block was looked at and is good."""
        if not self.seen[block]:
            self.seen[block] = True
            self.left -= 1
