"""Adapters apart from their base, in the files of the `peft` library: adapter_config.json, adapter_model.safetensors.

A family may hold several of our projections in one tensor (GPT-2's q, k and v). Their adapters become one of the
summed rank, each in its own rows and columns, which is exactly the same map; peft's patterns say so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data.tokenizers import Tokenizer
from holdfast.execution.files import write_atomically, write_json
from holdfast.models.config import ModelSpec
from holdfast.models.names import LORA_IN, LORA_OUT
from holdfast.models.pretrained.families import family_for
from holdfast.models.pretrained.tokenizers import save_tokenizer
from holdfast.models.pretrained.weights import Array, Weight
from holdfast.models.pretrained.write import new_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save_adapters(
    adapters: Mapping[str, Any],
    spec: ModelSpec,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    alpha: float,
    family: str | None = None,
    base: str = "",
    card: str | None = None,
) -> None:
    """Write adapters as `peft` reads them; the folder appears whole or not at all.

    Args:
        adapters: arrays by slash path, such as `layers/attention/q/lora_in`.
        family: as which their base is known; None takes the first that can express the specification.
        alpha: of which a rank-th part is the scale.
        base: where the base is, a path or a hub name.
        card: text of README.md.
    """
    from safetensors.numpy import save_file

    table = family_for(spec, family).weights(spec)
    groups: dict[str, list[str]] = {}  # the name of a tensor, and our projections in it
    for path in adapters:
        module, name = path.rsplit("/", 1)
        if name == LORA_IN:
            groups.setdefault(table[f"{module}/kernel"].name, []).append(module)
    tensors: dict[str, Array] = {}
    for name, modules in groups.items():
        weights = [table[f"{module}/kernel"] for module in modules]
        for layer in range(spec.n_layers):
            stem = "base_model.model." + name.format(layer).removesuffix(".weight")
            inward = [np.asarray(adapters[f"{module}/{LORA_IN}"][layer]) for module in modules]
            outward = [np.asarray(adapters[f"{module}/{LORA_OUT}"][layer]) for module in modules]
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(np.concatenate(inward, axis=1).T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(_placed(weights, outward).T)
    rank = next(leaf.shape[2] for path, leaf in adapters.items() if path.endswith(LORA_IN))
    with new_folder(folder) as temporary:
        write_json(temporary / CONFIG, _config(groups, table, rank, alpha, base))
        save_file(tensors, temporary / TENSORS, {"format": "pt"})
        if card is not None:
            write_atomically(temporary / "README.md", card)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, spec.block_size)


def _placed(weights: Sequence[Weight], outward: Sequence[Array]) -> Array:
    """The second matrices below each other, each in the columns of its tensor that are its own."""
    rank, width = outward[0].shape[0], weights[0].num_places or outward[0].shape[1]
    placed: Array = np.zeros((rank * len(outward), width), outward[0].dtype)
    for index, (weight, matrix) in enumerate(zip(weights, outward, strict=True)):
        columns = slice(None) if weight.places is None else weight.places
        placed[index * rank : (index + 1) * rank, columns] = matrix
    return placed


def _config(
    groups: Mapping[str, Sequence[str]], table: Mapping[str, Weight], rank: int, alpha: float, base: str
) -> dict[str, Any]:
    """adapter_config.json."""
    # Two parts of a name, because GPT-2 calls two different projections c_proj.
    short = {name: ".".join(name.removesuffix(".weight").split(".")[-2:]) for name in groups}
    fused = {short[name]: len(modules) for name, modules in groups.items() if len(modules) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(short.values()),
        "rank_pattern": {name: rank * count for name, count in fused.items()},
        "alpha_pattern": {name: alpha * count for name, count in fused.items()},
        "fan_in_fan_out": not any(table[f"{modules[0]}/kernel"].transposed for modules in groups.values()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
