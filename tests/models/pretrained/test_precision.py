"""bfloat16 activations over float32 parameters: every family's loss and gradient stay near those of float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.models import ArchitectureConfig, Decoder, resolve

SMALL = {"n_layers": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 4, "head_dim": 8, "n_ff": 48}
T, V = 12, 33


@pytest.mark.parametrize("preset", ["gpt2", "llama-1b", "qwen2-0.5b", "qwen3-0.6b", "pythia-160m"])
def test_bfloat16_activations_give_nearly_the_same_loss(preset):
    exact = resolve(ArchitectureConfig(preset=preset, **SMALL), block_size=T, vocab_size=V)
    half = dataclasses.replace(exact, dtype="bfloat16")
    random = np.random.default_rng(0)
    tokens = random.integers(0, V, (4, T + 1))
    boxed = jax.eval_shape(Decoder(exact).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: 0.15 * random.normal(size=leaf.shape).astype("float32"), nn.meta.unbox(boxed))

    def loss(params, spec):
        logits = Decoder(spec).apply({"params": params}, tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    results = [jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, spec) for spec in (exact, half)]
    (wanted, gradient), (got, rounded) = results
    assert got != wanted
    assert float(got) == pytest.approx(float(wanted), rel=0.01)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
    one, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (gradient, rounded))
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.99
