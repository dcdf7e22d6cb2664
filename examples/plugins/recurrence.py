"""A whole architecture of one's own in one file: layers of a gated linear recurrence instead of attention.

    PYTHONPATH=examples/plugins holdfast --plugin recurrence run CONFIG architecture.family=recurrence

Each channel of a layer remembers h_t = a_t · h_{t−1} + (1 − a_t) · v_t, where the gate a_t and the value v_t follow
from the token alone, so that all steps of a row are computed at once by an associative scan. At the first token of a
text a_t is 0: nothing passes from one text of a packed row to the next.

Shapes: B rows, T time, D width, R width of the memory.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from holdfast.config import field
from holdfast.models import Dense, Embedding, ModelFamily, Norm, axes, logical
from holdfast.registry import families


@dataclass(frozen=True)
class RecurrenceConfig:
    """The options; each stands below `architecture/` and the family's name."""

    n_layers: int = field("architecture/recurrence/n_layers", default=2, ge=1, help="layers")
    n_embd: int = field("architecture/recurrence/n_embd", default=64, ge=1, help="width of the residual stream")
    n_memory: int = field("architecture/recurrence/n_memory", default=128, ge=1, help="channels that remember")
    n_ff: int = field("architecture/recurrence/n_ff", default=256, ge=1, help="width of the feed-forward layers")


def recurrence(decay_BTR: jax.Array, input_BTR: jax.Array) -> jax.Array:
    """h_t = decay_t · h_{t−1} + input_t for all t, h before the first being 0."""

    def after(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    _, memory_BTR = jax.lax.associative_scan(after, (decay_BTR, input_BTR), axis=1)
    return memory_BTR


class Layer(nn.Module):
    """Memory, then a feed-forward part, each on a normed copy of the residual stream."""

    config: RecurrenceConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, begins_BT: jax.Array) -> jax.Array:
        config = self.config
        inward, outward = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)  # how the mesh splits the kernels
        normed = Norm(name="memory_norm")(x_BTD)
        gate = nn.sigmoid(Dense(config.n_memory, inward, use_bias=True, name="gate")(normed) + 2.0)
        value = Dense(config.n_memory, inward, name="value")(normed)
        decay = jnp.where(begins_BT[..., None], 0.0, gate)
        memory = recurrence(decay, (1 - gate) * value) * nn.silu(Dense(config.n_memory, inward, name="shown")(normed))
        x_BTD = x_BTD + Dense(config.n_embd, outward, name="out")(memory)
        hidden = nn.gelu(Dense(config.n_ff, inward, name="up")(Norm(name="mlp_norm")(x_BTD)))
        x_BTD = x_BTD + Dense(config.n_embd, outward, name="down")(hidden)
        return logical(x_BTD, axes.BATCH, axes.LENGTH, axes.ACTIVATION)


class Recurrence(nn.Module):
    """The model: `hidden` is what training and evaluation use, `__call__` what makes the parameters."""

    config: RecurrenceConfig
    vocab_size: int

    def setup(self) -> None:
        self.embed = Embedding(self.vocab_size, self.config.n_embd, axes.VOCAB)
        self.layers = [Layer(self.config) for _ in range(self.config.n_layers)]
        self.final_norm = Norm()

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.hidden(tokens_BT)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Hidden states (B, T, D); there are no positions and no dropout, and memories end where a segment does."""
        segments_BT = jnp.zeros_like(tokens_BT) if segment_ids is None else segment_ids
        begins_BT = segments_BT != jnp.pad(segments_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, begins_BT)
        return self.final_norm(x_BTD)


@families.register("recurrence", config=RecurrenceConfig, help="gated linear recurrence, no attention")
class RecurrenceFamily(ModelFamily[RecurrenceConfig]):
    """How the rest of Holdfast builds and uses it."""

    option_of_axis = {axes.EMBED: "architecture/recurrence/n_embd", axes.VOCAB: "architecture/vocab_size"}
    free = frozenset({"block_size"})  # no parameter depends on it

    def build(self, options: RecurrenceConfig, vocab_size: int, block_size: int) -> Recurrence:
        """The module."""
        return Recurrence(options, vocab_size)

    def unembedding(self, options: RecurrenceConfig, params: Any) -> jax.Array:
        """Tied to the embedding."""
        matrix_DV: jax.Array = params["embed"]["embedding"].T
        return matrix_DV

    def tied(self, options: RecurrenceConfig) -> bool:
        """It is: the loss then makes no transposed copy."""
        return True
