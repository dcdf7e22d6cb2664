"""Documents: what every source yields, and how a source without a validation split is divided."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.data.config import DataConfig
from holdfast.errors import UserError
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.data.tokenizers import Tokenizer

SPLITS = ("train", "validation")
STREAM_VALIDATION = 1024  # documents at the head of an endless stream that are its validation split
SHOWN_REASONS, SHOWN_PLACES = 5, 3  # of a kind of broken rows on the terminal
_DIGITS = re.compile(r"\d+")
EXAMPLES_PER_KIND = 20  # broken rows that a report shows with file and line


class Document(NamedTuple):
    """One example: plain `text`, or a `prompt` with its `answer`, or a chat.

    Of a chat `prompt` is what was said before the assistant's last turn and `answer` the rest, without a template;
    `rendered` is what a template makes of it, and `spans` are the characters of that which the assistant says.

    `choices` are all possible answers and `label` is the index of the right one; `group` names what several
    examples share (a premise), so that they are never split between training and validation.
    """

    id: str
    text: str = ""
    prompt: str = ""
    answer: str = ""
    choices: tuple[str, ...] = ()
    label: int | None = None
    group: str = ""
    rendered: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def full_text(self) -> str:
        """All that is tokenised, the prompt first."""
        return self.rendered or self.text or self.prompt + self.answer

    @property
    def subject(self) -> str:
        """What makes it a copy of another: its text or its prompt."""
        return self.text or self.prompt or self.answer

    @property
    def key(self) -> bytes:
        """What decides the split: the group, else the normalised text or prompt, so that copies stay together."""
        return digest(normalise(self.group or self.subject))


def normalise(text: str) -> str:
    """Text without differences of case and white space.

    >>> normalise("  A  b\\nC ")
    'a b c'
    """
    return " ".join(text.lower().split())


def digest(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


@dataclass
class BrokenRows:
    """Rows that could not be used, by kind, the first of each kind with file and line."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Json]] = field(default_factory=dict)

    def add(self, kind: str, file: str, line: int, detail: str = "") -> None:
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < EXAMPLES_PER_KIND:
            shown.append({"file": file, "line": line, "detail": detail[:200]})

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def report(self) -> Json:
        """Counts and examples as JSON can hold them, in a fixed order."""
        return {"counts": dict(sorted(self.counts.items())), "examples": dict(sorted(self.examples.items()))}

    def lines(self) -> list[str]:
        """The report for people, one line a kind and one an example."""
        return broken_lines(self.report())


def broken_lines(report: Json) -> list[str]:
    """A report of broken rows as lines of text: a count for each kind, and the first lines for each reason.

    >>> example = {"file": "a.jsonl", "detail": "no field 'text'"}
    >>> broken_lines({"counts": {"bad": 9}, "examples": {"bad": [{**example, "line": n} for n in (3, 5, 8, 9)]}})
    ['9 × bad', "  a.jsonl, lines 3, 5, 8, …: no field 'text'"]
    """
    lines = []
    for kind, count in report["counts"].items():
        lines.append(f"{count} × {kind}")
        reasons: dict[tuple[str, str], list[Json]] = {}
        for example in report["examples"][kind]:
            # Columns and lengths differ from row to row; the reason is the same.
            reasons.setdefault((example["file"], _DIGITS.sub("#", example["detail"])), []).append(example)
        for same in list(reasons.values())[:SHOWN_REASONS]:
            places = ", ".join(str(example["line"]) for example in same[:SHOWN_PLACES])
            more = ", …" if len(same) > SHOWN_PLACES else ""
            detail = f": {same[0]['detail']}" if same[0]["detail"] else ""
            lines.append(f"  {same[0]['file']}, line{'s' if len(same) > 1 else ''} {places}{more}{detail}")
        if len(reasons) > SHOWN_REASONS:
            lines.append("  …")
    return lines


@dataclass
class SourceContext:
    """What a source needs to read: the options, and where it reports broken rows and progress."""

    data: DataConfig
    tokenizer: "Tokenizer | None" = None  # whose template renders chats; without one they are left as they are
    broken: BrokenRows = field(default_factory=BrokenRows)
    fraction: float | None = None  # how much of the split has been read, where that is known
    documents: int = 0  # read so far, whichever side of a division they fall on


class Source(Protocol):
    """A dataset that can be read again and again, always in the same order."""

    @property
    def name(self) -> str:
        """What it is called in a mixture."""

    @property
    def kind(self) -> str:
        """`text`, `task` or `chat`."""

    def splits(self, context: SourceContext) -> tuple[str, ...]:
        """The splits that exist as such; `train` is always one."""

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:
        """The documents of a split that exists; broken rows go to `context.broken`."""

    def fingerprint(self, context: SourceContext) -> str:
        """A text that changes when the documents change."""

    def streamed(self, context: SourceContext) -> bool:
        """Whether the documents come from an endless stream, to be read only as far as needed."""


class LocalSource:
    """Base of sources that are read or generated whole: nothing is streamed."""

    def streamed(self, context: SourceContext) -> bool:  # noqa: ARG002 (the protocol's argument)
        return False


def held_out_fraction(source: Source, data: DataConfig) -> float:
    """The share of a source that is held out when it has no validation split."""
    own = data.sources[source.name].validation_fraction if source.name in data.sources else None
    return own if own is not None else data.validation_fraction


def is_held_out(document: Document, fraction: float) -> bool:
    """Whether a document belongs to the validation part; depends on its content alone."""
    return int.from_bytes(document.key, "big") < fraction * 2.0**64


def read(source: Source, split: str, context: SourceContext) -> Iterator[Document]:
    """The documents of `train` or `validation`, whether or not the source has such a split itself.

    Without a validation split of its own, a source gives up the documents whose content hashes below a
    fraction (a stream: its first documents), and training never sees them.
    """
    existing = source.splits(context)
    if split not in existing and split not in SPLITS:
        raise UserError(f"dataset {source.name}: there is no split {split!r}; it has {', '.join(existing)}")
    divided = "validation" not in existing and split in SPLITS
    streamed = source.streamed(context)
    fraction = held_out_fraction(source, context.data)
    for index, document in enumerate(source.documents("train" if divided else split, context)):
        context.documents += 1
        if divided:
            held_out = index < STREAM_VALIDATION if streamed else is_held_out(document, fraction)
            if held_out != (split == "validation"):
                if streamed and not held_out:
                    return  # past the head of the stream
                continue
        yield document
