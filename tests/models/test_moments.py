"""The inputs of dense kernels: measured over real tokens alone, layer by layer, in any family."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.data.batches import Batch
from holdfast.errors import UserError
from holdfast.models import ArchitectureConfig, axes, resolve_model
from holdfast.models.derived import boxed_params
from holdfast.models.moments import input_moments

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "plugins"))
import recurrence

ROWS, LENGTH = 3, 8


def rows() -> Batch:
    """Two micro-batches, of whose rows some are padded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 50, (2, ROWS, LENGTH)), jnp.int32)
    real = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (2, ROWS, 1))
    return Batch(x, x, jnp.asarray(real, jnp.int8))


def moved(model: Any) -> Any:
    """Random parameters, so that layers differ."""
    leaves, shape = jax.tree.flatten(nn.meta.unbox(boxed_params(model)))
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(shape, [0.3 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves])


def first_inputs(params: Any, scale: Any, batch: Batch, eps: float) -> Any:
    """Mean square of the normed embeddings of real tokens: what the first layer's projections are given."""
    table = np.asarray(params["embed"]["embedding"], np.float64)
    vectors = table[np.asarray(batch.x)[np.asarray(batch.padding_mask) > 0]]
    normed = vectors / np.sqrt(np.square(vectors).mean(-1, keepdims=True) + eps) * np.asarray(scale, np.float64)
    return np.square(normed).mean(0)


def test_a_decoder_layer_by_layer() -> None:
    options = {"n_layers": 2, "n_embd": 16, "n_head": 2, "n_kv_head": 2, "n_ff": 24, "preset": "llama-160m"}
    batch, found = rows(), {}
    for scanned in (True, False):
        architecture = ArchitectureConfig(**options, scan_layers=scanned)
        model = resolve_model("decoder", architecture, None, block_size=LENGTH, vocab_size=64)
        params = moved(model)
        found[scanned] = jax.jit(lambda params, model=model: input_moments(model, params, batch))(params)
    assert set(found[True]) == {f"{module}/kernel" for module in model.projections()}
    assert model.options.norm == "rms"
    assert model.options.positions == "rotary"
    for path, moments in found[True].items():
        np.testing.assert_allclose(moments, found[False][path], rtol=1e-5)
        assert moments.shape == (2, model.projections()[path.removesuffix("/kernel")].inputs)
    scale = params["layers"]["attention_norm"]["scale"][0]
    wanted = first_inputs(params, scale, batch, model.options.norm_eps)
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(found[True][f"layers/attention/{name}/kernel"][0], wanted, rtol=1e-4)
    assert np.abs(np.asarray(found[True]["layers/attention/q/kernel"][1]) - wanted).max() > 0.01


def test_another_family() -> None:
    options = recurrence.RecurrenceConfig(n_layers=2, n_embd=16, n_memory=8, n_ff=12)
    model = resolve_model("recurrence", ArchitectureConfig(), options, block_size=LENGTH, vocab_size=64)
    params, batch = moved(model), rows()
    found = jax.jit(lambda params: input_moments(model, params, batch))(params)
    assert set(found) == {f"{module}/kernel" for module in model.projections()}
    wanted = first_inputs(params, params["layers_0"]["memory_norm"]["scale"], batch, 1e-5)
    np.testing.assert_allclose(found["layers_0/gate/kernel"], wanted, rtol=1e-4)


def test_a_family_whose_scan_drops_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "MOMENTS", "others")  # what the decoder's scan keeps then
    architecture = ArchitectureConfig(n_layers=2, n_embd=16, n_head=2)
    model = resolve_model("decoder", architecture, None, block_size=LENGTH, vocab_size=48)
    with pytest.raises(UserError, match=r"layers/attention/q .* list holdfast\.models\.MOMENTS"):
        jax.eval_shape(lambda: input_moments(model, moved(model), rows()))
