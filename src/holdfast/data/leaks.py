"""Leaks: held-out rows that also occur in training data, of whatever stage.

Rows are compared as words: runs of letters and digits after NFKC normalisation and case folding, so that spelling
variants of one text, its punctuation and its white space make no difference. Four ways to find a leak, all on
prepared stores, so that nothing is read or downloaded again:

- exact: the same words in the same order, of a text or of a prompt. Signs beside a number count as words: `34+5` is
  not `34-5`;
- group: the same premise, context or the like;
- n-grams: at least half of a row's runs of 13 words occur somewhere in the training data; of chats, runs that many
  rows share do not count;
- near: a passage of one training document shares runs of 5 words with the row, and word by word at least
  nine words in ten (all of a row of fewer than 12 words): one word in 12 may be another. Runs that many rows share
  are a template and do not count, nor do runs of numbers and single letters.

Only hashes of the held-out side are held in memory; the training side goes by once, in pieces.
"""

import contextlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from holdfast.data.store import CHAT, TokenStore
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.types import Json, JsonView

NGRAM = 13  # words
SHARE = 0.5  # of a row's n-grams that must occur in training
SHORT = 5  # words of the runs that find near duplicates
COVERED = 0.5  # of a row's words that those of one passage must cover before it is looked at word by word
SAME = 0.9  # of a row's words that must then be the same
WHOLE = 12  # words; of a shorter row all must be
TELLING = 3  # words of a short run that are neither numbers nor single letters
TEMPLATE = 8  # rows of a held-out set that may share a short run before it counts as a template
PIECE = 1 << 21  # tokens, or hashes, looked at in one go
MOST_NGRAMS = 1 << 23  # of a held-out set that are held in memory
SIEVE_BITS = 22
FORMAT = 2

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Leak:
    """How many rows of a held-out set occur in a training set."""

    held_out: str
    training: str
    rows: int  # of the held-out set
    exact: int
    group: int
    ngram: int
    near: int
    certain: int  # rows found in any of the first three ways
    leaked: int  # rows found in any of the four ways
    examples: tuple[int, ...]  # the first few of them, as documents of the held-out store

    @property
    def share(self) -> float:
        """Leaked rows as a share of all."""
        return self.leaked / self.rows

    def __str__(self) -> str:
        ways = ((self.exact, "exact"), (self.group, "by group"), (self.ngram, "by n-grams"), (self.near, "nearly"))
        how = ", ".join(f"{count} {way}" for count, way in ways if count)
        return (
            f"{self.held_out}: {self.leaked} of {self.rows} held-out rows ({self.share:.1%}) also occur in the "
            f"training data of {self.training}{f' ({how})' if how else ''}"
        )


def check_leaks(
    held_out: Mapping[str, TokenStore],
    training: Mapping[str, TokenStore],
    tokenizer: Tokenizer,
    *,
    max_leak: float = 1.0,
    cache: Path | None = None,
) -> list[Leak]:
    """Look for every held-out set in every training set; above `max_leak` this is a UserError.

    Near duplicates are reported and do not count there: they may be other questions in the same words.

    Args:
        held_out: validation and evaluation stores of all stages, by name.
        training: training stores of all stages, by name.
        tokenizer: the one that all of them were prepared with.
        max_leak: largest share of a held-out set that may be found in one training set.
        cache: folder in which results are remembered by the stores' fingerprints.
    """
    pieces = Pieces(tokenizer)
    marks: dict[str, Marks] = {}  # of the held-out sets, made when first needed
    leaks = []
    for train_name, train in training.items():
        missing = {}
        for name, store in held_out.items():
            known = _recall(cache, store, train)
            if known is not None:
                leaks.append(Leak(name, train_name, **known))
                continue
            missing[name] = store
            if name not in marks:
                marks[name] = _marks(store, pieces)
        found = _find([marks[name] for name in missing], train, pieces)
        for (name, store), seen in zip(missing.items(), found, strict=True):
            leak = Leak(name, train_name, **_count(store, seen, train))
            _remember(cache, store, train, leak)
            leaks.append(leak)
    _judge(leaks, max_leak)
    return leaks


def _judge(leaks: list[Leak], max_leak: float) -> None:
    too_many = [leak for leak in leaks if leak.certain > max_leak * leak.rows]
    if too_many:
        lines = "\n".join(f"  {leak}" for leak in too_many)
        raise UserError(
            f"data/max_leak: held-out rows occur in training data, more than the allowed share {max_leak:g}\n{lines}\n"
            "remove them from the training data, or raise data/max_leak if that is meant"
        )


