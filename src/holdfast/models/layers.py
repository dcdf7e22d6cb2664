"""The parts of a decoder layer, written for speed on a CPU and for sharding by logical axes everywhere.

Shapes: N tokens of all rows, B rows, T time, D width, F feed-forward width, H query heads, G key/value heads,
K head size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import spmd
from numpy.typing import NDArray

from holdfast.execution.memory import in_host_memory, on_device
from holdfast.models import axes
from holdfast.models.config import ModelSpec
from holdfast.models.kernels import LANES, target_platform
from holdfast.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE

INIT_STD = 0.02

Measured = dict[str, jax.Array]  # auxiliary losses of a layer, by name


def logical(array: jax.Array, *names: str) -> jax.Array:
    """Hint how an activation is laid out on the mesh; nothing where no mesh is set."""
    hinted: jax.Array = spmd.with_logical_constraint(array, names, rules=axes.rules())
    return hinted


def gathered(weight: jax.Array, *names: str) -> jax.Array:
    """A weight whole along the model's width, as each use of it needs: its fsdp shards are brought together.

    Without this a compiler may leave the weight in shards and exchange activations instead, which are larger. Cast
    first: what is sent is as wide as the array.
    """
    if target_platform() != "cpu" and names[-1] == axes.EMBED and axes.ROUTES not in names:
        width = axes.shard_width(weight.shape[-1])
        if width is not None and width <= LANES:
            return _gathered_from_lanes(weight, names)
    return _whole(weight, names)


def _whole(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """A weight laid out by its names, but for the width, which is in one piece."""
    return logical(weight, *(axes.ACTIVATION if name == axes.EMBED else name for name in names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered_from_lanes(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """As `_whole`, with a gradient that is said to be in shards.

    Else a compiler is told to sum the gradient of the whole weight, and has to find out that each device uses a part of
    it. libtpu's does, except where the part is one column of tiles: there every device was sent the whole sum.
    """
    return _whole(weight, names)


def _forward_from_lanes(weight: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _whole(weight, names), None


def _backward_from_lanes(names: tuple[str, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (logical(gradient, *names),)


_gathered_from_lanes.defvjp(_forward_from_lanes, _backward_from_lanes)


def parameter(
    module: nn.Module, name: str, init: Any, shape: tuple[int, ...], names: tuple[str, ...], used_as: str | None = None
) -> jax.Array:
    """A parameter of a module in the module's `param_dtype`, with the logical names of its axes.

    One that is given in the host's memory (a reference) is brought to the device here: inside the loop over layers, so
    that there is one layer of them on the device at a time.

    Args:
        used_as: the type of all uses, if that is one.
    """
    dtype = jnp.dtype(module.param_dtype)
    value: Any = module.param(name, nn.with_logical_partitioning(init, names), shape, dtype)
    return brought(value, *names, dtype=used_as)


def brought(weight: jax.Array, *names: str, dtype: str | None = None) -> jax.Array:
    """A weight on the device: as it is, or from the host's memory, where its shards become no larger than they must.

    Args:
        dtype: in which all uses of it are, so that one from the host need not be held in its own.
    """
    if not in_host_memory(weight):
        return weight
    moved = logical(on_device(weight), *names)
    # Behind the barrier it is gathered from the device's shards: a compiler may gather on the host otherwise.
    behind: jax.Array = jax.lax.optimization_barrier(moved if dtype is None else moved.astype(dtype))
    return behind


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Logits bounded to ±softcap, smoothly; as they are without one."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def logits(hidden_ND: jax.Array, unembedding_DV: jax.Array, softcap: float | None = None) -> jax.Array:
    """Logits (N, V) of hidden states, in float32."""
    matrix_DV = unembedding_DV.astype(hidden_ND.dtype)
    return capped(jnp.dot(hidden_ND, matrix_DV, preferred_element_type=jnp.float32), softcap)


class Dense(nn.Module):
    """A linear map of the last axis, beside whose kernel an adapter (LoRA) may stand.

    All other axes are flattened first: XLA's backward pass of a rank-3 product takes almost twice as long on a
    CPU as that of the same rank-2 product.
    """

    features: int
    names: tuple[str, str]  # logical axes of the kernel
    use_bias: bool = False
    std: float = INIT_STD  # of the initial kernel
    dtype: str = "float32"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.dtype)
        shape = (x.shape[-1], self.features)
        kernel = parameter(self, "kernel", nn.initializers.normal(self.std), shape, self.names)
        x_NI = x.reshape(-1, x.shape[-1]).astype(dtype)
        y_NF = x_NI @ gathered(kernel.astype(dtype), *self.names)
        if self.has_variable("params", LORA_IN):
            inward, outward, scale = self._adapter(dtype)
            y_NF += (x_NI @ inward) @ outward * scale
        if self.use_bias:
            y_NF += parameter(self, "bias", nn.initializers.zeros, shape[1:], (axes.NORM,)).astype(dtype)
        return y_NF.reshape(*x.shape[:-1], self.features)

    def _adapter(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The adapter that `models/lora.py` put beside the kernel: (in, r), (r, out), scale."""
        inward, outward, scale = self._stored(dtype)
        return gathered(inward, self.names[0], axes.NORM), gathered(outward, axes.NORM, self.names[1]), scale

    def _stored(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        inward, outward, scale = (
            jnp.asarray(on_device(self.get_variable("params", name)), dtype) for name in (LORA_IN, LORA_OUT, LORA_SCALE)
        )
        return inward, outward, scale


class Embedding(nn.Module):
    """A table of vectors, one for each token or position."""

    num_rows: int
    features: int
    axis: str  # logical axis of the rows
    dtype: str = "float32"
    param_dtype: str = "float32"

    def setup(self) -> None:
        init, shape, names = nn.initializers.normal(INIT_STD), (self.num_rows, self.features), (self.axis, axes.EMBED)
        self.embedding = parameter(self, "embedding", init, shape, names, self.dtype)

    def __call__(self, indices_BT: jax.Array) -> jax.Array:
        dtype, shards = jnp.dtype(self.dtype), axes.group_rows(indices_BT.shape[0])
        if shards > 1 and indices_BT.size <= shards * self.num_rows:
            # Fewer vectors than the table has: each device looks its columns up for all rows of its group, and the
            # vectors go where their rows are. The gradient of the table is then made in its shards, and never whole.
            indices_BT = logical(indices_BT, axes.GROUP, axes.LENGTH)
            table = logical(self.embedding, self.axis, axes.EMBED)
            vectors = jnp.take(table, indices_BT, axis=0, mode="clip").astype(dtype)
            vectors = logical(vectors, axes.GROUP, axes.LENGTH, axes.EMBED)
            return logical(vectors, axes.BATCH, axes.LENGTH, axes.ACTIVATION)
        # The table's columns are gathered, like any weight, so that the vectors stay where their rows are.
        table = logical(self.embedding, self.axis, axes.ACTIVATION)
        return jnp.take(table, indices_BT, axis=0, mode="clip").astype(dtype)


class Unembedding(nn.Module):
    """The output matrix of a model whose embeddings are not tied."""

    features: int
    vocab_size: int
    param_dtype: str = "float32"

    def setup(self) -> None:
        init, shape = nn.initializers.normal(INIT_STD), (self.features, self.vocab_size)
        self.kernel = parameter(self, "kernel", init, shape, (axes.EMBED, axes.VOCAB))


class Dropout(nn.Module):
    """Dropout; no operation at all where the rate is 0."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        rate = self.rate
        if deterministic or rate == 0:
            return x
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0)


class Norm(nn.Module):
    """Layer norm or RMS norm over the last axis, computed in float32."""

    kind: str = "rms"  # or "layer"
    eps: float = 1e-5
    use_bias: bool = False  # of a layer norm
    param_dtype: str = "float32"
    offset: bool = False  # the parameter is what the scale is more than 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1],)
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = parameter(self, "scale", init, shape, (axes.NORM,))
        if self.offset:
            scale = 1 + scale.astype(jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, self.eps)
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, shape, (axes.NORM,))
        else:
            bias = jnp.zeros_like(scale)
        return layer_norm(x, scale, bias, self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x − mean) / √(variance + eps) · scale + bias.

    Its own backward pass keeps one array and two vectors per row and reads them once.
    """
    return _layer_norm_forward(x, scale, bias, eps)[0]


def _layer_norm_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + eps)
    y = (wide - mean) * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype), (x, mean, inverse, scale, bias)


