"""Decoder architectures with logical axes.

`ArchitectureConfig`, `ModelSpec`, `resolve` and `check_divisible` need no JAX; the rest imports it when first
asked for, so that a config can be checked without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.models.axes import BATCH_AXES, RULES, check_divisible
from holdfast.models.config import ArchitectureConfig, ModelSpec, resolve

if TYPE_CHECKING:
    from holdfast.models.decoder import Cache, Decoder, init_cache, unembedding

__all__ = [
    "BATCH_AXES",
    "RULES",
    "ArchitectureConfig",
    "Cache",
    "Decoder",
    "ModelSpec",
    "check_divisible",
    "init_cache",
    "resolve",
    "unembedding",
]


def __getattr__(name: str) -> Any:
    if name in ("Cache", "Decoder", "init_cache", "unembedding"):
        return getattr(importlib.import_module("holdfast.models.decoder"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