class Grams(NamedTuple):
    """Runs of words: the document of each, the place of its first word among all words, and its hash."""

    rows: I64
    places: I64
    hashes: U64


class Marks(NamedTuple):
    """What a held-out set is recognised by."""

    texts: U64  # a hash of the words of each row
    lengths: I64  # words of each row, signs included; a row without any is only looked for as it is written
    long: Grams
    short: Grams  # those that tell rows apart
    judged: Flags  # rows of which such runs cover at least half
    words: U64  # all words of texts and prompts end to end
    starts: I64  # where each row's words start, and where the last one's end


class Seen(NamedTuple):
    """Which rows of a held-out set a training set holds."""

    exact: Flags
    ngram: Flags
    near: Flags


def _marks(store: TokenStore, pieces: "Pieces") -> Marks:
    texts, lengths, counts = [], [], []
    words: list[U64] = []
    long, short = [_no_grams()], [_no_grams()]
    for first, part in _read(store, pieces):
        prose = part.plain & part.asked
        texts.append(part.texts())
        lengths.append(np.bincount(part.rows[part.asked], minlength=part.documents))
        counts.append(np.bincount(part.rows[prose], minlength=part.documents))
        if sum(len(known.rows) for known in long) <= MOST_NGRAMS:  # else rows are looked for by text and group only
            long.append(_shifted(part.runs(NGRAM, part.plain), first, 0))
            short.append(_shifted(part.runs(SHORT, prose, TELLING), first, sum(len(known) for known in words)))
            words.append(part.hashes[prose])
    own = _without_templates(_joined(short))
    in_row = _together(counts, np.int64)
    starts, cover = _covers(own.places, own.rows)
    covered = np.zeros(store.num_documents, np.int64)
    covered[own.rows[starts]] = cover
    return Marks(
        _together(texts, np.uint64),
        _together(lengths, np.int64),
        # Chats have their system prompt in common, and the names of the roles: that is no leak.
        _without_templates(_joined(long)) if store.kind == CHAT else _joined(long),
        own,
        (covered > 0) & (2 * covered >= in_row),
        _together(words, np.uint64),
        np.cumsum([0, *in_row]),
    )


def _no_grams() -> Grams:
    return Grams(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))


def _together(parts: list[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])


def _joined(parts: list[Grams]) -> Grams:
    return Grams(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _shifted(grams: Grams, rows: int, places: int) -> Grams:
    return Grams(grams.rows + rows, grams.places + places, grams.hashes)


def _without_templates(grams: Grams) -> Grams:
    _, inverse, counts = np.unique(grams.hashes, return_inverse=True, return_counts=True)
    kept = counts[inverse] <= TEMPLATE
    return Grams(grams.rows[kept], grams.places[kept], grams.hashes[kept])


def _covers(places: I64, *groups: I64) -> tuple[I64, I64]:
    """Of short runs in order of group and place: where each group begins, and how many words its runs cover."""
    if not len(places):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    same = np.all([group[1:] == group[:-1] for group in groups], axis=0)
    added = np.full(len(places), SHORT)
    added[1:][same] = np.minimum(np.diff(places)[same], SHORT)
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    return starts, np.add.reduceat(added, starts)


def _find(held_out: list[Marks], train: TokenStore, pieces: "Pieces") -> list[Seen]:
    """What of some held-out sets occurs in a training set, which is read once for all of them."""
    if not held_out:
        return []
    sizes = [len(marks.lengths) for marks in held_out]
    texts = Sought(np.concatenate([marks.texts for marks in held_out]))
    long = Sought(np.concatenate([marks.long.hashes for marks in held_out]))
    near = [np.zeros(size, bool) for size in sizes]
    short = [Sought(marks.short.hashes) for marks in held_out]
    for _, part in _read(train, pieces):
        texts.see(part.texts())
        long.see(part.runs(NGRAM, part.plain).hashes)
        prose = part.plain & part.asked
        grams = part.runs(SHORT, prose)
        for marks, sought, found in zip(held_out, short, near, strict=True):
            _see_near(marks, *sought.matches(grams.hashes), grams, part.hashes[prose], part.rows[prose], found)
    seen = []
    for marks, found, size in zip(held_out, near, sizes, strict=True):
        total = np.bincount(marks.long.rows, minlength=size)
        shared = np.bincount(marks.long.rows[long.seen(marks.long.hashes)], minlength=size)
        ngram = (total > 0) & (shared >= SHARE * total)
        seen.append(Seen((marks.lengths > 0) & texts.seen(marks.texts), ngram, found))
    return seen


def _see_near(marks: Marks, which: I64, own: I64, grams: Grams, words: U64, documents: I64, found: Flags) -> None:
    """Note the rows that training words hold nearly as they are.

    Args:
        which, own: pairs of equal short runs, of the training words and of the rows.
        words, documents: the training words end to end, and the document of each.
        found: rows that are known already; those that are found are added.
    """
    rows = marks.short.rows[own]
    kept = marks.judged[rows] & ~found[rows]
    which, own, rows = which[kept], own[kept], rows[kept]
    if not len(rows):
        return
    places, holders = marks.short.places[own], grams.rows[which]
    shifts = grams.places[which] - places  # the same along a passage, until a word is left out or put in
    order = np.lexsort((places, shifts, rows, holders))
    starts, cover = _covers(places[order], holders[order], rows[order], shifts[order])
    passages = order[starts]
    rows, holders, shifts = rows[passages], holders[passages], shifts[passages]
    apart = (rows[1:] != rows[:-1]) | (holders[1:] != holders[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], apart]))  # of the passages that a row shares with a document
    lengths = (marks.starts[1:] - marks.starts[:-1])[rows[firsts]]
    enough = np.add.reduceat(cover, firsts) >= COVERED * lengths
    lasts = np.concatenate([firsts[1:], [len(rows)]])
    for first, last, length in zip(firsts[enough], lasts[enough], lengths[enough], strict=True):
        row = rows[first]
        if found[row]:
            continue
        main = shifts[first + np.argmax(cover[first:last])]
        same = np.zeros(length, bool)
        for shift in shifts[first:last]:
            if abs(shift - main) <= length // WHOLE:
                same |= _same(marks, row, shift, words, documents, holders[first])
        found[row] = same.sum() >= (length if length < WHOLE else SAME * length)


