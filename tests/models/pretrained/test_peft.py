"""Adapters in the files of `peft`: the same map as ours, also where a family holds several projections in one."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import load_file

from holdfast.models.config import ArchitectureConfig, ModelSpec, resolve
from holdfast.models.decoder import Decoder
from holdfast.models.family import decoder
from holdfast.models.lora import merged
from holdfast.models.parameters import leaves_of, trainable_for, tree_of
from holdfast.models.pretrained import save_pretrained
from holdfast.models.pretrained.write import save_adapters
from holdfast.optim.config import LoraConfig

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16))
PRESETS = {
    "gpt2": {"preset": "gpt2"},
    "llama": {"preset": "llama-160m", "n_kv_head": 2},
    "interleaved": {"preset": "tiny", "rope_interleaved": True},
    "neox": {"preset": "pythia-160m"},
}


def written(name: str, folder: Path, targets: list[str]) -> tuple[ModelSpec, dict[str, Any]]:
    """A model with moved adapters; its base, the merged model and the adapters as folders."""
    options = {"n_layers": 2, "n_embd": 32, "n_head": 4, "head_dim": 8, **PRESETS[name]}
    spec = resolve(ArchitectureConfig(**options), block_size=16, vocab_size=64)
    base = leaves_of(nn.meta.unbox(Decoder(spec).init(jax.random.key(0), TOKENS[:, :1])["params"]))
    found = trainable_for([], LoraConfig(rank=3, alpha=6.0, targets=targets), decoder(spec))
    assert found is not None
    assert found.lora is not None
    chance = np.random.default_rng(1)
    shapes = found.lora.shapes(decoder(spec)).items()
    leaves = {path: 0.1 * chance.standard_normal(shape, dtype=np.float32) for path, shape in shapes}
    leaves |= {path: np.full_like(leaf, 2.0) for path, leaf in leaves.items() if path.endswith("scale")}
    both = {**base, **leaves}
    save_pretrained(tree_of(base), spec, folder / "base")
    save_pretrained(tree_of(merged(both)), spec, folder / "merged")
    save_adapters(leaves, spec, folder / "adapters", alpha=6.0, base=str(folder / "base"))
    return spec, both


@pytest.mark.parametrize("name", PRESETS)
def test_base_and_adapters_are_the_merged_model(name: str, tmp_path: Path) -> None:
    written(name, tmp_path, ["q", "k", "v", "o", "down"] if name != "neox" else ["q", "v", "up"])
    base, whole = (load_file(tmp_path / part / "model.safetensors") for part in ("base", "merged"))
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    changed = {key for key in base if not np.array_equal(base[key], whole[key])}
    assert len(adapters) == 2 * len(changed)
    for key in changed:
        stem = key.removesuffix(".weight")
        short = ".".join(stem.split(".")[-2:])
        assert short in config["target_modules"]
        scale = config["alpha_pattern"].get(short, config["lora_alpha"]) / config["rank_pattern"].get(
            short, config["r"]
        )
        inward, outward = (adapters[f"base_model.model.{stem}.lora_{part}.weight"] for part in "AB")
        assert inward.shape[0] == config["rank_pattern"].get(short, config["r"])
        update = scale * (outward @ inward)
        update = update.T if config["fan_in_fan_out"] else update
        np.testing.assert_allclose(base[key] + update, whole[key], atol=1e-6)


@pytest.mark.extra
@pytest.mark.parametrize("name", PRESETS)
def test_peft_loads_them_and_says_the_same(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra hf: pip install holdfast[hf]")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install holdfast[hf]")
    peft = pytest.importorskip("peft", reason="needs the extra hf: pip install holdfast[hf]")
    spec, both = written(name, tmp_path, [])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        alone = model(torch.tensor(TOKENS)).logits.numpy()
        model = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    ours = Decoder(spec).apply({"params": tree_of(both)}, TOKENS)
    assert np.abs(alone - theirs).max() > 1e-2
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
