"""GPT-NeoX and Pythia: partly rotated heads, layer norms, biases; q, k and v of each head side by side."""

import dataclasses

from holdfast.models.config import ModelSpec
from holdfast.models.pretrained.formats import ACTIVATIONS, Options, Weight, halves, name_of, rope_values, thirds
from holdfast.types import Json


def spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a GPT-NeoX config.json."""
    options.expect("attention_bias", True)
    n_embd, n_head = options.get("hidden_size", int), options.get("num_attention_heads", int)
    longest = options.get("max_position_embeddings", int)
    return ModelSpec(
        n_layers=options.get("num_hidden_layers", int),
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=n_head,
        head_dim=n_embd // n_head,
        n_ff=options.get("intermediate_size", int),
        vocab_size=options.get("vocab_size", int),
        block_size=options.positions("max_position_embeddings", block_size),
        activation=options.activation("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=options.get("layer_norm_eps", float, 1e-5),
        positions="rotary",
        bias=True,
        qkv_bias=True,
        parallel_residual=options.get("use_parallel_residual", bool, True),
        tie_embeddings=options.get("tie_word_embeddings", bool, False),
        **options.rope("rotary_emb_base", "rotary_pct", longest),
    )


def config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": name_of(ACTIVATIONS, spec.activation),
        "hidden_dropout": spec.dropout,
        "hidden_size": spec.n_embd,
        "intermediate_size": spec.n_ff,
        "layer_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.block_size,
        "num_attention_heads": spec.n_head,
        "num_hidden_layers": spec.n_layers,
        "rotary_pct": spec.rope_pct,
        "tie_word_embeddings": spec.tie_embeddings,
        "use_parallel_residual": spec.parallel_residual,
        "vocab_size": spec.vocab_size,
        **rope_values(spec, "rotary_emb_base"),
    }


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in GPT-NeoX's tensors."""
    table = {
        "embed/embedding": Weight("gpt_neox.embed_in.weight"),
        "unembed/kernel": Weight("embed_out.weight", transposed=True),
    }
    layer = "gpt_neox.layers.{}."
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        table[f"final_norm/{ours}"] = Weight(f"gpt_neox.final_layer_norm.{theirs}")
        table[f"layers/attention_norm/{ours}"] = Weight(f"{layer}input_layernorm.{theirs}")
        table[f"layers/mlp_norm/{ours}"] = Weight(f"{layer}post_attention_layernorm.{theirs}")
    for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
        matrix = ours == "kernel"
        for part, name in enumerate("qkv"):
            places = thirds(part, spec.n_head, spec.head_dim)
            if spec.rope_interleaved and name != "v":
                places = places[halves(spec.n_head, spec.head_dim, spec.rotary_dim).argsort()]
            fused = Weight(f"{layer}attention.query_key_value.{theirs}", matrix)
            table[f"layers/attention/{name}/{ours}"] = dataclasses.replace(
                fused, places=places, num_places=3 * spec.n_head * spec.head_dim
            )
        table[f"layers/attention/out/{ours}"] = Weight(f"{layer}attention.dense.{theirs}", matrix)
        table[f"layers/mlp/up/{ours}"] = Weight(f"{layer}mlp.dense_h_to_4h.{theirs}", matrix)
        table[f"layers/mlp/down/{ours}"] = Weight(f"{layer}mlp.dense_4h_to_h.{theirs}", matrix)
    return table
