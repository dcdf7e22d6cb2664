"""Datasets by name: of the configuration, built in, registered by plug-ins, or a folder under `data/root`."""

import difflib

from holdfast.data.config import DataConfig
from holdfast.data.documents import Source
from holdfast.data.sources import (  # noqa: F401 (importing them registers them)
    arithmetic,
    lists,
    pycode,
    pydocs,
)
from holdfast.errors import UserError
from holdfast.registry import datasets

__all__ = ["find_source"]


def find_source(name: str, data: DataConfig) -> Source:
    """The source of that name."""
    if name in datasets:
        target = datasets.get(name)
        source: Source = target() if isinstance(target, type) else target
        return source
    known = sorted({*data.sources, *datasets.names()})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"there is no dataset {name!r}; {hint}known: {', '.join(known)}")
