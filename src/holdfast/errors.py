"""Mistakes that a user can make, as exceptions whose text is the whole message.

The command line prints the text and exits with code 2; nothing else catches them.
"""

import difflib
import importlib.util
from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """A mistake in what the user asked for; its text says what is wrong and how to mend it."""


class ConfigError(UserError):
    """A value in the configuration that cannot be used.

    Args:
        path: slash path of the value, for example `training/batch_size`.
        value: what was found there.
        expected: what would have been right.
        fix: how to mend it.

    >>> print(ConfigError("training/batch_size", -1, "a whole number of at least 1", "set it to 32"))
    training/batch_size: got -1, expected a whole number of at least 1; set it to 32
    """

    def __init__(self, path: str, value: Any, expected: str, fix: str = "") -> None:
        self.path = path
        self.value = value
        self.expected = expected
        self.fix = fix
        super().__init__(f"{path}: got {shortened(value)}, expected {expected}" + (f"; {fix}" if fix else ""))


def shortened(value: Any) -> str:
    """A value as a message shows it: cut where it is long.

    >>> shortened("text"), len(shortened("x" * 10_000))
    ("'text'", 120)
    """
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return shown if len(shown) <= 120 else shown[:117] + "..."


class RunError(Exception):
    """A run that cannot go on; its last checkpoint is intact. The command line exits with code 1."""


def require_package(module: str, extra: str, wanted: str, otherwise: str = "") -> None:
    """Raise a UserError that names the extra when a package is not installed; imports nothing.

    >>> require_package("no_such", "board", "holdfast board")
    Traceback (most recent call last):
        ...
    holdfast.errors.UserError: holdfast board: the package no_such is not installed; run: pip install 'holdfast[board]'
    """
    if importlib.util.find_spec(module) is None:
        hint = f", {otherwise}" if otherwise else ""
        raise UserError(f"{wanted}: the package {module} is not installed; run: pip install 'holdfast[{extra}]'{hint}")


def unknown_key(path: str, known: Sequence[str]) -> UserError:
    """The error for a key that no class declares, with the nearest one that exists.

    >>> print(unknown_key("training/batchsize", ["training/batch_size", "training/seed"]))
    training/batchsize: unknown configuration key; did you mean training/batch_size?
    """
    sections = {key[:end] for key in known for end, letter in enumerate(key) if letter == "/"}
    keys = [*known, *sorted(sections)]
    # The name says more than the section: training/lr is nearer to optimization/lr than to training/seed.
    names = difflib.get_close_matches(_name(path), [_name(key) for key in keys], n=1, cutoff=0.75)
    if names:
        keys = [key for key in keys if _name(key) == names[0]]
    near = difflib.get_close_matches(path, keys, n=1, cutoff=0.0 if names else 0.6)
    hint = f"did you mean {near[0]}?" if near else "`holdfast configure JOB OUT.yaml` writes all known keys"
    return UserError(f"{path}: unknown configuration key; {hint}")


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
