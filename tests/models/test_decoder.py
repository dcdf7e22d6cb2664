"""The decoder: families, loops, packed rows, cache, initial values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.models import ArchitectureConfig, Decoder, init_cache, resolve, unembedding
from holdfast.models.axes import RULES
from holdfast.models.layers import capped

B, T, V = 2, 12, 33
SMALL = {"n_layers": 2, "n_embd": 32, "n_head": 4, "head_dim": 8, "n_ff": 48}
FAMILIES = {
    "gpt2": {"preset": "gpt2"},
    "llama": {"preset": "llama-1b", "n_kv_head": 2},
    "llama2.c": {"preset": "tiny", "rope_interleaved": True, "n_kv_head": 1},
    "qwen2": {"preset": "qwen2-0.5b", "n_kv_head": 2},
    "qwen3": {"preset": "qwen3-0.6b", "n_kv_head": 2, "head_dim": 16},
    "neox": {"preset": "pythia-160m"},
    "mistral": {"preset": "tiny", "window": 5},
    "olmo2": {"preset": "tiny", "norm_place": "after", "qk_norm": True, "qk_norm_over": "all", "n_kv_head": 2},
    "smollm3": {"preset": "tiny", "n_layers": 3, "rope_layers": "rn"},
    "gemma3": {
        "preset": "tiny",
        "n_layers": 3,
        "window": 5,
        "window_layers": "wwf",
        "window_rope_base": 100.0,
        "norm_place": "both",
        "norm_offset": True,
        "qk_norm": True,
        "attention_scale": 0.5,
        "attention_softcap": 3.0,
        "logit_softcap": 4.0,
        "embedding_scale": 5.0,
        "residual_scale": 0.7,
        "logit_divisor": 2.0,
    },
}


@functools.cache
def model(family="llama", block_size=T, **values):
    options = {**SMALL, **FAMILIES[family], **values}
    return Decoder(resolve(ArchitectureConfig(**options), block_size=block_size, vocab_size=V))


def tokens(rows=B, length=T, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, V)


def parameters(decoder):
    return nn.unbox(jax.jit(decoder.init)(jax.random.key(0), tokens()))["params"]


@functools.cache
def lively(decoder):
    """Random biases and scales too, so that no term is hidden by its initial value."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: parameters(decoder)))
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return structure.unflatten(
        [0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


@functools.partial(jax.jit, static_argnames=("decoder", "method"))
def apply(decoder, params, x, *more, method="__call__", **inputs):
    return decoder.apply({"params": params}, x, *more, method=method, **inputs)


logits = apply


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_names_and_types(family):
    decoder = model(family)
    boxed = jax.eval_shape(decoder.init, jax.random.key(0), tokens())["params"]
    leaves = jax.tree.leaves(nn.unbox(boxed))
    assert sum(leaf.size for leaf in leaves) == decoder.spec.num_parameters()
    known = {name for name, _ in RULES}
    for leaf in jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)):
        assert isinstance(leaf, nn.LogicallyPartitioned)
        assert len(leaf.names) == leaf.value.ndim
        assert set(leaf.names) <= known


@pytest.mark.slow
def test_scanned_unrolled_and_rematerialised_layers_are_the_same():
    x = tokens()
    results = []
    for scan_layers, remat in ((True, False), (False, False), (True, True)):
        decoder = model("gpt2", scan_layers=scan_layers, remat=remat)
        params = parameters(decoder)
        loss = jax.jit(jax.value_and_grad(lambda p, d=decoder: (d.apply({"params": p}, x) ** 2).mean()))
        results.append((params, loss(params)))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), results[0], other)


