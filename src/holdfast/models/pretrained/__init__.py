"""Pretrained models in and out: folders of the hub's kind (the families of `families.py`) and llama2.c's files.

`load_spec` and `tokenizer_for` need no JAX; the rest imports it when first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.models.pretrained.families import family_for
from holdfast.models.pretrained.source import load_spec
from holdfast.models.pretrained.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from holdfast.models.pretrained.read import load_params
    from holdfast.models.pretrained.write import import_model, save_pretrained

__all__ = [
    "family_for",
    "import_model",
    "load_params",
    "load_spec",
    "save_pretrained",
    "tokenizer_for",
]

_LAZY = {"load_params": "read", "save_pretrained": "write", "import_model": "write"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"holdfast.models.pretrained.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
