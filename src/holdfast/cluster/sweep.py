"""A sweep: one run for every combination of some options' values, each with a name that says which it is."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import UserError
from holdfast.execution.names import check_name

SEED = "training/seed"
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class Axis:
    """One option and the values that it takes."""

    path: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its name, and the overrides that make it differ from the others."""

    name: str
    overrides: tuple[str, ...] = ()


def split_values(text: str) -> list[str]:
    """The values of a list, split at commas that are outside of brackets and quotes.

    >>> split_values("0, 0.1,[1,2],'a,b'")
    ['0', '0.1', '[1,2]', "'a,b'"]
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPEN or letter in _CLOSE:
            depth += 1 if letter in _OPEN else -1
        if letter == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def parse_axis(text: str) -> Axis:
    """An option and its values.

    >>> parse_axis("optimization.kl.beta=0,0.1")
    Axis(path='optimization/kl/beta', values=('0', '0.1'))
    """
    key, separator, rest = text.partition("=")
    path = key.strip().replace(".", "/").strip("/")
    values = tuple(split_values(rest))
    if not separator or not path or not all(values):
        raise UserError(f"--array {text}: expected path=value,value,…, such as optimization/kl/beta=0,0.1,1")
    if len(set(values)) < len(values):
        raise UserError(f"--array {text}: a value stands there twice; give each once")
    return Axis(path, values)


def members(name: str, axes: Sequence[str]) -> list[Member]:
    """All combinations, the last axis varying fastest; without axes the one run of that name.

    Seeds come last in a name, as `compare` expects of runs that are seeds of one config.

    >>> [member.name for member in members("x", ["training.seed=1,2", "optimization.kl.beta=0,0.5"])]
    ['x-beta=0-s1', 'x-beta=0.5-s1', 'x-beta=0-s2', 'x-beta=0.5-s2']
    """
    if not axes:
        return [Member(check_name(name, "--name"))]
    parsed = [parse_axis(text) for text in axes]
    paths = [axis.path for axis in parsed]
    if len(set(paths)) < len(paths):
        raise UserError(f"--array {max(paths, key=paths.count)}: given twice; put all its values into one --array")
    labels = axis_labels(paths)
    order = sorted(range(len(parsed)), key=lambda index: paths[index] == SEED)
    found = []
    for chosen in itertools.product(*(axis.values for axis in parsed)):
        parts = [labels[index] + name_of_value(chosen[index]) for index in order]
        overrides = tuple(f"{path}={value}" for path, value in zip(paths, chosen, strict=True))
        found.append(Member(check_name("-".join([name, *parts]), "--array: the name of a run"), overrides))
    names = [member.name for member in found]
    for member in found:
        if names.count(member.name) > 1:
            raise UserError(f"--array: two runs would be called {member.name}; give values that can be told apart")
    return found


def axis_labels(paths: Sequence[str]) -> list[str]:
    """What stands before an option's value in a name: its last part, or all of it where that is not clear.

    >>> axis_labels(["stages/1/beta", "stages/2/beta", "optimization/lr", "training/seed"])
    ['stages.1.beta=', 'stages.2.beta=', 'lr=', 's']
    """
    last = [path.rpartition("/")[2] for path in paths]
    return [
        "s" if path == SEED else f"{part if last.count(part) == 1 else path.replace('/', '.')}="
        for path, part in zip(paths, last, strict=True)
    ]


def name_of_value(value: str) -> str:
    """A value as a part of a folder's name.

    >>> name_of_value("[0, 0.1]"), name_of_value("'a b'")
    ('0+0.1', 'a+b')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "+", value).strip("+") or "none"