def _layer_norm_backward(_eps: float, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, inverse, scale, bias = saved
    wide_dy = dy.astype(jnp.float32)
    normed = (x.astype(jnp.float32) - mean) * inverse
    inner = wide_dy * scale.astype(jnp.float32)
    mean_inner = inner.mean(axis=-1, keepdims=True)
    mean_product = (inner * normed).mean(axis=-1, keepdims=True)
    dx = inverse * (inner - mean_inner - normed * mean_product)
    rows = tuple(range(x.ndim - 1))
    dscale = (wide_dy * normed).sum(axis=rows)
    return dx.astype(x.dtype), dscale.astype(scale.dtype), wide_dy.sum(axis=rows).astype(bias.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / √(mean(x²) + eps) · scale, with its own backward pass as `layer_norm`."""
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype), (x, inverse, scale)


def _rms_norm_backward(_eps: float, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, inverse, scale = saved
    wide_dy = dy.astype(jnp.float32)
    normed = x.astype(jnp.float32) * inverse
    inner = wide_dy * scale.astype(jnp.float32)
    dx = inverse * (inner - normed * (inner * normed).mean(axis=-1, keepdims=True))
    dscale = (wide_dy * normed).sum(axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


Angles = tuple[jax.Array, jax.Array]  # cosine and sine, (B, T, 1, rotated / 2), float32


def rotary_angles(spec: ModelSpec, positions_BT: jax.Array) -> Angles:
    """Cosine and sine of each position's angles."""
    angles = positions_BT.astype(jnp.float32)[..., None, None] * rotary_frequencies(spec)
    return jnp.cos(angles), jnp.sin(angles)


def window_angles(spec: ModelSpec, positions_BT: jax.Array) -> Angles | None:
    """The angles of layers with a window where those have a base of their own, which was never stretched."""
    if spec.window_rope_base is None:
        return None
    return rotary_angles(dataclasses.replace(spec, rope_base=spec.window_rope_base, rope_scaling="none"), positions_BT)


def rotary_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """By how much each pair of channels turns from one position to the next, (rotated / 2,)."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    frequencies = (1 / np.float32(spec.rope_base) ** exponents).astype(np.float32)
    if spec.rope_scaling == "linear":
        frequencies = frequencies / np.float32(spec.rope_factor)
    if spec.rope_scaling == "llama3":
        # Turns that are slow at the original length are slowed down, fast ones stay, those between are mixed.
        turns = spec.rope_original * frequencies / (2 * np.pi)
        kept = np.clip((turns - spec.rope_low) / (spec.rope_high - spec.rope_low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / spec.rope_factor)
    return frequencies.astype(np.float32)


def rotate(x_BTHK: jax.Array, angles: Angles, *, interleaved: bool) -> jax.Array:
    """Rotary positions: turn pairs of the first channels of each head by their angles.

    Args:
        interleaved: pairs are neighbours (llama2.c, GPT-J); otherwise channel i pairs with i + rotated / 2.
    """
    cos, sin = angles
    rotated = 2 * cos.shape[-1]
    turned, kept = x_BTHK[..., :rotated].astype(jnp.float32), x_BTHK[..., rotated:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(pair, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([out.astype(x_BTHK.dtype), kept], axis=-1) if kept.shape[-1] else out.astype(x_BTHK.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def activate(kind: str, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """The feed-forward activation; gated kinds multiply the activated gate with `up`.

    The backward pass computes it again: that is as fast as reading what would be kept of it, and saves the memory.
    """
    if gate is None:
        return nn.gelu(up, approximate=kind == "gelu")
    return (nn.silu(gate) if kind == "silu_gated" else nn.gelu(gate, approximate=True)) * up


def dense(
    spec: ModelSpec, features: int, names: tuple[str, str], use_bias: bool, std: float = INIT_STD, *, name: str
) -> Dense:
    """A `Dense` module with the types of a decoder."""
    return Dense(features, names, use_bias, std, spec.dtype, spec.param_dtype, name=name)


def norm(spec: ModelSpec, kind: str, *, name: str | None = None) -> Norm:
    """A `Norm` module with the numbers of a decoder."""
    return Norm(kind, spec.norm_eps, spec.bias, spec.param_dtype, spec.norm_offset, name=name)


class Mlp(nn.Module):
    """Feed-forward layer: up, activation (gated or not), down; it has no auxiliary losses."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Measured | None]:
        spec = self.spec
        inward, outward = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
        up = dense(spec, spec.n_ff, inward, spec.bias, name="up")(x_BTD)
        gate = dense(spec, spec.n_ff, inward, spec.bias, name="gate")(x_BTD) if spec.gated else None
        hidden = logical(activate(spec.activation, up, gate), axes.BATCH, axes.LENGTH, axes.MLP)
        std = INIT_STD / (2 * spec.n_layers) ** 0.5
        return dense(spec, spec.n_embd, outward, spec.bias, std, name="down")(hidden), None
