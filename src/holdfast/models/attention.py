"""Causal attention: one function for rows that are trained on, one for generation from a cache.

Which implementation runs is decided by the table in `models/kernels.py`: a fused kernel of the accelerator that is
compiled for, or the plain formula. On a CPU it is always the plain one: queries go in chunks and each chunk sees only
the keys before its end, which skips almost half of the work.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, R = H / G queries heads of one key head,
K head size.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from holdfast.models import axes, kernels
from holdfast.models.config import KEEP_ALL, ROTATED, UNROTATED, WINDOWED, ModelSpec
from holdfast.models.kernels import PLAIN, Rules, named
from holdfast.models.layers import INIT_STD, Angles, capped, dense, logical, norm, rotate

MASKED = -1e30  # finite, so that a row of masked scores gives no NaN
MASKED_PRODUCT = "masked_product"
COUNTING = "accelerator"  # the platform of a trace whose operations are counted and which nothing runs


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    rules: Rules = PLAIN,
    window: jax.Array | None = None,
    windows: tuple[int, ...] = (),
) -> jax.Array:
    """Each position attends to itself and to earlier ones, of its own segment when there are segments.

    Args:
        window: the window of a layer whose neighbours have another one.
        windows: the sizes that `window` may have; without them no kernel can be chosen for it.
    """
    platform = kernels.target_platform()
    if platform == COUNTING:
        return fused_attention(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, rules, window)
    name = kernels.PLAIN_NAME
    if platform != "cpu" and kernels.can_place() and (window is None or windows):
        shortest = rules.window if window is None else min(windows)
        case = kernels.case_of(
            platform,
            str(q_BTHK.dtype),
            *(q_BTHK.shape[1], q_BTHK.shape[3]),
            packed=segment_ids_BT is not None,
            rules=rules,
            shortest=shortest,
        )
        name = kernels.choose(case)
    if name == kernels.PLAIN_NAME:
        return chunked_attention(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, rules=rules, window=window)
    if window is None:
        return kernels.on_mesh(name, q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, rules)
    return kernels.by_window(name, q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, rules, window, windows)


def attention_taken(spec: ModelSpec, platform: str, *, packed: bool, described: bool = False) -> str:
    """Which attention a model gets on a platform, in words.

    Args:
        described: for devices that are not here, of which nobody knows whether JAX finds cuDNN beside them.
    """
    case = _case(spec, platform, packed=packed)
    with_cudnn = case._replace(cudnn=platform == "gpu")
    if not described or kernels.choose(with_cudnn) == kernels.choose(case):
        return kernels.described(case)
    return f"{kernels.described(with_cudnn)} where JAX finds cuDNN, else {kernels.described(case)}"


def kept_scores(spec: ModelSpec, platform: str, rows: int) -> int:
    """Bytes that scores take in a step with that many rows; none where a kernel surely runs.

    Of the weights of softmax that the plain formula keeps for its backward pass, of all layers or of the one that is
    computed again, and of the scores of one chunk.
    """
    # As if rows were packed: the kernel that knows no segments may be missing there.
    if kernels.choose(_case(spec, platform, packed=True)) != kernels.PLAIN_NAME:
        return 0
    window = spec.window if len(set(spec.windows)) == 1 else None
    chunk = chunk_length(spec.block_size)
    kept = sum((end - start) * (end - first) for first, start, end in _spans(spec.block_size, chunk, window))
    layers = spec.n_layers if spec.remat_policy == KEEP_ALL else 1
    width = (4 if spec.dtype == "float32" else 2) * (1 if spec.attention_softcap is None else 2)
    return rows * spec.n_head * (layers * kept * width + 3 * 4 * chunk * spec.block_size)


def _case(spec: ModelSpec, platform: str, *, packed: bool) -> kernels.Case:
    """The attention of a model, as the table of kernels is asked about it."""
    rules = Rules(spec.attention_scale, spec.attention_softcap)
    shortest = min((window for window in spec.windows if window is not None), default=None)
    return kernels.case_of(
        platform, spec.dtype, spec.block_size, spec.head_dim, packed=packed, rules=rules, shortest=shortest
    )


def fused_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    rules: Rules = PLAIN,
    window: jax.Array | None = None,
) -> jax.Array:
    """Attention by JAX's own formula, all scores at once: traced to count operations, never run on long rows."""
    mask = None
    if segment_ids_BT is not None:
        mask = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    reach = rules.window if window is None else window
    if reach is not None:
        time = jnp.arange(q_BTHK.shape[1])
        near = (time[:, None] - time[None, :] < reach)[None, None]
        mask = near if mask is None else mask & near
    return named(masked_product(q_BTHK, k_BTGK, v_BTGK, mask, rules.scale))


