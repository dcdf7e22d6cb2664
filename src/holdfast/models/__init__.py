"""Model families, and what a family of one's own is made of.

The seam is `family.py`: `ModelFamily`, and `Model`, the choice of one. The built-in family is the decoder. What needs
no JAX is imported here; layers, modules and caches when first asked for, so that a config can be checked without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.models.axes import BATCH_AXES, MOMENTS, RULES, check_divisible
from holdfast.models.config import ArchitectureConfig, ModelSpec, resolve
from holdfast.models.family import Model, ModelFamily, decoder, resolve_model

if TYPE_CHECKING:
    from holdfast.models.decoder import Cache, Decoder, init_cache, unembedding
    from holdfast.models.layers import Dense, Dropout, Embedding, Norm, logical

__all__ = [
    "BATCH_AXES",
    "MOMENTS",
    "RULES",
    "ArchitectureConfig",
    "Cache",
    "Decoder",
    "Dense",
    "Dropout",
    "Embedding",
    "Model",
    "ModelFamily",
    "ModelSpec",
    "Norm",
    "check_divisible",
    "decoder",
    "init_cache",
    "logical",
    "resolve",
    "resolve_model",
    "unembedding",
]

_LAZY = {
    **dict.fromkeys(("Cache", "Decoder", "init_cache", "unembedding"), "decoder"),
    **dict.fromkeys(("Dense", "Dropout", "Embedding", "Norm", "logical"), "layers"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"holdfast.models.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
