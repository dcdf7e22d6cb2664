"""A store of ids that exist already: they are looked through once, and only an index of them is written.

Every id is compared with the vocabulary, every byte of the files goes into a checksum, and the documents are found:
by the files' own index, else by the end-of-text id. What a store notes of a document (its bytes, the hash of its text)
is taken from its decoded text, so that it is what preparation notes of the same text.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.checksums import PieceSums, pieces_of
from holdfast.data.documents import BrokenRows, digest, normalise
from holdfast.data.mapped import FILES, SPANS, Ints, Layout, Spans, map_files
from holdfast.data.progress import Progress
from holdfast.data.store import RECORD
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import write_json
from holdfast.types import Json

CHUNK = 1 << 18  # ids looked at in one go
LONGEST = (1 << 24) + 1  # ids of a document: the longest text that is read elsewhere, a byte each, has as many
SHORTENED = 1 << 20  # ids of the documents that a longer one, such as a stream without any mark, is cut into


@dataclass(frozen=True)
class Choice:
    """Which documents of the files a store has.

    Args:
        held_out: the share that is held out of files without a validation part; None takes all.
        side: `validation` takes what is held out, another split the rest.
        max_documents, max_tokens: where to stop, at whole documents.
    """

    held_out: float | None
    side: str
    max_documents: int | None = None
    max_tokens: int | None = None

    def kept(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which documents are on this side, by the hashes of their texts, as `documents.is_held_out` has it."""
        if self.held_out is None:
            return np.ones(len(keys), bool)
        below: NDArray[np.bool_] = keys.byteswap() < np.uint64(math.ceil(self.held_out * 2.0**64))
        return below if self.side == "validation" else ~below


@dataclass
class Found:
    """What the store of some files holds."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0  # documents on either side of a division
    stopped: bool = False  # at the limit of tokens
    files: list[Json] = field(default_factory=list)  # sizes and checksums
    notes: list[str] = field(default_factory=list)  # what the user should know
    report: Json = field(default_factory=lambda: BrokenRows().report())  # no row of a token file is broken


def index_files(folder: Path, name: str, layout: Layout, tokenizer: Tokenizer, choice: Choice, bar: Progress) -> Found:
    """Write the records of a store's documents, and where its ids are, into its folder."""
    found = Found(notes=list(layout.notes))
    for path in layout.files:
        size, sums = path.stat().st_size, PieceSums.of(path)
        found.files.append({"name": path.name, "size": size, "pieces": (n := pieces_of(size)), "sums": sums.blocks(n)})
    ids = map_files(layout)
    _check_ids(name, ids, layout, tokenizer)
    ends = layout.ends
    if ends is None:
        ends, marks = _ends_by_mark(ids, layout, tokenizer)
        if not marks:
            found.notes.append(f"the end-of-text id {tokenizer.eot_id} is nowhere in it: each file is one document")
    ends = _cut(ends)
    found.rows = len(ends)
    runs = [np.empty((0, 2), np.int64)]
    with (folder / "documents.bin").open("wb") as file:
        for part in _documents(ids, ends, tokenizer):
            runs.append(_take(found, part, choice, file))
            bar.update(found.documents, found.tokens, int(part.stops[-1]) / len(ids))
            if found.stopped or found.documents == choice.max_documents:
                break
    np.save(folder / SPANS, _spans(layout, np.concatenate(runs)))
    write_json(folder / FILES, [str(path.absolute()) for path in layout.files])
    return found


class _Part(NamedTuple):
    """Some documents: where they start and stop among all ids, and what a store notes of them."""

    starts: Ints
    stops: Ints
    records: NDArray[Any]  # of dtype RECORD


def _take(found: Found, part: _Part, choice: Choice, file: IO[bytes]) -> Ints:
    """Add the documents that a store has of a part; where they start and stop."""
    kept = choice.kept(part.records["key"])
    starts, stops, records = part.starts[kept], part.stops[kept], part.records[kept]
    room = None if choice.max_documents is None else choice.max_documents - found.documents
    fits = len(records[:room])
    if choice.max_tokens is not None:
        within = int((found.tokens + np.cumsum(stops - starts)[:fits] <= choice.max_tokens).sum())
        found.stopped, fits = within < fits, within
    file.write(records[:fits].tobytes())
    found.documents += fits
    found.tokens += int((stops - starts)[:fits].sum())
    found.bytes += int(records["bytes"][:fits].sum(dtype=np.int64))
    return np.stack([starts, stops], axis=1)[:fits]


