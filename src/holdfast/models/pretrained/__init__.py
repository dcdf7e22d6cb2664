"""Pretrained models in and out: folders of the hub's kind (GPT-2, Llama, Mistral, Qwen, GPT-NeoX) and llama2.c's files.

`load_spec` and `tokenizer_for` need no JAX; the rest imports it when first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.models.pretrained.families import family_for
from holdfast.models.pretrained.source import load_spec
from holdfast.models.pretrained.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from holdfast.models.pretrained.convert import import_model
    from holdfast.models.pretrained.read import abstract_params, load_params
    from holdfast.models.pretrained.write import save_pretrained

__all__ = [
    "abstract_params",
    "family_for",
    "import_model",
    "load_params",
    "load_spec",
    "save_pretrained",
    "tokenizer_for",
]

_LAZY = {"abstract_params": "read", "load_params": "read", "save_pretrained": "write", "import_model": "convert"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"holdfast.models.pretrained.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