def test_initial_values_are_gpt2s():
    decoder = model("gpt2", n_layers=8, n_embd=64, scan_layers=True)
    params = parameters(decoder)
    layers = params["layers"]
    for kernel, std in (
        (params["embed"]["embedding"], 0.02),
        (params["positions"]["embedding"], 0.02),
        (layers["attention"]["q"]["kernel"], 0.02),
        (layers["mlp"]["up"]["kernel"], 0.02),
        (layers["attention"]["out"]["kernel"], 0.02 / 4),
        (layers["mlp"]["down"]["kernel"], 0.02 / 4),
    ):
        assert float(kernel.std()) == pytest.approx(std, rel=0.06)
    assert (params["final_norm"]["scale"] == 1).all()
    assert not layers["mlp"]["up"]["bias"].any()
    first, second = layers["mlp"]["up"]["kernel"][:2]
    assert not jnp.allclose(first, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unembedding_turns_hidden_states_into_logits(family):
    decoder = model(family)
    params = lively(decoder)
    hidden = apply(decoder, params, tokens(), method="hidden")
    assert hidden.shape == (B, T, decoder.spec.n_embd)
    expected = logits(decoder, params, tokens())
    assert expected.dtype == jnp.float32
    ours = capped(hidden @ unembedding(params, decoder.spec), decoder.spec.logit_softcap)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_depend_on_the_past_alone(family):
    decoder = model(family)
    params = lively(decoder)
    x = tokens()
    changed = logits(decoder, params, x.at[:, 6].set((x[:, 6] + 1) % V))
    moved = jnp.abs(changed - logits(decoder, params, x)).max(axis=(0, 2)) > 1e-6
    assert moved.tolist() == [False] * 6 + [True] * (T - 6)


@pytest.mark.parametrize(("options", "last"), [({"n_layers": 1}, 10), ({"window_layers": "wf"}, 11)])
def test_no_layer_sees_beyond_its_window(options, last):
    """One layer with a window of 5 sees 4 tokens back; a full layer after it sees all."""
    decoder = model("mistral", **options)
    params, x = lively(decoder), tokens()
    y = x.at[:, 6].set((x[:, 6] + 1) % V)
    moved = jnp.abs(logits(decoder, params, y) - logits(decoder, params, x)).max(axis=(0, 2)) > 1e-6
    assert moved.tolist() == [6 <= at <= last for at in range(T)]
    read = [apply(decoder, params, row, init_cache(decoder.spec, B), method="read")[0] for row in (x, y)]
    assert (jnp.abs(read[0] - read[1]).max(axis=(0, 2)) > 1e-6).tolist() == moved.tolist()


@pytest.mark.slow
def test_layers_of_different_kinds_are_the_same_in_a_loop_and_unrolled():
    x, results = tokens(), []
    for scan_layers, remat in ((True, True), (False, False)):
        decoder = model("gemma3", scan_layers=scan_layers, remat=remat)
        loss = jax.jit(jax.value_and_grad(lambda p, d=decoder: (d.apply({"params": p}, x) ** 2).mean()))
        results.append(loss(lively(decoder)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), *results)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_examples_by_themselves(family):
    decoder = model(family)
    params = lively(decoder)
    x = tokens()
    # One row with five tokens of the first text, four of the second and padding; the other row is the first text.
    packed = jnp.stack([jnp.concatenate([x[0, :5], x[1, :4], x[0, :3]]), x[0]])
    segment_ids = jnp.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * T])
    positions = jnp.array([[*range(5), *range(4), 0, 0, 0], [*range(T)]])
    together = logits(decoder, params, packed, segment_ids=segment_ids, positions=positions)
    alone = logits(decoder, params, x)
    np.testing.assert_allclose(together[0, :5], alone[0, :5], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(together[0, 5:9], alone[1, :4], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(together[1], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_from_a_cache_equals_the_whole_row(family):
    decoder = model(family)
    params = lively(decoder)
    x = tokens()
    whole = logits(decoder, params, x)
    decode = functools.partial(apply, decoder, params, method="decode")
    rows, lengths = jnp.arange(B), jnp.array([3, 7])
    prompt = jnp.where(jnp.arange(8) < lengths[:, None], x[:, :8], 0)
    got, cache = decode(prompt, init_cache(decoder.spec, B), lengths)
    np.testing.assert_allclose(got, whole[rows, lengths - 1], atol=1e-4, rtol=1e-4)
    for _ in range(5):
        at = cache.lengths
        got, cache = decode(x[rows, at][:, None], cache)
        np.testing.assert_allclose(got, whole[rows, at], atol=1e-4, rtol=1e-4)
    assert cache.lengths.tolist() == [8, 12]


def test_reading_gives_the_hidden_states():
    decoder = model()
    params = lively(decoder)
    hidden, cache = apply(decoder, params, tokens(), init_cache(decoder.spec, B, 20), method="read")
    expected = apply(decoder, params, tokens(), method="hidden")
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    assert cache.keys.shape[2] == 20


def test_dropout_needs_a_key_and_leaves_no_operation_when_off():
    decoder = model(dropout=0.5)
    params = lively(decoder)

    x = tokens()

    def dropped(decoder):
        return jax.jit(
            lambda params, key: decoder.apply({"params": params}, x, deterministic=False, rngs={"dropout": key})
        )

    some = dropped(decoder)
    first, again, other = (some(params, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not jnp.allclose(first, other)
    text = dropped(model(dropout=0.0)).lower(params, jax.random.key(0)).as_text()
    assert "threefry" not in text


def test_dropout_keeps_the_mean():
    decoder = model(dropout=0.3)
    bound = decoder.bind({"params": lively(decoder)}, rngs={"dropout": jax.random.key(0)})
    dropped = bound.dropout(jnp.ones((64, 64)), False)
    assert float((dropped == 0).mean()) == pytest.approx(0.3, abs=0.05)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.05)


def test_bfloat16_activations_stay_near_float32():
    exact = model("gpt2")
    params = lively(exact)
    half = Decoder(dataclasses.replace(exact.spec, dtype="bfloat16"))
    assert apply(half, params, tokens(), method="hidden").dtype == jnp.bfloat16
    one, other = logits(exact, params, tokens()), logits(half, params, tokens())
    assert other.dtype == jnp.float32
    assert float(jnp.abs(one - other).mean()) < 0.03 * float(jnp.abs(one).mean())


def test_parameters_have_the_type_that_is_asked_for():
    params = parameters(model("gpt2", param_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