def _check_ids(name: str, ids: Spans, layout: Layout, tokenizer: Tokenizer) -> None:
    """Refuse ids that the vocabulary does not have."""
    for start in range(0, len(ids), CHUNK):
        before = start
        for file, part in ids.parts(start, min(start + CHUNK, len(ids))):
            place = int(part.argmax())
            if part[place] >= tokenizer.vocab_size:
                raise UserError(
                    f"dataset {name}: {layout.files[file]}: the id {part[place]} (number {before + place:,} of the "
                    f"split, read as {np.dtype(layout.dtype).name}) is not in the vocabulary of the tokenizer "
                    f"{tokenizer.name}, which has {tokenizer.vocab_size:,} ids; set tokenizer/name to the one that "
                    f"made the file, or data/sources/{name}/dtype where its ids have another width"
                )
            before += len(part)


def _ends_by_mark(ids: Spans, layout: Layout, tokenizer: Tokenizer) -> tuple[Ints, int]:
    """Where documents end, and how many end-of-text ids there are.

    A document ends after an end-of-text id and those that follow it at once, and at the end of every file.

    Some writers put the mark before a document instead: marks at the head of a file belong to its first document.
    """
    ends: list[Ints] = []
    start = total = 0
    for count in layout.spans[:, 2].tolist():
        marks = [np.empty(0, np.int64)]
        for first in range(start, start + count, CHUNK):
            marks.append(first + np.flatnonzero(ids[first : min(first + CHUNK, start + count)] == tokenizer.eot_id))
        found = np.concatenate(marks)
        last = np.diff(found, append=-1) != 1  # of those that follow each other
        head = found == start + np.arange(len(found))
        ends += [found[last & ~head] + 1, np.array([start + count])]
        start, total = start + count, total + len(found)
    return np.concatenate(ends), total


def _cut(ends: Ints) -> Ints:
    """Ends of documents in order, without empty ones; one that is longer than LONGEST is cut."""
    ends = np.unique(ends[ends > 0])
    lengths = np.diff(ends, prepend=0)
    more = [np.arange(end - length + SHORTENED, end, SHORTENED) for end, length in zip(ends, lengths, strict=True)
            if length > LONGEST]  # fmt: skip
    return np.unique(np.concatenate([ends, *more])) if more else ends


def _documents(ids: Spans, ends: Ints, tokenizer: Tokenizer) -> Iterator[_Part]:
    """All documents, some at a time."""
    pieces = tokenizer.pieces()
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    places = np.cumsum(sizes) - sizes
    letters = np.frombuffer(b"".join(pieces), np.uint8)
    offsets, first = np.concatenate([[0], ends]), 0
    while first < len(ends):
        stop = max(int(np.searchsorted(offsets, offsets[first] + CHUNK, side="right")) - 1, first + 1)
        tokens = ids[offsets[first] : offsets[stop]]
        behind = np.cumsum(sizes[tokens])  # bytes up to and with each id
        index = np.repeat(places[tokens] - behind + sizes[tokens], sizes[tokens]) + np.arange(behind[-1])
        text = letters[index].tobytes()
        bounds = np.concatenate([[0], behind[offsets[first + 1 : stop + 1] - offsets[first] - 1]])
        records = np.zeros(stop - first, RECORD)
        records["length"] = np.diff(offsets[first : stop + 1])
        records["bytes"] = np.diff(bounds)
        edges = bounds.tolist()
        keys = [digest(normalise(text[a:b].decode("utf-8", "replace"))) for a, b in itertools.pairwise(edges)]
        records["key"] = records["group"] = np.frombuffer(b"".join(keys), "<u8")
        yield _Part(offsets[first:stop], offsets[first + 1 : stop + 1], records)
        first = stop


def _spans(layout: Layout, runs: Ints) -> Ints:
    """Where the ids of some documents are: those that follow each other in a file are one span."""
    if not len(runs):
        return np.empty((0, 3), np.int64)
    width = np.dtype(layout.dtype).itemsize
    begins = np.concatenate([[0], np.cumsum(layout.spans[:, 2])])
    of = np.searchsorted(begins, runs[:, 0], side="right") - 1  # no document lies in two spans
    new = np.concatenate([[True], (runs[1:, 0] != runs[:-1, 1]) | (of[1:] != of[:-1])])
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], len(runs)) - 1
    starts, stops = runs[firsts, 0], runs[lasts, 1]
    return np.stack(
        [
            layout.spans[of[firsts], 0],
            layout.spans[of[firsts], 1] + (starts - begins[of[firsts]]) * width,
            stops - starts,
        ],
        axis=1,
    )


def copy_ids(folder: Path, layout: Layout) -> None:
    """Write the ids of a store into its own folder: of files that cannot be read in place."""
    ids = map_files(layout._replace(spans=np.load(folder / SPANS)))
    with (folder / "tokens.bin").open("wb") as file:
        for start in range(0, len(ids), CHUNK):
            file.write(ids[start : start + CHUNK].tobytes())
    for path in (folder / SPANS, folder / FILES, *layout.files):
        path.unlink()
