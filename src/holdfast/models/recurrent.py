"""Layers with a state in the place of attention: linear in the length of a row, and exact at the borders of texts.

Each head has a state H (K, V) that fades by a factor of the token's own and takes in the token:

    H_t = a_t H_{t−1} + s_t k_t v_tᵀ        y_t = H_tᵀ q_t        s_t = softplus(w·x_t + b),  a_t = exp(−s_t)

which is the state space of Mamba 2 (Dao and Gu 2024), or linear attention with a gate. Training computes it in chunks:
inside a chunk as masked attention whose weights fade, and from chunk to chunk by the state. In generation the state is
all that is kept. At the first token of a text the state before it counts nothing: a mask, not a small number.

Shapes: B rows, T time, C tokens of a chunk, N chunks, D width, H heads, K numbers of a state for each channel,
V channels of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from holdfast.execution.memory import on_device
from holdfast.models import axes
from holdfast.models.attention import Attention, Context, LayerKind
from holdfast.models.decoder import rematerialised
from holdfast.models.hybrid import HybridSpec
from holdfast.models.layers import INIT_STD, Measured, Norm, dense, logical

SHORTEST, LONGEST = 2.0, 256.0  # tokens after which the states of the first and of the last head have faded, at first


class Cache(NamedTuple):
    """What each layer keeps: keys and values (B, S, G, K), or a state (B, H, K, V)."""

    layers: tuple[Any, ...]
    lengths: jax.Array  # (B,), tokens read so far


def init_cache(spec: HybridSpec, num_rows: int, length: int) -> Cache:
    """An empty cache for that many rows and tokens."""
    keys = jnp.zeros((num_rows, length, spec.n_kv_head, spec.head_dim), jnp.dtype(spec.dtype))
    state = jnp.zeros((num_rows, spec.n_head, spec.n_state, spec.head_dim), jnp.float32)
    return Cache(
        tuple((keys, keys) if attends else state for attends in spec.attends), jnp.zeros((num_rows,), jnp.int32)
    )


def scanned(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_fade_BTH: jax.Array,
    begins_BT: jax.Array,
    state_BHKV: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """The outputs (B, T, H, V) of all tokens and the state after the last, in float32.

    Args:
        log_fade_BTH: logarithm of the factor, at most 0, by which the state before a token fades.
        begins_BT: whether a token is the first of a text, which the state before it does not reach.
    """
    T = q_BTHK.shape[1]
    size = min(chunk, T)
    # Tokens after the last neither fade nor add anything.
    parts = [_in_chunks(x, size) for x in (q_BTHK, k_BTHK, v_BTHV, log_fade_BTH, begins_BT.astype(jnp.int32))]
    q, k, v, fade, begins = parts
    text_BNC = jnp.cumsum(begins, axis=2)  # which of a chunk's texts; 0: the one that goes on from before
    total_BNCH = _sums_of_texts(fade, begins)
    # Inside a chunk: token i meets token j of its own text, faded by what lies between them.
    seen = (text_BNC[:, :, :, None] == text_BNC[:, :, None, :]) & jnp.tril(jnp.ones((size, size), bool))
    between = total_BNCH[:, :, :, None] - total_BNCH[:, :, None, :]
    weights = jnp.exp(jnp.where(seen[..., None], between, -jnp.inf))  # (B, N, C, C, H)
    scores = jnp.einsum("bnihk,bnjhk->bnijh", q, k) * weights
    y = jnp.einsum("bnijh,bnjhv->bnihv", scores, v)
    # From chunk to chunk: what a chunk leaves behind, and what of the state before passes through it.
    left = jnp.where((text_BNC == text_BNC[:, :, -1:])[..., None], jnp.exp(total_BNCH[:, :, -1:] - total_BNCH), 0.0)
    added_NBHKV = jnp.einsum("bnjhk,bnjh,bnjhv->nbhkv", k, left, v)
    passed_NBH = jnp.where((text_BNC[:, :, -1] == 0)[..., None], jnp.exp(total_BNCH[:, :, -1]), 0.0).swapaxes(0, 1)

    def after(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        passed_BH, added_BHKV = chunk
        return passed_BH[..., None, None] * state + added_BHKV, state

    last, before_NBHKV = jax.lax.scan(after, state_BHKV, (passed_NBH, added_NBHKV))
    reach = jnp.where((text_BNC == 0)[..., None], jnp.exp(total_BNCH), 0.0)
    y = y + jnp.einsum("bnihk,bnih,nbhkv->bnihv", q, reach, before_NBHKV)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :T], last


def _sums_of_texts(fade_BNCH: jax.Array, begins_BNC: jax.Array) -> jax.Array:
    """Sums of what fades from the beginning of the chunk or of the text on.

    A plain cumulative sum would do, for only differences inside a text count; but its rounding, and the rounding of its
    gradient, would carry a trace of the texts before.
    """

    def after(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    goes_on = (1 - begins_BNC)[..., None].astype(fade_BNCH.dtype)
    sums_BNCH: jax.Array = jax.lax.associative_scan(after, (goes_on, fade_BNCH), axis=2)[1]
    return sums_BNCH


def _in_chunks(x: jax.Array, size: int) -> jax.Array:
    """(B, T, …) as (B, N, C, …), with zeros after the last token."""
    B, T = x.shape[:2]
    num_chunks = -(-T // size)
    padded = jnp.pad(x, ((0, 0), (0, num_chunks * size - T), *((0, 0),) * (x.ndim - 2)))
    return padded.reshape(B, num_chunks, size, *x.shape[2:])


class StateSpace(nn.Module):
    """The part of a layer that mixes tokens through a state; called as `Attention` is."""

    spec: HybridSpec

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: jax.Array | None, _kind: LayerKind
    ) -> tuple[jax.Array, jax.Array | None]:
        """With a cache, which is a state, it goes on from there."""
        spec, (B, T) = self.spec, x_BTD.shape[:2]
        q, k = (self._heads(name, spec.n_state, x_BTD) for name in "qk")
        v, gate = (self._heads(name, spec.head_dim, x_BTD) for name in ("v", "gate"))
        step_BTH = nn.softplus(self._steps(x_BTD))
        if context.num_tokens is not None:  # padding neither fades a state nor adds to it
            step_BTH = jnp.where((jnp.arange(T) < context.num_tokens[:, None])[..., None], step_BTH, 0.0)
        state = jnp.zeros((B, spec.n_head, spec.n_state, spec.head_dim), jnp.float32) if cache is None else cache
        q = q.astype(jnp.float32) * spec.n_state**-0.5
        k = k.astype(jnp.float32) * step_BTH[..., None]
        y, state = scanned(q, k, v.astype(jnp.float32), -step_BTH, _begins(context, (B, T)), state, spec.chunk)
        y = Norm("rms", spec.norm_eps, param_dtype=spec.param_dtype, name="state_norm")(y)
        y = (y.astype(gate.dtype) * nn.silu(gate)).reshape(B, T, spec.n_head * spec.head_dim)
        std = INIT_STD / (2 * spec.n_layers) ** 0.5
        out = dense(spec, spec.n_embd, (axes.HEADS, axes.EMBED), spec.bias, std, name="out")(y)
        return out, None if cache is None else state

    def _heads(self, name: str, size: int, x_BTD: jax.Array) -> jax.Array:
        spec = self.spec
        y = dense(spec, spec.n_head * size, (axes.EMBED, axes.HEADS), spec.qkv_bias, name=name)(x_BTD)
        y = logical(y, axes.BATCH, axes.LENGTH, axes.HEADS)
        return y.reshape(*x_BTD.shape[:2], spec.n_head, size)

    def _steps(self, x_BTD: jax.Array) -> jax.Array:
        """How far a token moves the state of each head, before softplus; heads begin with spans of their own."""
        spec = self.spec
        spans = jnp.geomspace(SHORTEST, LONGEST, spec.n_head)

        def initial(_key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.log(jnp.expm1(1 / spans)).astype(dtype).reshape(shape)

        boxed = nn.with_logical_partitioning(initial, (axes.NORM,))
        bias_H: Any = on_device(self.param("step_bias", boxed, (spec.n_head,), jnp.dtype(spec.param_dtype)))
        step_BTH = dense(spec, spec.n_head, (axes.EMBED, axes.HEADS), False, name="step")(x_BTD)
        found: jax.Array = step_BTH.astype(jnp.float32) + bias_H.astype(jnp.float32)
        return found


def _begins(context: Context, shape: tuple[int, int]) -> jax.Array:
    """Whether each token is the first of its text; what comes before a row's first is the cache's, or zeros."""
    if context.segment_ids is None:
        return jnp.zeros(shape, bool)
    ids_BT = context.segment_ids
    return jnp.concatenate([jnp.zeros((shape[0], 1), bool), ids_BT[:, 1:] != ids_BT[:, :-1]], axis=1)


class MixedLayers(nn.Module):
    """All layers, each with parameters of its own (`layer_0`, `layer_1`, …), since they are of two kinds."""

    spec: HybridSpec

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, cache: Any, context: Context, deterministic: bool, kinds: LayerKind
    ) -> tuple[jax.Array, tuple[Any, Measured | None]]:
        spec, kept = self.spec, []
        layer = rematerialised(spec)
        for number, attends in enumerate(spec.attends):
            mixer = (Attention, "attention") if attends else (StateSpace, "state")
            own = None if cache is None else cache[0][number]
            kind = jax.tree.map(lambda values: values[number], kinds)  # noqa: B023
            x_BTD, (own, _) = layer(spec, *mixer, name=f"layer_{number}")(x_BTD, own, context, deterministic, kind)
            kept.append(own)
        return x_BTD, (None if cache is None else (tuple(kept),), None)
