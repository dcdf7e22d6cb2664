"""Gemma 1, 2 and 3 (text): scaled embeddings, norms whose scale is 1 + w, windows in turns, bounded scores and logits.

Gemma 3 has norms on q and k, and another base of rotary positions in layers with a window.
"""

from typing import Any

from holdfast.models.config import FULL, WINDOWED, ModelSpec
from holdfast.models.pretrained import llama
from holdfast.models.pretrained.formats import GATED, WINDOWS, Options, name_of, rope_values, window_values
from holdfast.types import Json

LOCAL_BASE = "rope_local_base_freq"
USUAL = "gelu_pytorch_tanh"


def spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Gemma config.json."""
    return _common(options, block_size)


def config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    activation = name_of({USUAL: GATED[USUAL], **GATED}, spec.activation)
    # Transformers 4 looked at the first key, and before that at the second.
    named = {"hidden_activation": activation, "hidden_act": activation, "attention_bias": False}
    return {**llama.common_config(spec), **named, **rope_values(spec)}


def gemma2_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Gemma 2 config.json."""
    return _common(options, block_size, **_later(options, WINDOWED + FULL, (50.0, 30.0)))


def gemma3_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a config.json of Gemma 3's language model."""
    nested = options.values.get("rope_parameters") or {}
    parts = {name: nested.get(name) or {} for name in WINDOWS} if isinstance(nested, dict) else {}
    if not all(isinstance(part, dict) for part in parts.values()) or set(nested) - set(parts):
        raise options.refuse("rope_parameters", f"expected a mapping for each of {', '.join(WINDOWS)}")
    local = Options(parts["sliding_attention"], f"{options.where}: rope_parameters: sliding_attention")
    local.expect("rope_type", "default")
    base = local.get("rope_theta", float, options.get(LOCAL_BASE, float, 10_000.0))
    theta = {"rope_theta": options.get("rope_theta", float, 1_000_000.0)}
    every = options.get("sliding_window_pattern", int, 6)
    whole = Options({**options.values, **theta, "rope_parameters": parts["full_attention"]}, options.where)
    later = _later(options, WINDOWED * (every - 1) + FULL, (None, None))
    return _common(whole, block_size, qk_norm=True, window_rope_base=base, **later)


def gemma2_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {
        **config(spec),
        **window_values(spec),
        "query_pre_attn_scalar": spec.head_dim if spec.attention_scale is None else round(spec.attention_scale**-2),
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }


def gemma3_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    base = spec.rope_base if spec.window_rope_base is None else spec.window_rope_base
    return {**gemma2_config(spec), LOCAL_BASE: base}


def _common(options: Options, block_size: int | None, **more: Any) -> ModelSpec:
    options.expect("attention_bias", False)
    options.expect("use_bidirectional_attention", False)
    return llama.common(
        options,
        block_size,
        head_dim=256,
        activation=_activation(options),
        tie_embeddings=True,
        norm_offset=True,
        embedding_scale=options.get("hidden_size", int) ** 0.5,
        **more,
    )


def _activation(options: Options) -> str:
    """Files of the first Gemma say `gelu` and mean its approximation."""
    key = "hidden_activation" if options.values.get("hidden_activation") else "hidden_act"
    return options.activation(key, {**GATED, "gelu": "gelu_gated"}, USUAL)


def _later(options: Options, windows: str, caps: tuple[float | None, float | None]) -> Json:
    """What came with Gemma 2.

    Args:
        windows: which layers have one, where the file does not list them.
        caps: the bounds of scores and logits, where the file says nothing.
    """
    scalar = options.get("query_pre_attn_scalar", float, 256.0)
    return {
        "norm_place": "both",
        "window": options.limit("sliding_window", int, 4096),
        "window_layers": options.layers("layer_types", WINDOWS, windows),
        "attention_scale": None if scalar == options.get("head_dim", int, 256) else scalar**-0.5,
        "attention_softcap": options.limit("attn_logit_softcapping", float, caps[0]),
        "logit_softcap": options.limit("final_logit_softcapping", float, caps[1]),
    }
