"""`arithmetic`: a digit added to, or taken from, a number of three digits."""

import random
from collections.abc import Iterator

from holdfast.data.documents import Document
from holdfast.data.sources.generated import GeneratedTask, multiple_choice
from holdfast.registry import datasets

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
                    yield _example(prompt, value, group=str(number))


def _example(prompt: str, value: int, group: str) -> Document:
    near = [value + step for step in random.Random(prompt).sample((-10, -2, -1, 1, 2, 10), 6)]
    wrong = [str(number) for number in near if number in NUMBERS]
    return multiple_choice(prompt, prompt, str(value), wrong, group=group)
