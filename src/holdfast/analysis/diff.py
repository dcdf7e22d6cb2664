"""What did I lose? Two models on the same texts and questions, without training either.

Texts are compared in bits per byte of the same bytes, so that tokenizers may differ; questions by answers that changed.
A dataset is lost where the paired 95 % interval of its rise in bits per byte lies above the tolerance; a task where the
share of known questions (corrected for chance) fell by more than the tolerance and McNemar's test leaves no doubt.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Literal, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, SourceContext, read
from holdfast.data.sources import find_source
from holdfast.errors import UserError
from holdfast.evaluation import statistics
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.evaluator import Evaluator, Example
from holdfast.evaluation.tasks import subset
from holdfast.evaluation.texts import TextLoss, text_divergences, text_losses
from holdfast.models.family import Model
from holdfast.training.runs import OpenModel
from holdfast.types import Json

Floats = NDArray[np.float64]
Word = Literal["lost", "kept", "undecided", "gained"]

LENGTHS = (500, 2_000)  # bytes: short, medium and long texts
POSITIONS = (256, 1_024)  # bytes from the start of a text
SPAN = 60  # bytes, about; spans end at white space
MOST_TEXTS, MOST_SPANS, MOST_ANSWERS = 5, 10, 8  # that are shown
DOUBT = 0.05  # McNemar's p below which answers did change


class Span(NamedTuple):
    """A stretch of a text whose bits changed."""

    text: str
    before: str  # what stands before it, a little
    after: str
    rise: float  # bits


@dataclass(frozen=True)
class TextChange:
    """A text, its bits per byte under both models, and the spans that rose most."""

    id: str
    opening: str
    first: float
    second: float
    rise: float  # bits in all
    spans: tuple[Span, ...]


class Slice(NamedTuple):
    """A part of a dataset: bits per byte under both models, and its share of the bytes."""

    kind: str
    name: str
    first: float
    second: float
    share: float


@dataclass(frozen=True)
class DataDiff:
    """A dataset: bits per byte under both models and the paired difference over its documents."""

    name: str
    first: float
    second: float
    change: Optional[statistics.Difference]
    num_documents: int
    num_bytes: int
    word: Word
    slices: tuple[Slice, ...] = ()
    texts: tuple[TextChange, ...] = ()
    divergence: Optional[tuple[float, float]] = None  # KL(first ‖ second) and back, nats a token

    @property
    def rise(self) -> float:
        """Bits per byte more under the second model."""
        return self.second - self.first


class AnswerChange(NamedTuple):
    """A question that the first model answered rightly and the second wrongly, with how sure both were."""

    first: Example
    second: Example
    sureness: float


@dataclass(frozen=True)
class TaskDiff:
    """A task: answers that changed, McNemar's p of these two models, and shares of known questions."""

    name: str
    num_questions: int
    first: float
    second: float
    guessing: float
    lost: int  # right before, wrong after
    won: int
    p: float
    word: Word
    examples: tuple[AnswerChange, ...] = ()

    @property
    def known(self) -> tuple[float, float]:
        """The share of questions that each model knows, corrected for chance."""
        return (
            statistics.known_share(self.first, self.guessing),
            statistics.known_share(self.second, self.guessing),
        )

    @property
    def fall(self) -> float:
        """How much of the known share was lost."""
        return self.known[0] - self.known[1]


