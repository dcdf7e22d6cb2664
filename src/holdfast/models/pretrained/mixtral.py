"""Mixtral and Qwen3-MoE: Mistral and Qwen3 with experts in every layer, each in tensors of its own."""

import dataclasses
from typing import Any

from holdfast.models.config import ModelSpec
from holdfast.models.moe import MoeSpec
from holdfast.models.pretrained import llama
from holdfast.models.pretrained.formats import Options, Weight
from holdfast.types import Json

BASE = "rope_theta"
USUAL_BASE = 1e6  # of Mixtral's rotary positions, where a file says nothing


def spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Mixtral config.json."""
    options.expect("router_jitter_noise", 0.0)
    values = {**options.values, BASE: options.get(BASE, float, USUAL_BASE)}
    base = llama.common(
        Options(values, options.where), block_size, window=options.limit("sliding_window", int), norm_eps=1e-5
    )
    number = options.get("num_local_experts", int, options.get("num_experts", int, 8))
    return _mixture(options, base, n_experts=number, top_k=options.get("num_experts_per_tok", int, 2))


def config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    assert isinstance(spec, MoeSpec)
    return {
        **llama.common_config(spec),
        "num_local_experts": spec.n_experts,
        "num_experts_per_tok": spec.top_k,
        "router_aux_loss_coef": spec.balance_weight,
        "output_router_logits": False,
        "sliding_window": spec.window,
    }


def qwen3_spec(options: Options, block_size: int | None) -> ModelSpec:
    """The specification of a Qwen3-MoE config.json; layers without experts are refused."""
    options.expect("attention_bias", False)
    options.expect("decoder_sparse_step", 1)
    options.expect("mlp_only_layers", [])
    windowed = options.get("use_sliding_window", bool, False)
    window = options.limit("sliding_window", int, 4096) if windowed else None
    base = llama.common(options, block_size, qk_norm=True, window=window)
    number = options.get("num_experts", int, options.get("num_local_experts", int, 128))
    return _mixture(
        options,
        base,
        n_ff=options.get("moe_intermediate_size", int, 768),
        n_experts=number,
        top_k=options.get("num_experts_per_tok", int, 8),
        normalise=options.get("norm_topk_prob", bool, False),
    )


def qwen3_config(spec: ModelSpec) -> Json:
    """The config.json of a specification."""
    assert isinstance(spec, MoeSpec)
    return {
        **llama.common_config(spec),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": spec.n_ff,
        "norm_topk_prob": spec.normalise,
        "num_experts": spec.n_experts,
        "num_experts_per_tok": spec.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": spec.balance_weight,
        "sliding_window": spec.window,
        "use_sliding_window": spec.window is not None,
    }


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in Mixtral's tensors."""
    return _weights(spec, "block_sparse_moe", {"up": "w3", "gate": "w1", "down": "w2"})


def qwen3_weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in Qwen3-MoE's tensors."""
    return _weights(spec, "mlp", {name: f"{name}_proj" for name in ("up", "gate", "down")})


def _mixture(options: Options, base: ModelSpec, **own: Any) -> MoeSpec:
    if own["top_k"] > own["n_experts"]:
        raise options.refuse("num_experts_per_tok", f"expected at most the number of experts, {own['n_experts']}")
    weight = options.get("router_aux_loss_coef", float, 0.001)
    return MoeSpec(**{**dataclasses.asdict(base), "balance_weight": weight, **own})


def _weights(spec: ModelSpec, part: str, names: dict[str, str]) -> dict[str, Weight]:
    table = {path: weight for path, weight in llama.weights(spec).items() if not path.startswith("layers/mlp/")}
    table["layers/mlp/router/kernel"] = Weight(f"model.layers.{{}}.{part}.gate.weight", transposed=True)
    for ours, theirs in names.items():
        stored = Weight(f"model.layers.{{}}.{part}.experts.{{}}.{theirs}.weight", transposed=True)
        table[f"layers/mlp/{ours}/kernel"] = stored
    return table
