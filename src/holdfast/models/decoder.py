"""One decoder for the GPT family: GPT-2, Llama, Qwen, Gemma, OLMo and others are settings of its `ModelSpec`.

Parameters (unboxed, float32 unless the spec says otherwise):

    embed/embedding (V, D)                     positions/embedding (P, D) where positions are learned
    layers/…  all layers stacked on axis 0, whether they are scanned or unrolled:
        attention_norm/{scale, bias}           attention/{q, k, v, out}/{kernel (in, out), bias}
        attention/{q_norm, k_norm}/scale       mlp_norm/{scale, bias}
        mlp/{up, gate, down}/{kernel, bias}    {attention, mlp}_post_norm/{scale, bias} where norms come after
    final_norm/{scale, bias}                   unembed/kernel (D, V) where embeddings are not tied

Shapes: B rows, T time, S slots of the cache, P positions, D width, V vocabulary, G key/value heads, K head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from holdfast.models import axes
from holdfast.models.attention import Attention, Context, LayerCache, LayerKind, layer_kinds
from holdfast.models.config import DOTS, KEEP_ALL, SAVE_ATTENTION, ModelSpec
from holdfast.models.kernels import MIXED_NAME
from holdfast.models.layers import (
    Dropout,
    Embedding,
    Measured,
    Mlp,
    Unembedding,
    capped,
    gathered,
    logical,
    norm,
    rotary_angles,
    window_angles,
)
from holdfast.types import Tree


class Cache(NamedTuple):
    """Keys and values of the tokens that each row has read, slot s holding position s; made by `init_cache`."""

    keys: jax.Array  # (L, B, S, G, K)
    values: jax.Array
    lengths: jax.Array  # (B,), tokens read so far


def init_cache(spec: ModelSpec, num_rows: int, length: int | None = None) -> Cache:
    """An empty cache for that many rows and tokens (the block size unless given)."""
    shape = (spec.n_layers, num_rows, length or spec.block_size, spec.n_kv_head, spec.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(spec.dtype))
    return Cache(zeros, zeros, jnp.zeros((num_rows,), jnp.int32))


def unembedding(params: Tree, spec: ModelSpec) -> jax.Array:
    """The (D, V) matrix that turns hidden states into logits, from the (unboxed) parameters."""
    matrix: jax.Array = params["embed"]["embedding"].T if spec.tie_embeddings else params["unembed"]["kernel"]
    return gathered(matrix, axes.EMBED, axes.VOCAB)


class Layer(nn.Module):
    """A part that mixes tokens and a feed-forward part, each on a copy of the residual stream.

    Copies are normed before or after or both. Other families put their own parts in the place of these.

    Args:
        mixer: called with states, context, cache and kind of the layer; gives what it adds and the new cache.
        feed_forward: called with states; gives what it adds and its auxiliary losses, if it has any.
    """

    spec: ModelSpec
    mixer: Callable[..., nn.Module] = Attention
    mixer_name: str = "attention"
    feed_forward: Callable[..., nn.Module] = Mlp

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, cache: Any, context: Context, deterministic: bool, kind: LayerKind
    ) -> tuple[jax.Array, tuple[Any, Measured | None]]:
        spec, mixer = self.spec, self.mixer(self.spec, name=self.mixer_name)
        attended, cache = mixer(self._normed("attention_norm", x_BTD), context, cache, kind)
        attended = self._added("attention_post_norm", attended, deterministic)
        mlp = self.feed_forward(spec, name="mlp")
        if spec.parallel_residual:
            added, measured = mlp(self._normed("mlp_norm", x_BTD))
            x_BTD = x_BTD + attended + self._added("mlp_post_norm", added, deterministic)
        else:
            x_BTD = x_BTD + attended
            added, measured = mlp(self._normed("mlp_norm", x_BTD))
            x_BTD = x_BTD + self._added("mlp_post_norm", added, deterministic)
        return logical(x_BTD, axes.BATCH, axes.LENGTH, axes.ACTIVATION), (cache, measured)

    def _normed(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """States after a norm, if the layer has it."""
        spec = self.spec
        return norm(spec, spec.norm, name=name)(x_BTD) if name in spec.norms else x_BTD

    def _added(self, post_norm: str, x_BTD: jax.Array, deterministic: bool) -> jax.Array:
        """What a part of the layer adds to the residual stream."""
        x_BTD = Dropout(self.spec.dropout)(self._normed(post_norm, x_BTD), deterministic)
        return x_BTD if self.spec.residual_scale == 1 else x_BTD * self.spec.residual_scale


def rematerialised(spec: ModelSpec) -> Any:
    """The layer, of which the backward pass computes again what `architecture/remat` says."""
    policy = spec.remat_policy
    if policy == KEEP_ALL:
        return Layer
    saved = {
        # Dense products alone: those of attention have a batch axis, and their results are as large as its scores.
        DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        SAVE_ATTENTION: jax.checkpoint_policies.save_only_these_names(MIXED_NAME),
    }
    # prevent_cse guards against an optimisation that a loop rules out anyway.
    return nn.remat(Layer, prevent_cse=not spec.scan_layers, static_argnums=(4,), policy=saved.get(policy))


def stacked_layers(spec: ModelSpec, feed_forward: Callable[..., nn.Module] = Mlp) -> Any:
    """All layers as one module whose parameters have the layer as their first axis.

    `scan_layers` decides only whether the loop is compiled as a loop: names, shapes, initial values and
    results are the same without it.
    """
    return nn.scan(
        rematerialised(spec),
        variable_axes={"params": 0, axes.MOMENTS: 0},
        split_rngs={"params": True, "dropout": spec.dropout > 0},
        in_axes=(0, nn.broadcast, nn.broadcast, 0),
        length=spec.n_layers,
        unroll=1 if spec.scan_layers else spec.n_layers,
        metadata_params={nn.PARTITION_NAME: axes.LAYERS},
    )(spec, feed_forward=feed_forward)


class Decoder(nn.Module):
    """A decoder-only transformer.

    `apply({"params": params}, tokens_BT)` gives logits; `method="hidden"` the states below them (for
    `objectives.token_loss`, which never holds all logits); `method="decode"` and `method="read"` go on from a cache.

    Args:
        make_layers: the layers of a specification as one module; other families have their own.
        losses: auxiliary losses that the layers give, and their weights; `hidden` then gives these too.
    """

    spec: ModelSpec
    make_layers: Callable[[Any], Any] = stacked_layers
    losses: tuple[tuple[str, float], ...] = ()

    def setup(self) -> None:
        spec = self.spec
        self.embed = Embedding(spec.vocab_size, spec.n_embd, axes.VOCAB, spec.dtype, spec.param_dtype)
        if spec.positions == "learned":
            self.positions = Embedding(spec.block_size, spec.n_embd, axes.LENGTH, spec.dtype, spec.param_dtype)
        self.dropout = Dropout(spec.dropout)
        self.layers = self.make_layers(spec)
        self.final_norm = norm(spec, spec.norm)
        if not spec.tie_embeddings:
            self.unembed = Unembedding(spec.n_embd, spec.vocab_size, spec.param_dtype)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Logits (B, T, V) in float32 for the token after each position.

        Args:
            segment_ids: (B, T); attention stays inside equal ids. None: each row is one text, padded on the
                right if at all.
            positions: (B, T); None: 0, 1, 2, …
            deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
        """
        found = self.hidden(tokens_BT, segment_ids=segment_ids, positions=positions, deterministic=deterministic)
        return self._logits(found[0] if isinstance(found, tuple) else found)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> Any:
        """Hidden states (B, T, D) after the final norm, and auxiliary losses if there are any; arguments as above."""
        positions_BT = jnp.arange(tokens_BT.shape[1])[None] if positions is None else positions
        x_BTD, _, measured = self._trunk(tokens_BT, positions_BT, segment_ids, deterministic, None)
        if not self.losses:
            return x_BTD
        assert measured is not None
        return x_BTD, {name: (measured[name].mean(), weight) for name, weight in self.losses}

    def read(
        self, tokens_BT: jax.Array, cache: Cache, num_tokens_B: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Read more tokens of each row; returns their hidden states (B, T, D) and the new cache.

        Rows are independent: prompts of different lengths are padded on the right to one width T and
        `num_tokens_B` says how many of the T are real (None: all). Then one token a row at a time, T = 1. What
        padding leaves in the cache lies after the row's length: it is masked until it is overwritten.
        """
        counts_B = tokens_BT.shape[1] if num_tokens_B is None else num_tokens_B.astype(jnp.int32)
        positions_BT = cache.lengths[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        x_BTD, layers, _ = self._trunk(tokens_BT, positions_BT, None, True, cache[:-1], num_tokens_B)
        assert layers is not None
        return x_BTD, type(cache)(*layers, cache.lengths + counts_B)

    def decode(
        self, tokens_BT: jax.Array, cache: Cache, num_tokens_B: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """As `read`, but returns logits (B, V) for the token after each row's last."""
        x_BTD, new_cache = self.read(tokens_BT, cache, num_tokens_B)
        last_B = jnp.maximum(new_cache.lengths - cache.lengths - 1, 0)
        last_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        return self._logits(last_B1D)[:, 0], new_cache

    def _trunk(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        deterministic: bool,
        cache: LayerCache | None,
        num_tokens_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, Measured | None]:
        spec = self.spec
        x_BTD = self.embed(tokens_BT)
        if spec.embedding_scale != 1:
            x_BTD = x_BTD * spec.embedding_scale
        if spec.positions == "learned":
            x_BTD = x_BTD + self.positions(positions_BT)
        context = Context(positions_BT, segment_ids_BT, None, num_tokens=num_tokens_B)
        if spec.positions == "rotary":
            angles = rotary_angles(spec, positions_BT), window_angles(spec, positions_BT)
            context = Context(positions_BT, segment_ids_BT, *angles, num_tokens_B)
        x_BTD = logical(self.dropout(x_BTD, deterministic), axes.BATCH, axes.LENGTH, axes.ACTIVATION)
        x_BTD, (cache, measured) = self.layers(x_BTD, cache, context, deterministic, layer_kinds(spec))
        x_BTD = self.final_norm(x_BTD)
        return (x_BTD if spec.logit_divisor == 1 else x_BTD / spec.logit_divisor), cache, measured

    def _logits(self, hidden_BTD: jax.Array) -> jax.Array:
        B, T, D = hidden_BTD.shape
        matrix_DV = self.embed.embedding.T if self.spec.tie_embeddings else self.unembed.kernel
        logits_NV = jnp.dot(
            hidden_BTD.reshape(B * T, D), matrix_DV.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32
        )
        logits_NV = capped(logits_NV, self.spec.logit_softcap)
        return logical(logits_NV.reshape(B, T, -1), axes.BATCH, axes.LENGTH, axes.VOCAB)