@dataclass(frozen=True)
class Diff:
    """All that was compared; worst first."""

    first: str
    second: str
    tolerance: float
    data: tuple[DataDiff, ...] = ()
    tasks: tuple[TaskDiff, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def named(self, word: Word) -> list[str]:
        """What has that verdict, by name, tasks first."""
        tasks = [each.name for each in self.tasks if each.word == word]
        return tasks + [each.name for each in self.data if each.word == word]

    @property
    def lost(self) -> list[str]:
        """What was lost beyond the tolerance."""
        return self.named("lost")


def compare_texts(
    name: str,
    documents: Sequence[Document],
    losses: tuple[Sequence[TextLoss], Sequence[TextLoss]],
    tolerance: float,
    divergences: Floats | None = None,
) -> DataDiff:
    """Two models on the same texts.

    Args:
        losses: of both models, text by text.
        divergences: of `text_divergences`, where vocabularies agree.
    """
    sizes = np.array([len(each.full_text.encode()) for each in documents], float)
    bits = [np.array([loss.nats.sum() for loss in side]) / log(2) for side in losses]
    first, second = (float(each.sum() / sizes.sum()) for each in bits)
    change = statistics.paired_ratio(bits[0], bits[1], sizes)
    order = np.argsort(-(bits[1] - bits[0]), kind="stable")[:MOST_TEXTS]
    texts = tuple(
        _text_change(documents[index], losses[0][index], losses[1][index])
        for index in order
        if bits[1][index] > bits[0][index]
    )
    word = _text_word(second - first, change, tolerance)
    apart = None
    if divergences is not None and divergences[2].sum():
        apart = (
            float(divergences[0].sum() / divergences[2].sum()),
            float(divergences[1].sum() / divergences[2].sum()),
        )
    slices = tuple(_slices(documents, losses, sizes))
    return DataDiff(
        name, first, second, change, len(documents), int(sizes.sum()), word, slices, texts, divergence=apart
    )


def _text_word(rise: float, change: statistics.Difference | None, tolerance: float) -> Word:
    low, high = (change.low, change.high) if change is not None else (-np.inf, np.inf)
    if low > tolerance:
        return "lost"
    if rise == 0 or high <= tolerance:
        return "gained" if high < 0 else "kept"
    return "undecided"


def _text_change(document: Document, first: TextLoss, second: TextLoss) -> TextChange:
    text = document.full_text
    edges = span_edges(text)
    places = np.array([len(text[:edge].encode()) for edge in edges], np.int64)
    rises = np.diff(second.until(places) - first.until(places)) / log(2)
    found = [
        Span(text[edges[i] : edges[i + 1]], text[max(edges[i] - 40, 0) : edges[i]], text[edges[i + 1] :][:40], rises[i])
        for i in np.argsort(-rises, kind="stable")[:3]
        if rises[i] > 0
    ]
    size = max(len(text.encode()), 1)
    before, after = float(first.nats.sum() / log(2)), float(second.nats.sum() / log(2))
    return TextChange(document.id, text[:200], before / size, after / size, after - before, tuple(found))


def span_edges(text: str, size: int = SPAN) -> list[int]:
    """Where a text is cut into spans of about a size, at white space where there is some.

    >>> span_edges("one two three four", 8)
    [0, 8, 14, 18]
    """
    edges = [0]
    while len(text) - edges[-1] > size:
        space = max(text.rfind(" ", edges[-1] + 1, edges[-1] + size), text.rfind("\n", edges[-1] + 1, edges[-1] + size))
        edges.append(space + 1 if space >= 0 else edges[-1] + size)
    return [*edges, len(text)] if text else edges


def _slices(
    documents: Sequence[Document], losses: tuple[Sequence[TextLoss], Sequence[TextLoss]], sizes: Floats
) -> list[Slice]:
    """The same texts by length, by position, by kind of character and by the user's own field."""
    kinds: dict[tuple[str, str], Floats] = {}  # bits of the first, bits of the second, bytes

    def add(kind: str, name: str, values: Sequence[float] | Floats) -> None:
        kinds[kind, name] = kinds.get((kind, name), np.zeros(3)) + values

    for document, one, two, size in zip(documents, *losses, sizes, strict=True):
        whole = (one.nats.sum() / log(2), two.nats.sum() / log(2), size)
        add("length", _between(size, LENGTHS), whole)
        if document.group:
            add("group", document.group, whole)
        edges = np.array([0, *(min(each, int(size)) for each in POSITIONS), int(size)], np.int64)
        parts = [np.diff(each.until(edges)) / log(2) for each in (one, two)]
        for place, length in zip((0, *POSITIONS), np.diff(edges), strict=True):
            index = (0, *POSITIONS).index(place)
            if length:
                add("position", f"from byte {place:,}", (parts[0][index], parts[1][index], float(length)))
        for name, values in _by_character(document.full_text, one, two).items():
            add("characters", name, values)
    total = float(sizes.sum())
    return [
        Slice(kind, name, float(first / size), float(second / size), float(size / total))
        for (kind, name), (first, second, size) in sorted(kinds.items())
        if size
    ]


def _between(size: float, edges: Sequence[int]) -> str:
    low = [edge for edge in (0, *edges) if size >= edge][-1]
    higher = [edge for edge in edges if edge > low]
    return f"{low:,} to {higher[0]:,} bytes" if higher else f"{low:,} bytes and more"


def _by_character(text: str, one: TextLoss, two: TextLoss) -> dict[str, Floats]:
    """Bits of both models and bytes, by the kind of each character."""
    if not text:
        return {}
    lengths = np.array([len(character.encode()) for character in text], np.int64)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    first, second = (np.diff(each.until(edges)) / log(2) for each in (one, two))
    kinds = np.array([_character_kind(character) for character in text])
    return {
        str(kind): np.array(
            [first[kinds == kind].sum(), second[kinds == kind].sum(), float(lengths[kinds == kind].sum())]
        )
        for kind in np.unique(kinds)
    }


def _character_kind(character: str) -> str:
    if character.isspace():
        return "white space"
    if character.isdigit():
        return "digits"
    if character.isalpha():
        return "letters" if character.isascii() else "letters beyond ASCII"
    return "punctuation" if unicodedata.category(character).startswith("P") else "symbols"


def compare_answers(
    name: str, first: Sequence[Example], second: Sequence[Example], guessing: float, tolerance: float
) -> TaskDiff:
    """Two models on the same questions.

    Args:
        guessing: the accuracy of guessing.
    """
    assert [each.id for each in first] == [each.id for each in second], "both models answer the same questions"
    pairs = list(zip(first, second, strict=True))
    gone = [pair for pair in pairs if pair[0].right and not pair[1].right]
    won = sum(not a.right and b.right for a, b in pairs)
    right = [sum(each.right for each in side) / max(len(side), 1) for side in (first, second)]
    p = statistics.mcnemar(len(gone), won)
    fall = statistics.known_share(right[0], guessing) - statistics.known_share(right[1], guessing)
    word: Word = "kept"
    if fall > tolerance:
        word = "lost" if p < DOUBT else "undecided"
    elif fall < 0 and p < DOUBT:
        word = "gained"
    changed = [AnswerChange(a, b, min(a.margin, -b.margin)) for a, b in gone]
    surest = sorted(changed, key=lambda each: -each.sureness)[:MOST_ANSWERS]
    return TaskDiff(name, len(pairs), right[0], right[1], guessing, len(gone), won, p, word, tuple(surest))


def texts_of(name: str, data: DataConfig, limit: int | None) -> list[Document]:
    """The held-out texts of a dataset; all of them where it has no validation split and is the user's own file."""
    source, context = find_source(name, data), SourceContext(data)
    own = name in data.sources and "validation" not in source.splits(context)
    documents = source.documents("train", context) if own else read(source, "validation", context)
    found = [each for each in documents if each.full_text]
    if not found:
        raise UserError(f"--data {name}: it has no held-out texts")
    return subset(found, limit, seed=0)


def diff(
    first: OpenModel,
    second: OpenModel,
    *,
    data: DataConfig,
    datasets: Sequence[str] = (),
    tasks: Sequence[str] = (),
    tolerance: float = 0.05,
    limit: int | None = None,
    answered: Mapping[str, tuple[Sequence[Example], Sequence[Example], float]] | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Diff:
    """Compare two models.

    Args:
        datasets, tasks: names; `data` says where they come from.
        limit: texts and questions of each; None is all.
        answered: answers of both models that were asked elsewhere, and the accuracy of guessing, by task.
        told: called with what is measured next.
    """
    notes = []
    alike = _same_vocabulary(first, second)
    if not alike:
        notes.append("The vocabularies differ: bits per byte are of the same bytes, and no KL is measured.")
    compared = []
    for name in datasets:
        told(f"measuring {name}")
        documents = texts_of(name, data, limit)
        texts = [each.full_text for each in documents]
        sides = [text_losses(side.runner, side.params, side.tokenizer, texts) for side in (first, second)]
        apart = None
        if alike:
            model, params = first.runner.model, first.params
            apart = text_divergences(second.runner, second.params, model, params, second.tokenizer, texts)
        compared.append(compare_texts(name, documents, (sides[0], sides[1]), tolerance, apart))
    asked = {**_asked(first, second, data, tasks, limit, told), **(answered or {})}
    judged = [compare_answers(name, one, two, guess, tolerance) for name, (one, two, guess) in asked.items()]
    return Diff(
        first.title,
        second.title,
        tolerance,
        tuple(sorted(compared, key=lambda each: -each.rise)),
        tuple(sorted(judged, key=lambda each: -each.fall)),
        tuple(notes),
    )


def _same_vocabulary(first: OpenModel, second: OpenModel) -> bool:
    models = [side.runner.model for side in (first, second)]
    return (
        first.tokenizer.fingerprint == second.tokenizer.fingerprint
        and models[0].vocab_size == models[1].vocab_size
        and models[0].softcap == models[1].softcap
        and models[0].block_size >= models[1].block_size
    )


def _asked(
    first: OpenModel,
    second: OpenModel,
    data: DataConfig,
    tasks: Sequence[str],
    limit: int | None,
    told: Callable[[str], object],
) -> dict[str, tuple[Sequence[Example], Sequence[Example], float]]:
    found: dict[str, list[Sequence[Example]]] = {}
    guessing: dict[str, float] = {}
    for side in (first, second):
        evaluator: Evaluator[Model] = Evaluator(
            side.runner.model,
            side.tokenizer,
            EvaluationConfig(limit=limit),
            tasks=tasks,
            topology=side.runner.topology,
            data=data,
        )
        for name in evaluator.tasks:
            told(f"asking {name}")
            result = evaluator.evaluate(side.params, tasks=[name], datasets=[])[name]
            found.setdefault(name, []).append(result.examples)
            guessing[name] = result.chance or 0.0
    return {name: (sides[0], sides[1], guessing[name]) for name, sides in found.items()}


def to_json(found: Diff) -> Json:
    """Everything as JSON holds it."""

    def data(each: DataDiff) -> Json:
        change = each.change
        return {
            "verdict": each.word,
            "before": each.first,
            "after": each.second,
            "rise": each.rise,
            "low": None if change is None else change.low,
            "high": None if change is None else change.high,
            "documents": each.num_documents,
            "bytes": each.num_bytes,
            "kl": None if each.divergence is None else list(each.divergence),
            "slices": [part._asdict() for part in each.slices],
            "texts": [
                {"id": text.id, "opening": text.opening, "before": text.first, "after": text.second}
                | {
                    "rise_bits": text.rise,
                    "spans": [{"text": span.text, "rise_bits": span.rise} for span in text.spans],
                }
                for text in each.texts
            ],
        }

    def task(each: TaskDiff) -> Json:
        return {
            "verdict": each.word,
            "before": each.first,
            "after": each.second,
            "known_before": each.known[0],
            "known_after": each.known[1],
            "questions": each.num_questions,
            "lost": each.lost,
            "won": each.won,
            "p": each.p,
            "chance": each.guessing,
            "examples": [
                {"id": one.id, "prompt": one.prompt, "answer": one.answer, "before": one.chosen, "after": two.chosen}
                for one, two, _ in each.examples
            ],
        }

    return {
        "a": found.first,
        "b": found.second,
        "tolerance": found.tolerance,
        "lost": found.lost,
        "data": {each.name: data(each) for each in found.data},
        "tasks": {each.name: task(each) for each in found.tasks},
        "notes": list(found.notes),
    }
