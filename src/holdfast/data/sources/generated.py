"""`arithmetic`, `topics`, `lists`: generated tasks, fixed lists divided by group so that no answer leaks."""

import abc
import itertools
import random
from collections.abc import Iterator, Sequence

from holdfast.data.documents import Document, LocalSource, SourceContext, digest
from holdfast.registry import datasets

NUM_CHOICES = 4


class GeneratedTask(LocalSource):
    """A task whose examples are made by a pure function; train and validation share no group."""

    name: str
    kind = "task"
    version: int
    validation_share: float

    @abc.abstractmethod
    def examples(self) -> Iterator[Document]:
        """All examples, always the same, in a fixed order."""

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train", "validation")

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        for document in self.examples():
            held_out = int.from_bytes(digest(document.group), "big") < self.validation_share * 2.0**64
            if held_out == (split == "validation"):
                yield document

    def fingerprint(self, context: SourceContext) -> str:  # noqa: ARG002
        return f"{self.name}-{self.version}"


def multiple_choice(id: str, prompt: str, answer: str, wrong: Sequence[str], group: str) -> Document:
    """A document with the right answer at a place among wrong ones that depends on the prompt alone.

    Args:
        wrong: candidates, best first; those equal to the answer or to each other are left out.
    """
    others = [choice for choice in dict.fromkeys(wrong) if choice != answer][: NUM_CHOICES - 1]
    choices = [answer, *others]
    random.Random(prompt).shuffle(choices)
    return Document(
        id=id, prompt=prompt, answer=answer, choices=tuple(choices), label=choices.index(answer), group=group
    )


NUMBERS = range(100, 1000)  # answers stay among them, so that every digit has its place


@datasets.register("arithmetic", help="task: 347+5= and 347-5=, generated (no download)")
class Arithmetic(GeneratedTask):
    """`347+5=` → `352`; all questions about one number are on one side of the split."""

    name = "arithmetic"
    version = 2
    validation_share = 0.03

    def examples(self) -> Iterator[Document]:
        pairs = [(number, digit) for number in NUMBERS for digit in range(10)]
        random.Random("arithmetic").shuffle(pairs)
        for number, digit in pairs:
            for prompt, value in ((f"{number}+{digit}=", number + digit), (f"{number}-{digit}=", number - digit)):
                if value in NUMBERS:
                    yield _sum(prompt, value, group=str(number))


def _sum(prompt: str, value: int, group: str) -> Document:
    near = [value + step for step in random.Random(prompt).sample((-10, -2, -1, 1, 2, 10), 6)]
    wrong = [str(number) for number in near if number in NUMBERS]
    return multiple_choice(prompt, prompt, str(value), wrong, group=group)


TOPICS = {
    "food": "apple bean bread butter cake cheese honey onion pepper rice salad soup",
    "music": "chorus drum flute guitar harp melody opera piano song trumpet tune violin",
    "sport": "football goal hockey judo match race referee rugby stadium swimming team tennis",
    "weather": "breeze cloud fog frost hail mist rain snow storm sunshine thunder wind",
}


@datasets.register("topics", help="task: rain, fog, wind: weather; four topics, generated (no download)")
class Topics(GeneratedTask):
    """`rain, fog, wind:` → ` weather`; the same three words in any order are on one side of the split."""

    name = "topics"
    version = 1
    validation_share = 0.1

    def examples(self) -> Iterator[Document]:
        rows = [(topic, three) for topic in TOPICS for three in itertools.permutations(TOPICS[topic].split(), 3)]
        random.Random("topics").shuffle(rows)
        for topic, three in rows:
            prompt = f"{', '.join(three)}:"
            wrong = [f" {other}" for other in TOPICS if other != topic]
            yield multiple_choice(prompt, prompt, f" {topic}", wrong, group=" ".join(sorted(three)))


LIST_EXAMPLES = 20_500
LENGTHS = (2, 3, 4, 5)


@datasets.register("lists", help="task: sort, reverse, max, length of short lists, generated (no download)")
class Lists(GeneratedTask):
    """`sort 3 1 2 ->` → ` 1 2 3`; lists of the same digits are on one side of the split."""

    name = "lists"
    version = 1
    validation_share = 0.025

    def examples(self) -> Iterator[Document]:
        random_ = random.Random("lists")
        seen: set[str] = set()
        while len(seen) < LIST_EXAMPLES:
            digits = [random_.randrange(10) for _ in range(random_.choices(LENGTHS, (1, 2, 4, 6))[0])]
            operation = random_.choice(("sort", "reverse", "max", "length"))
            prompt = f"{operation} {_spelled(digits)} ->"
            if prompt not in seen:
                seen.add(prompt)
                yield _list_question(operation, prompt, digits)


def _list_question(operation: str, prompt: str, digits: list[int]) -> Document:
    random_ = random.Random(prompt)
    if operation in ("sort", "reverse"):
        right = sorted(digits) if operation == "sort" else digits[::-1]
        answer, wrong = f" {_spelled(right)}", [f" {_spelled(other)}" for other in _wrong_lists(right, random_)]
    else:
        right_one = max(digits) if operation == "max" else len(digits)
        answer = f" {right_one}"
        candidates = [*random_.sample(range(10), 10)] if operation == "max" else random_.sample((1, *LENGTHS, 6), 6)
        wrong = [f" {number}" for number in candidates]
    return multiple_choice(prompt, prompt, answer, wrong, group=_spelled(sorted(digits)))


def _wrong_lists(right: list[int], random_: random.Random) -> Iterator[list[int]]:
    """Wrong answers for a list: two places exchanged, then one digit changed; endless lists are never needed."""
    for _ in range(6):
        i, j = random_.sample(range(len(right)), 2)
        other = right.copy()
        other[i], other[j] = other[j], other[i]
        yield other
    for _ in range(12):
        other = right.copy()
        other[random_.randrange(len(right))] = random_.randrange(10)
        yield other


def _spelled(digits: list[int]) -> str:
    return " ".join(map(str, digits))
