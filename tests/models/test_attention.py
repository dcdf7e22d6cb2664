"""Attention against the plain formula, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.models.attention import (
    PLAIN,
    Rules,
    cached_attention,
    causal_attention,
    chunked_attention,
    fused_attention,
)
from holdfast.models.layers import capped


def plain_attention(q, k, v, segment_ids=None, rules=PLAIN, window=None):
    """Every score, a mask, a softmax."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = capped(jnp.einsum("bthk,bshk->bhts", q, k) * (rules.scale or q.shape[-1] ** -0.5), rules.softcap)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    window = rules.window if window is None else window
    if window is not None:
        mask = mask & ~jnp.tril(jnp.ones(scores.shape[-2:], bool), -window)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


def inputs(length, heads, kv_heads, rows=2, size=8):
    random = np.random.default_rng(length)
    shapes = ((rows, length, heads, size), (rows, length, kv_heads, size), (rows, length, kv_heads, size))
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def packed(length):
    """Two rows of segments: three examples and padding, and one example alone."""
    first = np.minimum(np.arange(length) * 4 // length + 1, 4) % 4
    return jnp.asarray(np.stack([first, np.ones(length)]), jnp.int32)


@pytest.mark.parametrize("function", [chunked_attention, fused_attention])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(128, 4, 4), (100, 4, 2), (65, 3, 1), (1, 2, 2)])
def test_equals_the_plain_formula(function, segments, length, heads, kv_heads):
    arrays = inputs(length, heads, kv_heads)
    segment_ids = packed(length) if segments else None
    cotangent = jnp.cos(jnp.arange(arrays[0].size, dtype=jnp.float32)).reshape(arrays[0].shape)

    def results(attention):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, segment_ids), *arrays)
        return (out, *pull(cotangent))

    compiled = [jax.jit(lambda f=f: results(f))() for f in (function, plain_attention)]
    for got, expected in zip(*compiled, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "rules", "window"),
    [
        (chunked_attention, Rules(0.7, 2.0, 70), None),
        (chunked_attention, Rules(window=1), None),
        (chunked_attention, Rules(softcap=1.0), 30),
        (fused_attention, Rules(0.7, None, 70), None),
        (fused_attention, Rules(), 30),
    ],
)
def test_windows_bounds_and_scales_equal_the_plain_formula(function, rules, window):
    arrays = inputs(150, 4, 2)
    cotangent = jnp.cos(jnp.arange(arrays[0].size, dtype=jnp.float32)).reshape(arrays[0].shape)

    def results(attention, seen):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, packed(150), rules=rules, window=seen), *arrays)
        return (out, *pull(cotangent))

    got = jax.jit(lambda seen: results(function, seen))(None if window is None else jnp.int32(window))
    for ours, expected in zip(got, jax.jit(lambda: results(plain_attention, window))(), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_the_chunk_length_does_not_matter(chunk):
    arrays = inputs(20, 2, 1)
    np.testing.assert_allclose(
        jax.jit(chunked_attention, static_argnums=4)(*arrays, packed(20), chunk),
        plain_attention(*arrays, packed(20)),
        atol=1e-5,
    )


def test_bfloat16_keeps_its_type():
    arrays = [x.astype(jnp.bfloat16) for x in inputs(70, 2, 2)]
    out = causal_attention(*arrays)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), plain_attention(*inputs(70, 2, 2)), atol=0.05)


def test_no_position_sees_the_future_or_another_segment():
    q, k, v = inputs(90, 2, 2)
    segment_ids = packed(90)
    changed = v.at[:, 50].add(100.0)
    difference = jnp.abs(causal_attention(q, k, changed, segment_ids) - causal_attention(q, k, v, segment_ids))
    moved = np.asarray(difference.max(axis=(2, 3)) > 0)
    visible = (np.arange(90) >= 50)[None] & np.asarray(segment_ids == segment_ids[:, 50:51])
    assert (moved == visible).all()


def test_cached_queries_see_the_slots_up_to_their_position():
    q, k, v = inputs(12, 4, 2)
    whole = plain_attention(q, k, v)
    at = jnp.array([[3, 4], [9, 10]])
    some_q = jnp.take_along_axis(q, at[..., None, None], axis=1)
    expected = jnp.take_along_axis(whole, at[..., None, None], axis=1)
    np.testing.assert_allclose(cached_attention(some_q, k, v, at), expected, atol=1e-5)
