"""Mistakes that a user can make, as exceptions whose text is the whole message.

The command line prints the text and exits with code 2; nothing else catches them.
"""

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
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{path}: got {shown}, expected {expected}" + (f"; {fix}" if fix else ""))


class RunError(Exception):
    """A run that cannot go on; its last checkpoint is intact. The command line exits with code 1."""
