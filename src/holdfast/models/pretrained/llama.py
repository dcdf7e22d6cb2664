"""Llama and what is built like it: RMS norms, rotary positions, gated feed-forward; weights stored (out, in)."""

import dataclasses
from typing import Any

from holdfast.models.config import ModelSpec
from holdfast.models.pretrained.options import GATED, Options, name_of, rope_values
from holdfast.models.pretrained.weights import Weight, halves


def common(options: Options, block_size: int | None, window: int | None = None, **more: Any) -> ModelSpec:
    """What Llama, Mistral and Qwen have in common."""
    n_embd, n_head = options.get("hidden_size", int), options.get("num_attention_heads", int)
    return ModelSpec(
        n_layers=options.get("num_hidden_layers", int),
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=options.get("num_key_value_heads", int, n_head),
        head_dim=options.get("head_dim", int, more.pop("head_dim", n_embd // n_head)),
        n_ff=options.get("intermediate_size", int),
        vocab_size=options.get("vocab_size", int),
        block_size=options.positions("max_position_embeddings", block_size, window),
        activation=options.activation("hidden_act", GATED, "silu"),
        norm="rms",
        norm_eps=options.get("rms_norm_eps", float, 1e-6),
        positions="rotary",
        tie_embeddings=options.get("tie_word_embeddings", bool, False),
        **options.rope(positions=options.get("max_position_embeddings", int)),
        **more,
    )


def common_config(spec: ModelSpec) -> dict[str, Any]:
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
    bias = options.get("attention_bias", bool, False)
    if options.get("mlp_bias", bool, False) != bias:
        raise options.refuse("mlp_bias", f"expected {bias}, as attention_bias: all projections have biases or none")
    return common(options, block_size, bias=bias, qkv_bias=bias)


def config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a specification."""
    return {**common_config(spec), "attention_bias": spec.bias, "mlp_bias": spec.bias}


def mistral_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Mistral config.json; a window that no row is longer than changes nothing."""
    return common(options, block_size, window=4096)


def mistral_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a specification."""
    return {**common_config(spec), "sliding_window": None}


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
        table[f"layers/attention/{name}_norm/scale"] = in_halves(stored, spec, 1)
    return table


def in_halves(weight: Weight, spec: ModelSpec, heads: int) -> Weight:
    """The same weight where our rotated pairs are neighbours and the stored ones are in halves."""
    if not spec.rope_interleaved:
        return weight
    # Channel i of the stored order is our channel halves[i]; a weight says where each of ours stands.
    places = halves(heads, spec.head_dim, spec.rotary_dim).argsort()
    return dataclasses.replace(weight, places=places)