def _same(marks: Marks, row: int, shift: int, words: U64, documents: I64, holder: int) -> Flags:
    """Which words of a row are the same as the words of a training document that are so far on."""
    begin, end = marks.starts[row], marks.starts[row + 1]
    same = np.zeros(end - begin, bool)
    low, high = max(begin + shift, 0), min(end + shift, len(words))
    own = slice(low - shift, high - shift)
    same[low - shift - begin : high - shift - begin] = (words[low:high] == marks.words[own]) & (
        documents[low:high] == holder
    )
    return same


class Sought:
    """Hashes that are looked for, and which of them were seen."""

    def __init__(self, hashes: U64) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._seen = np.zeros(len(hashes), bool)
        self._sieve = np.zeros(1 << SIEVE_BITS, bool)  # lets go of nearly all hashes before the slower search
        self._sieve[hashes >> np.uint64(64 - SIEVE_BITS)] = True

    def _among(self, hashes: U64) -> I64:
        likely = np.flatnonzero(self._sieve[hashes >> np.uint64(64 - SIEVE_BITS)])
        return likely[_is_in(hashes[likely], self._sorted)]

    def see(self, hashes: U64) -> None:
        """Note which of the sought hashes are among these."""
        self._seen[np.searchsorted(self._sorted, hashes[self._among(hashes)])] = True

    def seen(self, hashes: U64) -> Flags:
        """Which of some hashes were seen."""
        return _is_in(hashes, self._sorted[self._seen])

    def matches(self, hashes: U64) -> tuple[I64, I64]:
        """Pairs of equal hashes: which of these, and which of the sought ones."""
        here = self._among(hashes)
        low, high = (np.searchsorted(self._sorted, hashes[here], side=side) for side in ("left", "right"))
        counts = high - low
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(here, counts), self._order[np.repeat(low, counts) + within]


def _count(store: TokenStore, seen: Seen, train: TokenStore) -> Json:
    written, group = (_present(store.keys[:, column], train.keys[:, column]) for column in (0, 1))
    # A row without a group has its text's hash there, which is the exact test again.
    group &= store.keys[:, 0] != store.keys[:, 1]
    exact = written | seen.exact
    certain = exact | group | seen.ngram
    leaked = certain | seen.near
    counts = {"exact": exact, "group": group, "ngram": seen.ngram, "near": seen.near}
    counts |= {"certain": certain, "leaked": leaked}
    return {
        "rows": store.num_documents,
        **{name: int(flags.sum()) for name, flags in counts.items()},
        "examples": tuple(int(row) for row in np.flatnonzero(leaked)[:10]),
    }


