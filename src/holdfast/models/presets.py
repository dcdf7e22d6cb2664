"""Named sets of `architecture/` values, so that a user need not set fourteen numbers.

A preset is a mapping of option names to values. What it leaves out follows from the rest (`n_ff`, `head_dim`,
`n_kv_head`) or from `ModelSpec`'s defaults; what the user sets replaces it. The vocabulary is the tokenizer's.
"""

from typing import Any

from holdfast.registry import models
from holdfast.types import Json

GPT2: Json = {"activation": "gelu", "norm": "layer", "positions": "learned", "bias": True}
LLAMA: Json = {"activation": "silu_gated", "norm": "rms", "positions": "rotary"}
QWEN: Json = {**LLAMA, "norm_eps": 1e-6, "rope_base": 1_000_000.0}
NEOX: Json = {
    "activation": "gelu_exact",
    "norm": "layer",
    "positions": "rotary",
    "rope_pct": 0.25,
    "bias": True,
    "parallel_residual": True,
    "tie_embeddings": False,
}


def _size(n_layers: int, n_embd: int, n_head: int, **more: Any) -> Json:
    return {"n_layers": n_layers, "n_embd": n_embd, "n_head": n_head, **more}


def _register(name: str, help: str, *parts: Json) -> None:
    models.register(name, help=help)({key: value for part in parts for key, value in part.items()})


_register("tiny", "0.9M parameters, rotary, RMS norm, gated: for laptops and tests", LLAMA, _size(4, 128, 4))
_register(
    "tiny-moe",
    "2.2M parameters, 0.9M active: tiny with 8 experts, 2 of them for each token",
    LLAMA,
    _size(4, 128, 4, n_ff=384),
    {"family": "moe", "moe/n_experts": 8, "moe/top_k": 2},
)
_register(
    "tiny-hybrid",
    "0.9M parameters: tiny with attention in every fourth layer and states in the others",
    LLAMA,
    _size(4, 128, 4),
    {"family": "hybrid", "hybrid/layers": "sssa"},
)
_register("small", "11M parameters, the same design: minutes to hours on a CPU", LLAMA, _size(6, 384, 6))
_register("gpt-mini", "11M parameters in GPT-2's design: the shape of the benchmarks", GPT2, _size(6, 384, 6))
_register("gpt2", "GPT-2, 124M parameters with its own tokenizer", GPT2, _size(12, 768, 12))
_register("gpt2-medium", "GPT-2, 355M parameters", GPT2, _size(24, 1024, 16))
_register("gpt2-large", "GPT-2, 774M parameters", GPT2, _size(36, 1280, 20))
_register("gpt2-xl", "GPT-2, 1.6B parameters", GPT2, _size(48, 1600, 25))
_register("pythia-160m", "GPT-NeoX design, 160M parameters", NEOX, _size(12, 768, 12))
_register(
    "smollm2-135m",
    "Llama design, deep and narrow, 135M parameters",
    LLAMA,
    _size(30, 576, 9, n_kv_head=3, n_ff=1536, rope_base=100_000.0),
)
_register(
    "llama-160m",
    "Llama design, 160M parameters",
    LLAMA,
    _size(12, 768, 12, n_ff=3072, norm_eps=1e-6, tie_embeddings=False),
)
_register(
    "llama-1b",
    "Llama 3.2's shape, 1.2B parameters",
    LLAMA,
    _size(16, 2048, 32, n_kv_head=8, n_ff=8192, rope_base=500_000.0),
)
_register(
    "llama-8b",
    "Llama 3's shape, 8B parameters",
    LLAMA,
    _size(32, 4096, 32, n_kv_head=8, n_ff=14336, rope_base=500_000.0, tie_embeddings=False),
)
_register(
    "qwen2-0.5b", "Qwen2's shape, 0.5B parameters", QWEN, _size(24, 896, 14, n_kv_head=2, n_ff=4864, qkv_bias=True)
)
_register(
    "qwen3-0.6b",
    "Qwen3's shape, 0.6B parameters",
    QWEN,
    _size(28, 1024, 16, n_kv_head=8, head_dim=128, n_ff=3072, qk_norm=True),
)
