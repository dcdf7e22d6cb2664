"""Small models of the families beside the decoder, for tests."""

from typing import Any

from holdfast import registry
from holdfast.models import ArchitectureConfig
from holdfast.models.family import Model, resolve_model

DECODER = {"n_layers": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 2, "n_ff": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "moe": ("moe", DECODER, {"n_experts": 4}),
    "moe-bias": (
        "moe",
        {**DECODER, "scan_layers": True},
        {"n_experts": 4, "top_k": 1, "n_shared": 1, "balance": "bias", "z_loss": 0.001},
    ),
    "hybrid": ("hybrid", {**DECODER, "n_kv_head": 4}, {"layers": "sa", "chunk": 5}),
}


def model_of(name: str, block_size: int = 32, vocab_size: int = 320) -> Model:
    """A small model."""
    family, options, own = MODELS[name]
    config: Any = registry.families.config(family)
    return resolve_model(
        family, ArchitectureConfig(**options), config(**own), block_size=block_size, vocab_size=vocab_size
    )
