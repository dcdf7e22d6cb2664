"""Bytes as tokens: any text, no file, 256 ids and two special ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.tokenizers.base import Placed, Tokenizer, write_meta


class BytesTokenizer(Tokenizer):
    """The utf-8 bytes of a text are its ids.

    >>> BytesTokenizer().encode("hé")
    [104, 195, 169]
    """

    name = "bytes"
    eot_id = 256
    pad_id = 257
    vocab_size = 258

    @property
    def fingerprint(self) -> str:
        return "bytes-1"

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint16), lengths

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        found = []
        for text in texts:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
            starts = np.cumsum(ids & 0xC0 != 0x80) - 1  # the other bytes of a character go on with it
            found.append(Placed(ids, starts, starts + 1))
        return found

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        array = np.asarray(ids, np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)] + [b"", b""]

    def save(self, folder: Path) -> None:
        write_meta(folder, {"kind": "bytes", "name": self.name})
