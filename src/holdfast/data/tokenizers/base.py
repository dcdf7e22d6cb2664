"""The tokenizer interface that the rest of Holdfast knows."""

import abc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.execution.files import write_atomically
from holdfast.types import Json

META_FILE = "holdfast_tokenizer.json"


class ChatFormat(NamedTuple):
    """How a tokenizer's model was shown chats: Jinja templates by name, and the tokens that these know by name."""

    templates: Mapping[str, str] = {}
    tokens: Mapping[str, str] = {}  # such as bos_token


class Placed(NamedTuple):
    """The ids of a text, and the characters of it, from and to, that each stands for."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tokenizer(abc.ABC):
    """Text to ids and back; special tokens are never made from text, only added on purpose."""

    chat: ChatFormat = ChatFormat()  # no part of the fingerprint: it changes no text's ids
    name: str
    vocab_size: int
    eot_id: int  # ends every document
    pad_id: int  # fills rows; may be the same as eot_id, since padding is masked

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A text that changes when any id of any text could change."""

    @abc.abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """The ids of many texts end to end, and how many each text has: the fast way."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """The text of ids; special tokens give nothing."""

    @abc.abstractmethod
    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for; special tokens stand for none."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write all that `load_tokenizer(folder)` needs."""

    @abc.abstractmethod
    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """The ids of chats that a template rendered: here special tokens are made from text, none is added."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""
        flat, lengths = self.encode_flat(texts)
        ends = np.cumsum(lengths)
        return [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]

    def token_bytes(self) -> NDArray[np.int32]:
        """How many bytes of text each id stands for."""
        return np.array([len(piece) for piece in self.pieces()], np.int32)

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32


def model_vocab_size(tokenizer: Tokenizer) -> int:
    """The vocabulary of a model for this tokenizer: rounded up, so that matrices have friendly shapes.

    A multiple of 64, and of 128 from 16,384 tokens on.
    """
    unit = 128 if tokenizer.vocab_size >= 1 << 14 else 64
    return -(-tokenizer.vocab_size // unit) * unit


def write_meta(folder: Path, meta: Json) -> None:
    """Write the file that says what kind of tokenizer a folder holds."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / META_FILE, json.dumps(meta, indent=2, sort_keys=True) + "\n")
