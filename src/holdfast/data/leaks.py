"""Leaks: held-out rows that also occur in training data, of whatever stage.

Three ways to find them, all on prepared stores, so that nothing is read or downloaded again:

- exact: the same text or prompt, after normalising case and white space;
- group: the same premise, context or the like;
- n-grams: at least half of a row's runs of 13 words occur in the training data. Words are compared as
  hashes of lower-case letters and digits; rows of fewer than 13 words are left to the other two.

Only hashes of the held-out side are held in memory; the training side goes by in pieces.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.store import Prepared
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import write_json

NGRAM = 13  # words
SHARE = 0.5  # of a row's n-grams that must occur in training
PIECE = 1 << 21  # tokens, or hashes, looked at in one go
MOST_NGRAMS = 1 << 23  # of a held-out set that are held in memory
SIEVE_BITS = 22
FORMAT = 1

U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Leak:
    """How many rows of a held-out set occur in a training set."""

    held_out: str
    training: str
    rows: int  # of the held-out set
    exact: int
    group: int
    ngram: int
    leaked: int  # rows found in any of the three ways
    examples: tuple[int, ...]  # the first few of them, as documents of the held-out store

    @property
    def share(self) -> float:
        """Leaked rows as a share of all."""
        return self.leaked / self.rows

    def __str__(self) -> str:
        return (
            f"{self.held_out}: {self.leaked} of {self.rows} rows ({self.share:.1%}) occur in {self.training} "
            f"({self.exact} exact, {self.group} by group, {self.ngram} by n-grams)"
        )


def check_leaks(
    held_out: Mapping[str, Prepared],
    training: Mapping[str, Prepared],
    tokenizer: Tokenizer,
    *,
    max_leak: float = 1.0,
    cache: Path | None = None,
) -> list[Leak]:
    """Look for every held-out set in every training set; above `max_leak` this is a UserError.

    Args:
        held_out: validation and evaluation stores of all stages, by name.
        training: training stores of all stages, by name.
        tokenizer: the one that all of them were prepared with.
        max_leak: largest share of a held-out set that may be found in one training set.
        cache: folder in which results are remembered by the stores' fingerprints.
    """
    pieces = Pieces(tokenizer)
    grams: dict[str, Grams] = {}  # of the held-out sets, made when first needed
    leaks = []
    for train_name, train in training.items():
        missing = {}
        for name, store in held_out.items():
            known = _recall(cache, store, train)
            if known is not None:
                leaks.append(Leak(name, train_name, **known))
                continue
            missing[name] = store
            if name not in grams:
                grams[name] = _held_out_grams(store, pieces)
        seen = _seen([grams[name].hashes for name in missing], train, pieces)
        for name, store in missing.items():
            leak = Leak(name, train_name, **_count(store, grams[name], seen, train))
            _remember(cache, store, train, leak)
            leaks.append(leak)
    _judge(leaks, max_leak)
    return leaks


def _judge(leaks: list[Leak], max_leak: float) -> None:
    too_many = [leak for leak in leaks if leak.share > max_leak]
    if too_many:
        lines = "\n".join(f"  {leak}" for leak in too_many)
        raise UserError(
            f"data/max_leak: held-out rows occur in training data, more than the allowed share {max_leak:g}\n{lines}\n"
            "remove them from the training data, or raise data/max_leak if that is meant"
        )


class Grams(NamedTuple):
    """The n-grams of a store: the document of each, and its hash."""

    rows: NDArray[np.int64]
    hashes: U64


def _held_out_grams(store: Prepared, pieces: "Pieces") -> Grams:
    parts = [Grams(np.empty(0, np.int64), np.empty(0, np.uint64))]
    for part in _ngrams(store, pieces):
        parts.append(part)
        if sum(len(known.rows) for known in parts) > MOST_NGRAMS:
            break  # the rows after this are looked for by text and group only
    return Grams(np.concatenate([part.rows for part in parts]), np.concatenate([part.hashes for part in parts]))


def _seen(held_out: list[U64], train: Prepared, pieces: "Pieces") -> U64:
    """Those of the held-out hashes that occur in the training data."""
    wanted = np.sort(np.concatenate([np.empty(0, np.uint64), *held_out]))
    seen = np.zeros(len(wanted), bool)
    if not len(wanted):
        return wanted
    sieve = np.zeros(1 << SIEVE_BITS, bool)  # lets go of nearly all hashes before the slower search
    sieve[wanted >> np.uint64(64 - SIEVE_BITS)] = True
    for part in _ngrams(train, pieces):
        likely = part.hashes[sieve[part.hashes >> np.uint64(64 - SIEVE_BITS)]]
        seen[np.searchsorted(wanted, likely[_is_in(likely, wanted)])] = True
    return wanted[seen]


def _count(store: Prepared, grams: Grams, seen: U64, train: Prepared) -> dict[str, Any]:
    exact, group = (_present(store.keys[:, column], train.keys[:, column]) for column in (0, 1))
    # A row without a group has its text's hash there, which is the exact test again.
    group &= store.keys[:, 0] != store.keys[:, 1]
    total = np.bincount(grams.rows, minlength=store.num_documents)
    found = np.bincount(grams.rows[_is_in(grams.hashes, seen)], minlength=store.num_documents)
    ngram = (total > 0) & (found >= SHARE * total)
    leaked = exact | group | ngram
    counts = {"exact": exact, "group": group, "ngram": ngram, "leaked": leaked}
    return {
        "rows": store.num_documents,
        **{name: int(flags.sum()) for name, flags in counts.items()},
        "examples": tuple(int(row) for row in np.flatnonzero(leaked)[:10]),
    }


def _present(wanted: U64, among: U64) -> NDArray[np.bool_]:
    """Which of some hashes occur among many, which are looked at a part at a time."""
    ordered = np.sort(wanted)
    hits = [np.empty(0, np.uint64)]
    for start in range(0, len(among), PIECE):
        part = among[start : start + PIECE]
        hits.append(np.unique(part[_is_in(part, ordered)]))
    return _is_in(wanted, np.sort(np.concatenate(hits)))


def _is_in(values: U64, ordered: U64) -> NDArray[np.bool_]:
    """Which values occur in a sorted array; one search each, where `np.isin` would sort both again."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    found: NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


