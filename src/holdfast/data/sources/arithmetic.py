"""`arithmetic`: sums and differences of numbers below a hundred, with answers."""

import random
from collections.abc import Iterator

from holdfast.data.documents import Document
from holdfast.data.sources.generated import GeneratedTask, multiple_choice
from holdfast.registry import datasets

LIMIT = 100


@datasets.register("arithmetic", help="task: sums and differences below 100, generated (no download)")
class Arithmetic(GeneratedTask):
    """`12+7=` → `19`; a pair of numbers and its mirror image are on one side of the split."""

    name = "arithmetic"
    version = 1
    validation_share = 0.033

    def examples(self) -> Iterator[Document]:
        pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
        random.Random("arithmetic").shuffle(pairs)
        for a, b in pairs:
            yield _example(f"{a}+{b}=", a + b, min(a, b), max(a, b))
            if a >= b:
                yield _example(f"{a}-{b}=", a - b, b, a)


def _example(prompt: str, value: int, low: int, high: int) -> Document:
    near = [value + step for step in random.Random(prompt).sample((-10, -2, -1, 1, 2, 10), 6)]
    wrong = [str(number) for number in near if number >= 0]
    return multiple_choice(prompt, prompt, str(value), wrong, group=f"{low},{high}")
