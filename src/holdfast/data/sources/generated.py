"""What generated tasks have in common: a fixed list of examples, divided by group so that no answer leaks."""

import abc
import random
from collections.abc import Iterator, Sequence

from holdfast.data.documents import Document, LocalSource, SourceContext, digest

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
