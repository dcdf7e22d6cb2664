"""Causal attention: one function for rows that are trained on, one for generation from a cache.

Which implementation runs is decided by the backend. On a CPU, queries go in chunks and each chunk sees only the
keys before its end, which skips almost half of the work; elsewhere `jax.nn.dot_product_attention` is used.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, R = H / G queries heads of one key head,
K head size.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import backend as jax_backend

from holdfast.models import axes
from holdfast.models.config import ModelSpec
from holdfast.models.layers import INIT_STD, Dense, Norm, logical, rotate

MASKED = -1e30  # finite, so that a row of masked scores gives no NaN


def causal_attention(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array | None = None
) -> jax.Array:
    """Each position attends to itself and to earlier ones, of its own segment when there are segments."""
    if jax.default_backend() == "cpu":
        return chunked_attention(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)
    return fused_attention(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)


def fused_attention(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array | None = None
) -> jax.Array:
    """Attention for accelerators."""
    mask = None
    if segment_ids_BT is not None:
        mask = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    # cuDNN's fused kernel takes half precision alone; ROCm calls itself "gpu" too.
    nvidia = jax.default_backend() == "gpu" and "rocm" not in jax_backend.get_backend().platform_version
    implementation: Literal["cudnn"] | None = "cudnn" if nvidia and q_BTHK.dtype == jnp.bfloat16 else None
    return jax.nn.dot_product_attention(
        q_BTHK, k_BTGK, v_BTGK, mask=mask, is_causal=True, implementation=implementation
    )


def chunk_length(length: int) -> int:
    """Queries in one chunk: small enough to skip most masked keys, few enough chunks to compile quickly."""
    return max(64, -(-length // 16))


def chunked_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Attention for CPUs: chunks of queries, each against only the keys that it may see."""
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    chunk = chunk_length(T) if chunk is None else chunk
    q_BGRTK = q_BTHK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGTK, v_BGTK = k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    outputs = []
    for start in range(0, T, chunk):
        end = min(start + chunk, T)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :])[None]
        if segment_ids_BT is not None:
            mask &= segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, :end]
        outputs.append(_attend(q_BGRTK[..., start:end, :], k_BGTK[..., :end, :], v_BGTK[..., :end, :], mask))
    return jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def _attend(q_BGRTK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention of some queries over some keys, scores in float32."""
    B, G, R, T, K = q_BGRTK.shape
    # Heads that share a key head become more rows of one matrix product.
    q_BGNK = q_BGRTK.reshape(B, G, R * T, K)
    scores = jnp.einsum("bgnk,bgsk->bgns", q_BGNK * K**-0.5, k_BGSK, preferred_element_type=jnp.float32)
    scores_BGRTS = scores.reshape(B, G, R, T, -1)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores_BGRTS, MASKED), axis=-1)
    mixed = jnp.einsum("bgns,bgsk->bgnk", weights.reshape(scores.shape).astype(v_BGSK.dtype), v_BGSK)
    return mixed.reshape(B, G, R, T, K)


def cached_attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Queries at given positions of their row against a cache whose slot s holds position s."""
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BGRTK = q_BTHK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    mask_BTS = positions_BT[:, :, None] >= jnp.arange(k_BSGK.shape[1])
    mixed = _attend(q_BGRTK, k_BSGK.swapaxes(1, 2), v_BSGK.swapaxes(1, 2), mask_BTS)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


LayerCache = tuple[jax.Array, jax.Array]  # keys and values of one layer, (B, S, G, K) each


class Context(NamedTuple):
    """What all layers share about the tokens."""

    positions: jax.Array  # (B, T)
    segment_ids: jax.Array | None  # (B, T)
    angles: tuple[jax.Array, jax.Array] | None  # of rotary positions


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; q, k and v are separate products."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """With a cache, keys and values are written to it at the positions and attention reads it."""
        spec = self.spec
        q, k, v = self._project(x_BTD, context)
        if cache is None:
            mixed = causal_attention(q, k, v, context.segment_ids)
        else:
            at = (jnp.arange(x_BTD.shape[0])[:, None], context.positions)
            # Positions beyond the cache are dropped rather than clamped onto its last slot.
            cache = cache[0].at[at].set(k, mode="drop"), cache[1].at[at].set(v, mode="drop")
            mixed = cached_attention(q, *cache, context.positions)
        mixed = mixed.reshape(*x_BTD.shape[:2], spec.n_head * spec.head_dim)
        std = INIT_STD / (2 * spec.n_layers) ** 0.5
        return Dense(spec, spec.n_embd, (axes.HEADS, axes.EMBED), spec.bias, std, name="out")(mixed), cache

    def _project(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        spec = self.spec
        parts = []
        for name, heads, axis in (
            ("q", spec.n_head, axes.HEADS),
            ("k", spec.n_kv_head, axes.KV_HEADS),
            ("v", spec.n_kv_head, axes.KV_HEADS),
        ):
            y = Dense(spec, heads * spec.head_dim, (axes.EMBED, axis), spec.qkv_bias, name=name)(x_BTD)
            y = logical(y, axes.BATCH, axes.LENGTH, axis).reshape(*x_BTD.shape[:2], heads, spec.head_dim)
            if name != "v":
                if spec.qk_norm:
                    y = Norm(spec, "rms", name=f"{name}_norm")(y)
                if context.angles is not None:
                    y = rotate(y, context.angles, interleaved=spec.rope_interleaved)
            parts.append(y)
        q, k, v = parts
        return q, k, v
