"""Holdfast: train language models through a curriculum of datasets without losing the earlier ones."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import results as results
    from holdfast.notebook import quick as quick

    __version__: str

__all__ = ["__version__", "quick", "results"]


def __getattr__(name: str) -> Any:
    # When first asked for: `holdfast --help` waits for none of them.
    if name == "__version__":
        from importlib.metadata import version

        return version("holdfast")  # pyproject.toml says it
    if name == "quick":
        return importlib.import_module("holdfast.notebook").quick
    if name == "results":
        return importlib.import_module("holdfast.results")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