def _present(wanted: U64, among: U64) -> Flags:
    """Which of some hashes occur among many, which are looked at a part at a time."""
    ordered = np.sort(wanted)
    hits = [np.empty(0, np.uint64)]
    for start in range(0, len(among), PIECE):
        part = among[start : start + PIECE]
        hits.append(np.unique(part[_is_in(part, ordered)]))
    return _is_in(wanted, np.sort(np.concatenate(hits)))


def _is_in(values: U64, ordered: U64) -> Flags:
    """Which values occur in a sorted array; one search each, where `np.isin` would sort both again."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    found: Flags = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


BLANK, WORD, SIGN = 0, 1, 2
DOCUMENT, ANSWER = 0, 1  # bytes that mark where a document begins and where its prompt ends
SIGNS = b"+-*/%=<>^|&~"
DIGITS = b"0123456789"
# Bytes from 128 on are parts of letters: what else they were is blank by then.
KINDS = np.array([SIGN if b in SIGNS else WORD if b >= 128 or chr(b).isalnum() else BLANK for b in range(256)])
NOT_ASCII = re.compile(rb"[a-z]?[\x80-\xff]+")  # with the letter that a combining accent may belong to
ASCII_SIGNS = str.maketrans("×÷−", "*/-")
CACHED_BYTES = 64  # longer runs are rarely met again


class Pieces:
    """The bytes of all tokens of a vocabulary, in lower case, for decoding many tokens at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [piece or b" " for piece in tokenizer.pieces()]  # the end of text ends a word too
        self._sizes = np.array([len(piece) for piece in pieces], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        letters = np.frombuffer(b"".join(pieces).lower(), np.uint8)
        self._bytes = np.where(letters <= ANSWER, 32, letters).astype(np.uint8)

    def decode(self, tokens: NDArray[Any]) -> tuple[NDArray[np.uint8], I64]:
        """The bytes of tokens end to end, and where each token's bytes start."""
        sizes = self._sizes[tokens]
        starts = np.cumsum(sizes) - sizes
        index = np.repeat(self._starts[tokens] - starts, sizes) + np.arange(int(sizes.sum()))
        return self._bytes[index], starts


def _folded(text: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Text after NFKC and case folding, with a blank for what is neither letter nor digit outside ASCII."""
    if not len(text) or text.max() < 128:
        return text
    return np.frombuffer(NOT_ASCII.sub(_fold_match, text.tobytes()), np.uint8)


def _fold_match(match: re.Match[bytes]) -> bytes:
    run = match[0]
    return _fold_often(run) if len(run) <= CACHED_BYTES else _fold(run)


def _fold(run: bytes) -> bytes:
    text = unicodedata.normalize("NFKC", run.decode("utf-8", "replace")).casefold().translate(ASCII_SIGNS)
    return "".join(c if c.isascii() or unicodedata.category(c)[0] in "LMN" else " " for c in text).encode()


_fold_often = lru_cache(maxsize=1 << 16)(_fold)


@dataclass(frozen=True)
class Part:
    """The words of a piece of a store, in order."""

    documents: int
    rows: I64  # the document of each word, the first of the piece being 0
    hashes: U64
    plain: Flags  # letters and digits, not a sign
    telling: Flags  # neither a number nor a single letter
    asked: Flags  # of a text or a prompt, not of an answer

    def texts(self) -> U64:
        """A hash of the words of each document's text or prompt."""
        rows, hashes = self.rows[self.asked], self.hashes[self.asked]
        places = np.arange(len(rows)) - np.searchsorted(rows, rows)
        powers = np.cumprod(np.full(int(places.max(initial=0)) + 1, 0x9E3779B97F4A7C15, np.uint64))
        mixed = (hashes ^ (hashes >> np.uint64(29))) * powers[places]
        texts = np.zeros(self.documents, np.uint64)
        if len(rows):
            starts = np.flatnonzero(places == 0)
            texts[rows[starts]] = np.add.reduceat(mixed, starts)
        return texts

    def runs(self, size: int, among: Flags, telling: int = 0) -> Grams:
        """Every run of that many words inside a document, if at least some of them are telling."""
        rows, words = self.rows[among], self.hashes[among]
        count = len(words) - size + 1
        if count <= 0:
            return _no_grams()
        hashes = np.zeros(count, np.uint64)
        for step in range(size):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[step : step + count]
        kept = rows[:count] == rows[size - 1 :]
        if telling:
            told = np.concatenate([[0], np.cumsum(self.telling[among])])
            kept &= told[size:] - told[:-size] >= telling
        first = np.flatnonzero(kept)
        return Grams(rows[first], first, hashes[first])


def _read(store: TokenStore, pieces: Pieces) -> Iterator[tuple[int, Part]]:
    """A store in pieces of whole documents: the first document of each, and its words."""
    offsets = store.offsets
    first = 0
    while first < store.num_documents:
        stop = max(int(np.searchsorted(offsets, offsets[first] + PIECE, side="right")) - 1, first + 1)
        store.ensure(offsets[first : first + 1], offsets[stop : stop + 1])
        text, starts = pieces.decode(store.flat[offsets[first] : offsets[stop]])
        begins = offsets[first:stop] - offsets[first]
        prompts = store.question_lengths(first, stop)
        ends = (begins + prompts)[prompts > 0]
        marks = np.concatenate([starts[begins], starts[ends]])
        kinds = np.repeat(np.array([DOCUMENT, ANSWER], np.uint8), [len(begins), len(ends)])
        yield first, _words(_folded(np.insert(text, marks, kinds)), stop - first)
        first = stop


def _words(text: NDArray[np.uint8], documents: int) -> Part:
    kinds = KINDS[text]
    kinds[(kinds == SIGN) & ~_beside_digit(text)] = BLANK
    edges = np.flatnonzero(np.diff(np.concatenate([[BLANK], kinds, [BLANK]])))
    runs = np.flatnonzero(kinds[np.minimum(edges[:-1], len(kinds) - 1)] != BLANK)
    begins, ends = edges[runs], edges[runs + 1]
    opened = np.flatnonzero(text == DOCUMENT)
    rows = np.searchsorted(opened, begins) - 1
    answers = np.flatnonzero(text == ANSWER)
    closed = np.full(documents, len(text))
    closed[np.searchsorted(opened, answers) - 1] = answers
    letters = np.concatenate([[0], np.cumsum(~np.isin(text, np.frombuffer(DIGITS, np.uint8)))])
    telling = (ends - begins > 1) & (letters[ends] > letters[begins])
    plain = kinds[begins] == WORD
    return Part(documents, rows, _hashes(text, begins, ends), plain, telling, begins < closed[rows])


def _beside_digit(text: NDArray[np.uint8]) -> Flags:
    """Where a number stands before or after, with or without a blank between."""
    digit = np.isin(np.concatenate([[32, 32], text, [32, 32]]), np.frombuffer(DIGITS, np.uint8))
    blank = np.concatenate([[True], text == 32, [True]])
    size = len(text)
    left = digit[1 : size + 1] | (blank[:size] & digit[:size])
    right = digit[3 : size + 3] | (blank[2:] & digit[4:])
    beside: Flags = left | right
    return beside


def _hashes(text: NDArray[np.uint8], begins: I64, ends: I64) -> U64:
    """A hash of every word: FNV-1a, letter by letter over all words at once."""
    length = ends - begins
    base = np.uint64(0x100000001B3)
    hashes = np.full(len(begins), 0xCBF29CE484222325, np.uint64)
    remaining = np.arange(len(begins))
    for step in range(min(int(length.max(initial=0)), 64)):  # the first 64 letters tell words apart well enough
        # Words are short, and only the longer ones are still there at each step.
        remaining = remaining[length[remaining] > step]
        hashes[remaining] = (hashes[remaining] ^ text[begins[remaining] + step].astype(np.uint64)) * base
    return hashes


def _note(cache: Path, held_out: TokenStore, train: TokenStore) -> Path:
    name = sha256(f"{FORMAT} {held_out.fingerprint} {train.fingerprint}".encode()).hexdigest()[:32]
    return cache / "leaks" / f"{name}.json"


def _recall(cache: Path | None, held_out: TokenStore, train: TokenStore) -> Json | None:
    if cache is None or not (note := _note(cache, held_out, train)).is_file():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # what is damaged is found anew
        known: Json = json.loads(note.read_text(encoding="utf-8"))
        whole = known.keys() - {"checksum"} == {item.name for item in fields(Leak)} - {"held_out", "training"}
        if whole and known.pop("checksum", None) in (None, _sum(known)):
            return known | {"examples": tuple(known["examples"])}
    return None


def _sum(known: JsonView) -> int:
    return crc32(json.dumps(known, sort_keys=True).encode())


def _remember(cache: Path | None, held_out: TokenStore, train: TokenStore, leak: Leak) -> None:
    if cache is not None:
        note = _note(cache, held_out, train)
        note.parent.mkdir(parents=True, exist_ok=True)
        known = {name: value for name, value in asdict(leak).items() if name not in ("held_out", "training")}
        write_json(note, known | {"checksum": _sum(known)})
