"""Tokenizers of the `tokenizers` library: a tokenizer.json, or GPT-2's vocab.json and merges.txt."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.tokenizers.base import Placed, Tokenizer, write_meta
from holdfast.errors import ConfigError
from holdfast.execution.files import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")
SPLIT_CHARACTERS = 1 << 16
LONGEST_CHARACTERS = 1 << 21  # given to the library at once; other tokenizers' texts are cut here, at a word's end
_WORD_END = re.compile(r"\S(?= \S)|\S\n(?=\S)")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library with explicit end-of-text and padding tokens."""

    def __init__(self, rust: "RustTokenizer", name: str, eot: str | None = None, pad: str | None = None) -> None:
        rust.no_truncation()
        rust.no_padding()
        # A text that spells a special token out is still text: only we end documents.
        rust.encode_special_tokens = True
        self._rust = rust
        self.name = name
        self.vocab_size = max(rust.get_vocab(with_added_tokens=True).values()) + 1
        self.eot_id = self._special("tokenizer/eot", eot, EOT_NAMES)
        self.pad_id = self._special("tokenizer/pad", pad, PAD_NAMES, self.eot_id)

    def _special(self, path: str, wanted: str | None, known: Sequence[str], default: int | None = None) -> int:
        for token in known if wanted is None else [wanted]:
            found = self._rust.token_to_id(token)
            if found is not None:
                return int(found)
        if wanted is None and default is not None:
            return default
        expected = (
            f"a token of {self.name}, which has none of {', '.join(known)}" if wanted is None else "a token of it"
        )
        raise ConfigError(path, wanted, expected, f"set {path} to a token in its vocabulary")

    @functools.cached_property
    def _serialised(self) -> str:
        return str(self._rust.to_str())

    @functools.cached_property
    def fingerprint(self) -> str:
        special = f"{self.eot_id}/{self.pad_id}"
        return hashlib.sha256((special + self._serialised).encode()).hexdigest()[:32]

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        # The library takes 500 bytes a character and one core for a long text: give it pieces instead.
        limit = SPLIT_CHARACTERS if self._splits_freely else LONGEST_CHARACTERS
        if all(len(text) <= limit for text in texts) and sum(map(len, texts)) <= LONGEST_CHARACTERS:
            return self._encode(list(texts))
        flats: list[NDArray[np.integer[Any]]] = [np.empty(0, self.dtype)]
        lengths = np.zeros(len(texts), np.int64)
        for part in _portions(texts, limit):
            flat, counts = self._encode([text for _, text in part])
            flats.append(flat)
            np.add.at(lengths, [index for index, _ in part], counts)
        return np.concatenate(flats), lengths

    def _encode(self, texts: list[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        # The "fast" variant leaves out character offsets; its threads do not hold Python's lock.
        ids = [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat: NDArray[np.integer[Any]] = np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(lengths.sum()))
        return flat, lengths

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        found = []
        for encoding in self._for_chats.encode_batch(list(texts), add_special_tokens=False):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            found.append(Placed(np.array(encoding.ids, np.int64), offsets[:, 0], offsets[:, 1]))
        return found

    @functools.cached_property
    def _for_chats(self) -> "RustTokenizer":
        """The same tokenizer, which takes a special token that is spelled out for one."""
        from tokenizers import Tokenizer as RustTokenizer

        # What comes after would only add special tokens and take blanks out of the characters of a token.
        return RustTokenizer.from_str(json.dumps(json.loads(self._serialised) | {"post_processor": None}))

    @functools.cached_property
    def _splits_freely(self) -> bool:
        """Whether a text cut between words has the same ids: true of GPT-2's way to find words."""
        whole = json.loads(self._serialised)
        words = whole["pre_tokenizer"] or {}
        plain = words.get("type") == "ByteLevel" and words.get("use_regex", True) and not words["add_prefix_space"]
        return plain and whole["normalizer"] is None

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        special = {self.eot_id, self.pad_id}
        kept = [index for index in map(int, ids) if index not in special and index < self.vocab_size]
        return str(self._rust.decode(kept, skip_special_tokens=False))

    def pieces(self) -> list[bytes]:
        return self._pieces

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        spell = _byte_level if '"ByteLevel"' in json.dumps(json.loads(self._serialised)["decoder"]) else _metaspace
        pieces = [b""] * self.vocab_size
        special = {index for index, token in self._rust.get_added_tokens_decoder().items() if token.special}
        special |= {self.eot_id, self.pad_id}
        for token, index in self._rust.get_vocab(with_added_tokens=True).items():
            if index not in special:
                pieces[index] = spell(token)
        return pieces

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "tokenizer.json", self._serialised)
        special = {"eot": self._rust.id_to_token(self.eot_id), "pad": self._rust.id_to_token(self.pad_id)}
        chat = {"chat": self.chat._asdict()} if self.chat.templates else {}
        write_meta(folder, {"kind": "library", "name": self.name, **special, **chat})


def _portions(texts: Sequence[str], limit: int) -> Iterator[list[tuple[int, str]]]:
    """Texts cut between words after `limit` characters, each piece with its text's index, a few at a time."""
    portion: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        start = 0
        while True:
            end = _WORD_END.search(text, start + limit) if len(text) - start > limit else None
            piece = text[start : end.end() if end else None]
            portion.append((index, piece))
            size += len(piece)
            if size >= LONGEST_CHARACTERS // 2:
                yield portion
                portion, size = [], 0
            if end is None:
                break
            start = end.end()
    if portion:
        yield portion


def from_vocab_and_merges(folder: Path) -> "RustTokenizer":
    """GPT-2's byte-level BPE from its two files."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    rust = RustTokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return rust


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable character of each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    return table | {chr(256 + index): value for index, value in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    return bytes(table[character] for character in token) if all(c in table for c in token) else token.encode()


def _metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])  # a byte that the vocabulary has no piece for
    return token.replace("▁", " ").removeprefix("##").encode()
