"""The family `hybrid`: the decoder in which most layers have a state space in the place of attention; without JAX here.

The options of the decoder (`architecture/n_layers`, …) mean what they mean there. Which layers attend is a pattern, and
the others are those of `recurrent.py`: linear in the length of a row, and of constant size in generation.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.models import axes
from holdfast.models.config import ArchitectureConfig, ModelSpec, own_values, resolve, told, visible_keys
from holdfast.models.family import Model, TransformerFamily, check_family, decoder
from holdfast.types import Json

HYBRID = "hybrid"
ATTENTION, STATE = "a", "s"  # letters of `layers`


@dataclass(frozen=True)
class HybridConfig:
    """What a hybrid has beyond the decoder's options."""

    layers: Optional[str] = field(
        "architecture/hybrid/layers",
        default=None,
        help="which layers attend, repeated over all: a attends, s has a state; null: sssa, every fourth attends",
    )
    n_state: Optional[int] = field(
        "architecture/hybrid/n_state",
        default=None,
        ge=1,
        le=2**16,
        help="numbers that a state holds for each channel; null: half of head_dim, the size of an attention layer",
    )
    chunk: Optional[int] = field(
        "architecture/hybrid/chunk",
        default=None,
        ge=1,
        le=2**16,
        help="tokens that training computes at once, between two states; null: 64",
    )

    def __post_init__(self) -> None:
        if self.layers is not None:
            check_layers(self.layers)


def check_layers(layers: str) -> None:
    """Refuse a pattern of other letters."""
    if not layers or set(layers) - {ATTENTION, STATE}:
        raise ConfigError("architecture/hybrid/layers", layers, "letters a and s", "one for each layer, such as sssa")


@dataclass(frozen=True)
class HybridSpec(ModelSpec):
    """A hybrid in full."""

    family: ClassVar[str] = HYBRID

    layers: str = STATE * 3 + ATTENTION
    n_state: int = 16
    chunk: int = 64

    @property
    def attends(self) -> tuple[bool, ...]:
        """Of each layer whether it attends."""
        return tuple(letter == ATTENTION for letter in self.letters(self.layers))

    def seen_keys(self) -> float:
        """As for a decoder, in the layers that attend; 0 where none does."""
        windows = [window for attends, window in zip(self.attends, self.windows, strict=True) if attends]
        return self._seen_in(windows) if windows else 0.0

    def num_parameters(self) -> int:
        """How many numbers the model has; a tied embedding counts once."""
        heads, width = self.n_head * (2 * self.n_state + 2 * self.head_dim), self.n_head * self.head_dim
        state = self.n_embd * (heads + width + self.n_head) + self.n_head + self.head_dim
        attention = self.n_embd * (2 * width + 2 * self.n_kv_head * self.head_dim)
        if self.qkv_bias:
            state, attention = state + heads, attention + self.head_dim * (self.n_head + 2 * self.n_kv_head)
        if self.qk_norm:
            attention += sum(self.qk_norm_widths)
        return super().num_parameters() + (self.n_layers - sum(self.attends)) * (state - attention)

    def flops_per_token(self, sequence_length: int | None = None, *, backward: bool = True) -> float:
        """As for a decoder, with the products of a state where a layer has one."""
        length = self.block_size if sequence_length is None else sequence_length
        # A token meets half of its chunk, its state, and what it adds to that.
        seen, size = (min(self.chunk, length) + 1) / 2, self.n_state * self.head_dim
        state = 2.0 * self.n_head * (seen * (self.n_state + self.head_dim) + 2 * size)
        state += 2.0 * self.n_embd * self.n_head * (2 * self.n_state + 3 * self.head_dim + 1)
        attention = 4.0 * self.n_embd * self.head_dim * (self.n_head + self.n_kv_head)
        whole = super().flops_per_token(length, backward=False)
        for attends, window in zip(self.attends, self.windows, strict=True):
            if not attends:
                whole += state - attention - 4.0 * self.n_head * self.head_dim * visible_keys(length, window)
        return whole * (3 if backward else 1)


@registry.families.register(HYBRID, config=HybridConfig, help="decoder with attention in some layers, states in others")
class HybridFamily(TransformerFamily[HybridSpec]):
    """The decoder with the layers of `recurrent.py` among its own."""

    specification = HybridSpec
    option_of_axis = {
        axes.EMBED: "architecture/n_embd",
        axes.HEADS: "architecture/n_head",
        axes.KV_HEADS: "architecture/n_kv_head",
        axes.MLP: "architecture/n_ff",
        axes.VOCAB: "architecture/vocab_size",
    }

    def resolve(
        self, name: str, architecture: ArchitectureConfig, options: Any, *, block_size: int, vocab_size: int
    ) -> Model:
        """The decoder that the options of the decoder ask for, with states in some layers."""
        base = resolve(architecture, block_size=block_size, vocab_size=vocab_size)
        check_family(name, architecture, base)
        own = own_values(name, architecture, options)
        own.setdefault("n_state", max(1, base.head_dim // 2))
        spec = HybridSpec(**{**dataclasses.asdict(base), **own})
        check_layers(spec.layers)
        if architecture.scan_layers:
            raise ConfigError("architecture/scan_layers", True, "false: the layers of a hybrid differ", "leave it null")
        return decoder(dataclasses.replace(spec, scan_layers=False))

    def build(self, options: HybridSpec, vocab_size: int, block_size: int) -> Any:
        """A `Decoder` with other layers."""
        from holdfast.models.decoder import Decoder
        from holdfast.models.recurrent import MixedLayers

        return Decoder(options, MixedLayers)

    def sums_rows(self, options: HybridSpec) -> bool:
        """Without dropout."""
        return not self.stochastic(options)

    def init_cache(self, model: Model, num_rows: int, length: int) -> Any:
        """Keys and values, or a state, of each layer."""
        from holdfast.models.recurrent import init_cache

        return init_cache(model.options, num_rows, length)

    def check_mesh(self, model: Model, mesh_sizes: Mapping[str, int]) -> None:
        """As for a decoder: heads of states are split as those of attention are."""
        axes.check_divisible(model.options, mesh_sizes)
        super().check_mesh(model, mesh_sizes)

    def described(self, model: Model) -> Json:
        """The specification."""
        return {"family": HYBRID, **told(model.options)}

    def harmless(self, described: Mapping[str, Any]) -> frozenset[str]:
        """As for a decoder, and how many tokens are computed at once."""
        return super().harmless(described) | {"chunk"}