class Pieces:
    """The bytes of all tokens of a vocabulary, for decoding many tokens at once.

    Letters are lower-case, and bytes that are neither letters nor digits are blank: that is all that n-grams need.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [piece or b" " for piece in tokenizer.pieces()]  # the end of text ends a word too
        self._sizes = np.array([len(piece) for piece in pieces], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        letters = np.frombuffer(b"".join(pieces).lower(), np.uint8)
        # Bytes from 128 on are parts of letters of other scripts.
        kept = (letters >= 128) | ((letters >= 97) & (letters <= 122)) | ((letters >= 48) & (letters <= 57))
        self._bytes = np.where(kept, letters, 32).astype(np.uint8)

    def decode(self, tokens: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The bytes of tokens end to end, and where each token's bytes start."""
        sizes = self._sizes[tokens]
        starts = np.cumsum(sizes) - sizes
        index = np.repeat(self._starts[tokens] - starts, sizes) + np.arange(int(sizes.sum()))
        return self._bytes[index], starts


def _ngrams(store: Prepared, pieces: Pieces) -> Iterator[Grams]:
    """For each piece of a store: the document and the hash of every run of NGRAM words."""
    offsets = store.offsets
    first = 0
    while first < store.num_documents:
        stop = max(int(np.searchsorted(offsets, offsets[first] + PIECE, side="right")) - 1, first + 1)
        tokens = store.flat[offsets[first] : offsets[stop]]
        text, starts = pieces.decode(tokens)
        places = offsets[first:stop] - offsets[first]
        words, begins = _words(text)
        document = np.searchsorted(starts[places], begins, side="right") - 1
        yield from _runs(words, document + first)
        first = stop


def _runs(words: U64, document: NDArray[np.int64]) -> Iterator[Grams]:
    count = len(words) - NGRAM + 1
    if count <= 0:
        return
    hashes = np.zeros(count, np.uint64)
    for step in range(NGRAM):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[step : step + count]
    inside = document[:count] == document[NGRAM - 1 :]
    yield Grams(document[:count][inside], hashes[inside])


def _words(text: NDArray[np.uint8]) -> tuple[U64, NDArray[np.int64]]:
    """A hash of every word, and where it begins: FNV-1a, letter by letter over all words at once."""
    blank = np.concatenate([[True], text == 32, [True]])
    edges = np.flatnonzero(blank[1:] != blank[:-1])
    begins, ends = edges[::2], edges[1::2]
    length = ends - begins
    base = np.uint64(0x100000001B3)
    longest = int(length.max()) if len(length) else 0
    hashes = np.full(len(begins), 0xCBF29CE484222325, np.uint64)
    remaining = np.arange(len(begins))
    for step in range(longest):
        # Words are short, and only the longer ones are still there at each step.
        remaining = remaining[length[remaining] > step]
        hashes[remaining] = (hashes[remaining] ^ text[begins[remaining] + step].astype(np.uint64)) * base
        if step >= 63:
            break  # the first 64 letters tell words apart well enough
    return hashes, begins


def _note(cache: Path, held_out: Prepared, train: Prepared) -> Path:
    name = sha256(f"{FORMAT} {held_out.fingerprint} {train.fingerprint}".encode()).hexdigest()[:32]
    return cache / "leaks" / f"{name}.json"


def _recall(cache: Path | None, held_out: Prepared, train: Prepared) -> dict[str, Any] | None:
    if cache is None or not (note := _note(cache, held_out, train)).is_file():
        return None
    known: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    return known | {"examples": tuple(known["examples"])}


def _remember(cache: Path | None, held_out: Prepared, train: Prepared, leak: Leak) -> None:
    if cache is not None:
        note = _note(cache, held_out, train)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {name: value for name, value in asdict(leak).items() if name not in ("held_out", "training")})