@functools.partial(jax.jit, static_argnums=(4,))
def masked_product(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float | None = None
) -> jax.Array:
    """JAX's causal attention under a name of its own, `MASKED_PRODUCT`, in traces: half of its scores are masked."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=scale)


def chunked_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    chunk: int | None = None,
    rules: Rules = PLAIN,
    window: jax.Array | None = None,
) -> jax.Array:
    """Attention for CPUs: chunks of queries, each against only the keys that it may see."""
    chunk = chunk or chunk_length(q_BTHK.shape[1])
    return _chunked(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, window, chunk, rules)


def chunk_length(length: int) -> int:
    """Queries in one chunk: small enough to skip most masked keys, few enough chunks to compile quickly.

    >>> [chunk_length(length) for length in (100, 256, 512, 2048, 4096)]
    [64, 64, 128, 128, 256]
    """
    return max(64, min(128, length // 4), length // 16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: jax.Array | None,
    chunk: int,
    rules: Rules,
) -> jax.Array:
    return _chunked_forward(q, k, v, segment_ids, window, chunk, rules)[0]


def _chunked_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: jax.Array | None,
    chunk: int,
    rules: Rules,
) -> tuple[jax.Array, Any]:
    q_BGRTK, k_BGTK, v_BGTK = _by_head(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    outputs, saved = [], []
    for first, start, end in _spans(q.shape[1], chunk, rules.window):
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(first, end)[None, :])[None]
        reach = rules.window if window is None else window
        if reach is not None:
            mask &= (jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :] < reach)[None]
        if segment_ids is not None:
            mask &= segment_ids[:, start:end, None] == segment_ids[:, None, first:end]
        weights, sums, slopes = _weights(q_BGRTK[..., start:end, :], k_BGTK[:, :, first:end], mask, rules)
        outputs.append(_mix(weights, sums, v_BGTK[:, :, first:end]))
        saved.append((weights, sums, slopes))
    mixed_BGRTK = named(jnp.concatenate(outputs, axis=3))
    return _by_time(mixed_BGRTK), (q_BGRTK, k_BGTK, v_BGTK, mixed_BGRTK, saved)


def _chunked_backward(
    chunk: int, rules: Rules, saved: Any, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    """The backward pass of softmax attention; all it needs of the weights is their unnormalised form.

    With o = w·v / s, and do' = do / s: dv = wᵀ·do', and the scores' gradient is w ⊙ (do'·vᵀ − ⟨do', o⟩), in
    which the last term is a product of two small rows instead of two long ones.
    """
    q_BGRTK, k_BGTK, v_BGTK, mixed_BGRTK, chunks = saved
    dout_BGRTK = _by_head(dout, k_BGTK.shape[1])
    B, G, R, _, K = q_BGRTK.shape
    dq, dk, dv = [], jnp.zeros_like(k_BGTK), jnp.zeros_like(v_BGTK)
    spans = _spans(dout.shape[1], chunk, rules.window)
    for (first, start, end), (weights, sums, slopes) in zip(spans, chunks, strict=True):
        C, seen = end - start, slice(first, end)
        part, flat = (slice(None),) * 3 + (slice(start, end),), (B, G, R * C, K)
        scaled = dout_BGRTK[part] / sums
        inner = (scaled * mixed_BGRTK[part]).astype(jnp.float32).sum(-1, keepdims=True)
        scaled_BGNK = scaled.astype(dout.dtype).reshape(flat)
        weights_BGNS = weights.reshape(B, G, R * C, end - first)
        dweights = jnp.einsum("bgnk,bgsk->bgns", scaled_BGNK, v_BGTK[:, :, seen], preferred_element_type=jnp.float32)
        dscores = weights_BGNS * (dweights - inner.reshape(B, G, R * C, 1)) * rules.factor(K)
        if slopes is not None:
            dscores = dscores * slopes.reshape(B, G, R * C, end - first)
        dscores = dscores.astype(dout.dtype)
        dq.append(jnp.einsum("bgns,bgsk->bgnk", dscores, k_BGTK[:, :, seen]).reshape(B, G, R, C, K))
        dk = dk.at[:, :, seen].add(jnp.einsum("bgns,bgnk->bgsk", dscores, q_BGRTK[part].reshape(flat)))
        dv = dv.at[:, :, seen].add(jnp.einsum("bgns,bgnk->bgsk", weights_BGNS, scaled_BGNK))
    return _by_time(jnp.concatenate(dq, axis=3)), dk.swapaxes(1, 2), dv.swapaxes(1, 2), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _spans(length: int, chunk: int, window: int | None) -> list[tuple[int, int, int]]:
    """Of each chunk of queries: the first key that one of them sees, the first query, the end of both."""
    starts = range(0, length, chunk)
    return [
        (0 if window is None else max(0, start - window + 1), start, min(start + chunk, length)) for start in starts
    ]


def _by_head(x_BTHK: jax.Array, groups: int) -> jax.Array:
    B, T, H, K = x_BTHK.shape
    return x_BTHK.reshape(B, T, groups, H // groups, K).transpose(0, 2, 3, 1, 4)


def _by_time(x_BGRTK: jax.Array) -> jax.Array:
    B, G, R, T, K = x_BGRTK.shape
    return x_BGRTK.transpose(0, 3, 1, 2, 4).reshape(B, T, G * R, K)


def _weights(
    q_BGRTK: jax.Array, k_BGSK: jax.Array, mask_BTS: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Softmax weights before normalisation, in the inputs' type, and their sums in float32.

    Last the slope of each score where scores are bounded: what its gradient is multiplied with.
    """
    B, G, R, T, K = q_BGRTK.shape
    # Heads that share a key head become more rows of one matrix product.
    q_BGNK = q_BGRTK.reshape(B, G, R * T, K) * rules.factor(K)
    scores = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK, preferred_element_type=jnp.float32)
    slopes = None
    if rules.softcap is not None:
        scores = capped(scores, rules.softcap)
        slopes = (1 - jnp.square(scores / rules.softcap)).astype(k_BGSK.dtype)
    scores_BGRTS = jnp.where(mask_BTS[:, None, None], scores.reshape(B, G, R, T, -1), MASKED)
    weights = jnp.exp(scores_BGRTS - scores_BGRTS.max(axis=-1, keepdims=True))
    return weights.astype(k_BGSK.dtype), weights.sum(axis=-1, keepdims=True), slopes


