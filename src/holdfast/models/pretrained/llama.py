"""Llama and what is built like it: RMS norms, rotary positions, gated feed-forward; weights stored (out, in).

Mistral has a window, Qwen2 biases on q, k and v, Qwen3 norms on q and k, SmolLM3 layers without rotary positions,
Granite factors, OLMo 2 norms after attention and feed-forward, Phi-3 several projections in one tensor.
"""

import dataclasses
from typing import Any

from holdfast.models.config import FULL, ROTATED, UNROTATED, WINDOWED, ModelSpec, with_window
from holdfast.models.pretrained.formats import (
    GATED,
    WINDOWS,
    Options,
    Weight,
    halves,
    name_of,
    neighbours,
    rope_values,
    window_values,
)
from holdfast.types import Json

ROTATIONS = {1: ROTATED, 0: UNROTATED}


def common(options: Options, block_size: int | None, **more: Any) -> ModelSpec:
    """What Llama, Mistral and Qwen have in common.

    Args:
        more: further values of the specification; `head_dim`, `norm_eps` and `tie_embeddings` are defaults.
    """
    n_embd, n_head = options.get("hidden_size", int), options.get("num_attention_heads", int)
    spec = ModelSpec(
        n_layers=options.get("num_hidden_layers", int),
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=options.get("num_key_value_heads", int, n_head),
        head_dim=options.get("head_dim", int, more.pop("head_dim", n_embd // n_head)),
        n_ff=options.get("intermediate_size", int),
        vocab_size=options.get("vocab_size", int),
        block_size=options.positions("max_position_embeddings", block_size),
        activation=more.pop("activation", None) or options.activation("hidden_act", GATED, "silu"),
        norm="rms",
        norm_eps=options.get("rms_norm_eps", float, more.pop("norm_eps", 1e-6)),
        positions="rotary",
        tie_embeddings=options.get("tie_word_embeddings", bool, more.pop("tie_embeddings", False)),
        **options.rope(share=more.pop("share", None), positions=options.get("max_position_embeddings", int)),
        **more,
    )
    return with_window(spec)


def common_config(spec: ModelSpec) -> Json:
    """The part of config.json that they have in common."""
    return {
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": name_of(GATED, spec.activation),
        "hidden_size": spec.n_embd,
        "intermediate_size": spec.n_ff,
        "max_position_embeddings": spec.block_size,
        "num_attention_heads": spec.n_head,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_head,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "vocab_size": spec.vocab_size,
        **rope_values(spec),
    }


def spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Llama config.json."""
    return common(options, block_size, **_biases(options))


def config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {**common_config(spec), "attention_bias": spec.bias, "mlp_bias": spec.bias}


def _biases(options: Options) -> Json:
    bias = options.get("attention_bias", bool, False)
    if options.get("mlp_bias", bool, False) != bias:
        raise options.refuse("mlp_bias", f"expected {bias}, as attention_bias: all projections have biases or none")
    return {"bias": bias, "qkv_bias": bias}


def mistral_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Mistral config.json."""
    options.expect("layer_types", None)
    return common(options, block_size, window=options.limit("sliding_window", int, 4096))


def mistral_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {**common_config(spec), "sliding_window": spec.window}


def qwen2_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Qwen2 config.json."""
    return common(options, block_size, qkv_bias=True, **_late_windows(options))


def qwen2_config(spec: ModelSpec) -> Json:
    """The config.json of a specification; Qwen2 takes the width of a head from the others."""
    return {**common_config(spec), **_late_window_values(spec)}


def qwen3_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Qwen3 config.json."""
    options.expect("attention_bias", False)
    return common(options, block_size, qk_norm=True, head_dim=128, **_late_windows(options))


def qwen3_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {**common_config(spec), "attention_bias": False, **_late_window_values(spec)}


def _late_windows(options: Options) -> Json:
    """Windows as Qwen has them: written down but seldom used, and from some layer on."""
    if not options.get("use_sliding_window", bool, False):
        return {}
    num_layers = options.get("num_hidden_layers", int)
    full = min(options.get("max_window_layers", int, 28), num_layers)
    return {
        "window": options.limit("sliding_window", int, 4096),
        "window_layers": options.layers("layer_types", WINDOWS, FULL * full + WINDOWED * (num_layers - full)),
    }


def _late_window_values(spec: ModelSpec) -> Json:
    if spec.window is None:
        return {"use_sliding_window": False}
    full = len(spec.windows) - spec.windows[::-1].index(None) if None in spec.windows else 0
    return {"use_sliding_window": True, "max_window_layers": full, **window_values(spec)}


def smollm3_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a SmolLM3 config.json."""
    options.expect("use_sliding_window", False)
    every = options.get("no_rope_layer_interval", int, 4)
    rotated = options.layers("no_rope_layers", ROTATIONS, ROTATED * (every - 1) + UNROTATED)
    return common(options, block_size, rope_layers=rotated, tie_embeddings=True, **_biases(options))


def smollm3_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {
        **config(spec),
        "no_rope_layers": [int(letter == ROTATED) for letter in spec.letters(spec.rope_layers)],
        "layer_types": ["full_attention"] * spec.n_layers,
        "use_sliding_window": False,
    }


def granite_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Granite config.json."""
    scale = options.get("attention_multiplier", float, 1.0)
    n_embd, n_head = options.get("hidden_size", int), options.get("num_attention_heads", int)
    usual = options.get("head_dim", int, n_embd // n_head) ** -0.5
    return common(
        options,
        block_size,
        attention_scale=None if scale == usual else scale,
        embedding_scale=options.get("embedding_multiplier", float, 1.0),
        residual_scale=options.get("residual_multiplier", float, 1.0),
        logit_divisor=options.get("logits_scaling", float, 1.0),
        **_biases(options),
    )


def granite_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {
        **config(spec),
        "attention_multiplier": spec.attention_scale or spec.head_dim**-0.5,
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "logits_scaling": spec.logit_divisor,
    }


def olmo2_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of an OLMo 2 config.json."""
    options.expect("attention_bias", False)
    return common(options, block_size, norm_place="after", qk_norm=True, qk_norm_over="all", norm_eps=1e-5)


def olmo2_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {**common_config(spec), "attention_bias": False}


def phi3_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Phi-3 config.json."""
    share = "partial_rotary_factor"
    whole = Options({**options.values, share: options.values.get(share) or 1.0}, options.where)
    window = options.limit("sliding_window", int)
    return common(whole, block_size, window=window, norm_eps=1e-5, share=share)


def phi3_config(spec: ModelSpec) -> Json:
    """The config.json of a specification; Phi-3 takes the width of a head from the others."""
    return {
        **common_config(spec),
        "original_max_position_embeddings": spec.block_size,
        "partial_rotary_factor": spec.rope_pct,
        "sliding_window": spec.window,
    }


def phi3_weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in Phi-3's tensors: q, k and v below each other, gate and up too."""
    table = weights(spec)
    queries, keys = spec.n_head * spec.head_dim, spec.n_kv_head * spec.head_dim
    fused = {
        "attention/{}/kernel": ("self_attn.qkv_proj", "qkv", neighbours(queries, keys, keys)),
        "mlp/{}/kernel": ("mlp.gate_up_proj", ("gate", "up"), neighbours(spec.n_ff, spec.n_ff)),
    }
    for path, (tensor, names, parts) in fused.items():
        for name, (places, total) in zip(names, parts, strict=True):
            split = table["layers/" + path.format(name)]
            own = places if split.places is None else places[split.places]
            stored = Weight(f"model.layers.{{}}.{tensor}.weight", transposed=True, places=own, num_places=total)
            table["layers/" + path.format(name)] = stored
    return table


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in the tensors of Llama, Mistral and Qwen."""
    table = {
        "embed/embedding": Weight("model.embed_tokens.weight"),
        "unembed/kernel": Weight("lm_head.weight", transposed=True),
        "final_norm/scale": Weight("model.norm.weight"),
        "layers/attention_norm/scale": Weight("model.layers.{}.input_layernorm.weight"),
        "layers/mlp_norm/scale": Weight("model.layers.{}.post_attention_layernorm.weight"),
    }
    for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
        matrix = ours == "kernel"
        for name in "qkv":
            stored = Weight(f"model.layers.{{}}.self_attn.{name}_proj.{theirs}", matrix)
            heads = spec.n_head if name == "q" else spec.n_kv_head
            table[f"layers/attention/{name}/{ours}"] = in_halves(stored, spec, heads) if name != "v" else stored
        table[f"layers/attention/out/{ours}"] = Weight(f"model.layers.{{}}.self_attn.o_proj.{theirs}", matrix)
        for name in ("up", "gate", "down"):
            table[f"layers/mlp/{name}/{ours}"] = Weight(f"model.layers.{{}}.mlp.{name}_proj.{theirs}", matrix)
    for name in "qk":
        stored = Weight(f"model.layers.{{}}.self_attn.{name}_norm.weight")
        heads = 1 if spec.qk_norm_over == "head" else spec.n_head if name == "q" else spec.n_kv_head
        table[f"layers/attention/{name}_norm/scale"] = in_halves(stored, spec, heads)
    return table


def post_norm_weights(spec: ModelSpec) -> dict[str, Weight]:
    """The same where norms stand after attention and feed-forward too, or there alone: OLMo 2, Gemma 2 and 3."""
    named = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    return weights(spec) | {
        f"layers/{ours}/scale": Weight(f"model.layers.{{}}.{theirs}.weight") for ours, theirs in named.items()
    }


def in_halves(weight: Weight, spec: ModelSpec, heads: int) -> Weight:
    """The same weight where our rotated pairs are neighbours and the stored ones are in halves."""
    if not spec.rope_interleaved:
        return weight
    # Channel i of the stored order is our channel halves[i]; a weight says where each of ours stands.
    places = halves(heads, spec.head_dim, spec.rotary_dim).argsort()
    return dataclasses.replace(weight, places=places)
