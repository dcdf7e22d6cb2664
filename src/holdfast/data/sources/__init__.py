"""Datasets by name: of the configuration, built in, registered by plug-ins, or a folder under `data/root`."""

import difflib
from collections.abc import Iterator

from holdfast.data.config import DataConfig, check_dataset_name
from holdfast.data.documents import Document, Source, SourceContext, read
from holdfast.data.sources import (  # noqa: F401 (importing them registers them)
    generated,
    hub,
    pydocs,
    stdlib,
    suites,
)
from holdfast.data.sources.user import root_source, user_source
from holdfast.errors import UserError
from holdfast.registry import PLUGIN_HINT, datasets

__all__ = ["documents", "find_source"]


def documents(name: str, split: str, data: DataConfig) -> Iterator[Document]:
    """The documents of a split, held out where the dataset has none; broken rows are left out."""
    return read(find_source(name, data), split, SourceContext(data))


def find_source(name: str, data: DataConfig) -> Source:
    """The source of that name: the configuration's own first, then the registered ones, then `data/root`."""
    check_dataset_name(name)
    if name in data.sources:
        return user_source(name, data.sources[name])
    if name in datasets:
        target = datasets.get(name)
        source: Source = target() if isinstance(target, type) else target
        return source
    found = suites.task_file_source(name) or root_source(name, data)
    if found is not None:
        return found
    known = sorted({*data.sources, *datasets.names(), *_folders(data)})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"there is no dataset {name!r}; {hint}known: {', '.join(known)}; or describe it under data/sources/{name}, "
        f"or put {name}/train.jsonl into the folder that data/root (or HOLDFAST_DATA) names; {PLUGIN_HINT}"
    )


def _folders(data: DataConfig) -> list[str]:
    root = data.root_path()
    if root is None or not root.is_dir():
        return []
    names = [folder.name for folder in root.iterdir() if not folder.name.startswith(".")]
    return [name for name in names if root_source(name, data) is not None]