def _mix(weights_BGRTS: jax.Array, sums_BGRT1: jax.Array, v_BGSK: jax.Array) -> jax.Array:
    """Values mixed by weights and divided by their sums: normalising the result is cheaper than the weights."""
    B, G, R, T, S = weights_BGRTS.shape
    mixed = jnp.einsum(
        "bgns,bgsk->bgnk", weights_BGRTS.reshape(B, G, R * T, S), v_BGSK, preferred_element_type=jnp.float32
    )
    return (mixed.reshape(B, G, R, T, -1) / sums_BGRT1).astype(v_BGSK.dtype)


def cached_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    positions_BT: jax.Array,
    rules: Rules = PLAIN,
    window: jax.Array | None = None,
) -> jax.Array:
    """Queries at given positions of their row against a cache whose slot s holds position s."""
    slots_S = jnp.arange(k_BSGK.shape[1])
    mask_BTS = positions_BT[:, :, None] >= slots_S
    reach = rules.window if window is None else window
    if reach is not None:
        mask_BTS &= positions_BT[:, :, None] - slots_S < reach
    weights, sums, _ = _weights(_by_head(q_BTHK, k_BSGK.shape[2]), k_BSGK.swapaxes(1, 2), mask_BTS, rules)
    return _by_time(_mix(weights, sums, v_BSGK.swapaxes(1, 2)))


LayerCache = tuple[jax.Array, jax.Array]  # keys and values of one layer, (B, S, G, K) each


