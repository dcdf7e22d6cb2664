"""Qwen2 and Qwen3: Llama's design with biases on q, k and v, or with norms on q and k."""

from typing import Any

from holdfast.models.config import ModelSpec
from holdfast.models.pretrained import llama
from holdfast.models.pretrained.options import Options


def spec2(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Qwen2 config.json."""
    return llama.common(_without_window(options), block_size, qkv_bias=True)


def config2(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a specification; Qwen2 takes the width of a head from the others."""
    return {**llama.common_config(spec), "use_sliding_window": False}


def spec3(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Qwen3 config.json."""
    options.expect("attention_bias", False)
    return llama.common(_without_window(options), block_size, qk_norm=True, head_dim=128)


def config3(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a specification."""
    return {**llama.common_config(spec), "attention_bias": False, "use_sliding_window": False}


def _without_window(options: Options) -> Options:
    """The options without a window that is written down but not used."""
    if options.get("use_sliding_window", bool, False):
        return options
    return Options({**options.values, "sliding_window": None}, options.where)
