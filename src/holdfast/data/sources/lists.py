"""`lists`: small operations on short lists of digits, with answers."""

import random
from collections.abc import Iterator

from holdfast.data.documents import Document
from holdfast.data.sources.generated import GeneratedTask, multiple_choice
from holdfast.registry import datasets

EXAMPLES = 20_500
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
        while len(seen) < EXAMPLES:
            digits = [random_.randrange(10) for _ in range(random_.choices(LENGTHS, (1, 2, 4, 6))[0])]
            operation = random_.choice(("sort", "reverse", "max", "length"))
            prompt = f"{operation} {_spell(digits)} ->"
            if prompt not in seen:
                seen.add(prompt)
                yield _example(operation, prompt, digits)


def _example(operation: str, prompt: str, digits: list[int]) -> Document:
    random_ = random.Random(prompt)
    if operation in ("sort", "reverse"):
        right = sorted(digits) if operation == "sort" else digits[::-1]
        answer, wrong = f" {_spell(right)}", [f" {_spell(other)}" for other in _others(right, random_)]
    else:
        right_one = max(digits) if operation == "max" else len(digits)
        answer = f" {right_one}"
        candidates = [*random_.sample(range(10), 10)] if operation == "max" else random_.sample((1, *LENGTHS, 6), 6)
        wrong = [f" {number}" for number in candidates]
    return multiple_choice(prompt, prompt, answer, wrong, group=_spell(sorted(digits)))


def _others(right: list[int], random_: random.Random) -> Iterator[list[int]]:
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


def _spell(digits: list[int]) -> str:
    return " ".join(map(str, digits))