class Context(NamedTuple):
    """What all layers share about the tokens."""

    positions: jax.Array  # (B, T)
    segment_ids: jax.Array | None  # (B, T)
    angles: Angles | None  # of rotary positions
    window_angles: Angles | None = None  # of those in layers with a window, where they differ
    num_tokens: jax.Array | None = None  # (B,), how many of the T are real where they go into a cache; None: all


class LayerKind(NamedTuple):
    """What one layer does otherwise than its neighbours; stacked over the layers, so that a loop can go over them.

    None is what all layers have in common: there the specification says it.
    """

    window: jax.Array | None  # (L,) tokens that the layer sees
    windowed: jax.Array | None  # (L,) whether it has the angles of layers with a window
    rotated: jax.Array | None  # (L,) whether it has rotary positions


def layer_kinds(spec: ModelSpec) -> LayerKind:
    """The kinds of all layers."""
    windows, rotated = spec.letters(spec.window_layers), spec.letters(spec.rope_layers)
    seen = [spec.block_size if window is None else window for window in spec.windows]
    has_window = jnp.asarray([letter == WINDOWED for letter in windows])
    return LayerKind(
        window=jnp.asarray(seen, jnp.int32) if len(set(spec.windows)) > 1 else None,
        windowed=has_window if spec.window_rope_base is not None else None,
        rotated=jnp.asarray([letter == ROTATED for letter in rotated]) if UNROTATED in rotated else None,
    )


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; q, k and v are separate products."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: LayerCache | None, kind: LayerKind
    ) -> tuple[jax.Array, LayerCache | None]:
        """With a cache, keys and values are written to it at the positions and attention reads it."""
        spec = self.spec
        q, k, v = self._project(x_BTD, _angles(context, kind))
        rules = Rules(spec.attention_scale, spec.attention_softcap, spec.windows[0] if kind.window is None else None)
        if cache is None:
            windows = tuple(spec.block_size if window is None else window for window in spec.windows)
            mixed = causal_attention(q, k, v, context.segment_ids, rules, kind.window, windows)
        else:
            at = (jnp.arange(x_BTD.shape[0])[:, None], context.positions)
            # Positions beyond the cache are dropped rather than clamped onto its last slot.
            cache = cache[0].at[at].set(k, mode="drop"), cache[1].at[at].set(v, mode="drop")
            mixed = cached_attention(q, *cache, context.positions, rules, kind.window)
        mixed = mixed.reshape(*x_BTD.shape[:2], spec.n_head * spec.head_dim)
        std = INIT_STD / (2 * spec.n_layers) ** 0.5
        return dense(spec, spec.n_embd, (axes.HEADS, axes.EMBED), spec.bias, std, name="out")(mixed), cache

    def _project(self, x_BTD: jax.Array, angles: Angles | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        spec = self.spec
        parts = []
        for name, heads, axis in (
            ("q", spec.n_head, axes.HEADS),
            ("k", spec.n_kv_head, axes.KV_HEADS),
            ("v", spec.n_kv_head, axes.KV_HEADS),
        ):
            y = dense(spec, heads * spec.head_dim, (axes.EMBED, axis), spec.qkv_bias, name=name)(x_BTD)
            y = logical(y, axes.BATCH, axes.LENGTH, axis)
            normed = spec.qk_norm and name != "v"
            if normed and spec.qk_norm_over == "all":
                y = norm(spec, "rms", name=f"{name}_norm")(y)
            y = y.reshape(*x_BTD.shape[:2], heads, spec.head_dim)
            if normed and spec.qk_norm_over == "head":
                y = norm(spec, "rms", name=f"{name}_norm")(y)
            if name != "v" and angles is not None:
                y = rotate(y, angles, interleaved=spec.rope_interleaved)
            parts.append(y)
        q, k, v = parts
        return q, k, v


def _angles(context: Context, kind: LayerKind) -> Angles | None:
    """The angles of one layer; to turn by nothing is to multiply by 1 and to add 0, which is exact."""
    if context.angles is None:
        return None
    cos, sin = context.angles
    if kind.windowed is not None:
        assert context.window_angles is not None
        cos, sin = (
            jnp.where(kind.windowed, own, all_) for own, all_ in zip(context.window_angles, context.angles, strict=True)
        )
    if kind.rotated is not None:
        cos, sin = jnp.where(kind.rotated, cos, 1.0), jnp.where(kind.rotated, sin, 0.0)
    return cos, sin
