"""GPT-2: learned positions, layer norms, biases; weights are stored (in, out), with q, k and v side by side."""

from holdfast.models.config import ModelSpec
from holdfast.models.pretrained.formats import ACTIVATIONS, Options, Weight, name_of, thirds
from holdfast.types import Json


def spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a GPT-2 config.json."""
    options.expect("scale_attn_weights", True)
    options.expect("scale_attn_by_inverse_layer_idx", False)
    options.expect("add_cross_attention", False)
    n_embd, n_head = options.get("n_embd", int), options.get("n_head", int)
    return ModelSpec(
        n_layers=options.get("n_layer", int),
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=n_head,
        head_dim=n_embd // n_head,
        n_ff=options.get("n_inner", int, 4 * n_embd),
        vocab_size=options.get("vocab_size", int),
        block_size=options.positions("n_positions", block_size),
        activation=options.activation("activation_function", ACTIVATIONS, "gelu_new"),
        norm="layer",
        norm_eps=options.get("layer_norm_epsilon", float, 1e-5),
        positions="learned",
        bias=True,
        qkv_bias=True,
        tie_embeddings=options.get("tie_word_embeddings", bool, True),
    )


def config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    return {
        "activation_function": name_of(ACTIVATIONS, spec.activation),
        "attn_pdrop": 0.0,
        "embd_pdrop": spec.dropout,
        "layer_norm_epsilon": spec.norm_eps,
        "n_ctx": spec.block_size,
        "n_embd": spec.n_embd,
        "n_head": spec.n_head,
        "n_inner": spec.n_ff,
        "n_layer": spec.n_layers,
        "n_positions": spec.block_size,
        "resid_pdrop": spec.dropout,
        "tie_word_embeddings": spec.tie_embeddings,
        "vocab_size": spec.vocab_size,
    }


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in GPT-2's tensors."""
    table = {
        "embed/embedding": Weight("transformer.wte.weight"),
        "positions/embedding": Weight("transformer.wpe.weight", may_be_longer=True),
        "unembed/kernel": Weight("lm_head.weight", transposed=True),
    }
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        table[f"final_norm/{ours}"] = Weight(f"transformer.ln_f.{theirs}")
        table[f"layers/attention_norm/{ours}"] = Weight(f"transformer.h.{{}}.ln_1.{theirs}")
        table[f"layers/mlp_norm/{ours}"] = Weight(f"transformer.h.{{}}.ln_2.{theirs}")
    width = spec.n_head * spec.head_dim
    for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
        for part, name in enumerate("qkv"):
            places = thirds(part, heads=1, size=width)
            table[f"layers/attention/{name}/{ours}"] = Weight(
                f"transformer.h.{{}}.attn.c_attn.{theirs}", places=places, num_places=3 * width
            )
        table[f"layers/attention/out/{ours}"] = Weight(f"transformer.h.{{}}.attn.c_proj.{theirs}")
        table[f"layers/mlp/up/{ours}"] = Weight(f"transformer.h.{{}}.mlp.c_fc.{theirs}")
        table[f"layers/mlp/down/{ours}"] = Weight(f"transformer.h.{{}}.mlp.c_proj.{theirs}")
    return table
