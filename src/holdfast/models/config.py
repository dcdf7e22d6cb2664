"""What a decoder looks like: the options under `architecture/`, and the specification they resolve to.

`ArchitectureConfig` is what a user writes, where almost everything may be left to a preset. `resolve` checks it
and fills it in; the `ModelSpec` it returns has every number and is all that a `Decoder` needs to know.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_exact", "silu_gated", "gelu_gated")
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary")
DTYPES = ("float32", "bfloat16")
DEFAULT_PRESET = "tiny"


@dataclass(frozen=True)
class ArchitectureConfig:
    """The model: a preset, and the values that replace the preset's."""

    preset: str = field(
        "architecture/preset", default=DEFAULT_PRESET, help="named set of values; `holdfast jobs` lists them"
    )
    source: Optional[str] = field(
        "architecture/from",
        default=None,
        help="pretrained model to start from: folder with config.json and safetensors, llama2.c file, hub name",
    )
    n_layers: Optional[int] = field(
        "architecture/n_layers", default=None, ge=1, help="layers; null here and below: from the preset"
    )
    n_embd: Optional[int] = field("architecture/n_embd", default=None, ge=1, help="width of the residual stream")
    n_head: Optional[int] = field("architecture/n_head", default=None, ge=1, help="attention heads")
    n_kv_head: Optional[int] = field(
        "architecture/n_kv_head", default=None, ge=1, help="key/value heads, fewer than n_head when grouped"
    )
    head_dim: Optional[int] = field("architecture/head_dim", default=None, ge=1, help="width of one head")
    n_ff: Optional[int] = field("architecture/n_ff", default=None, ge=1, help="width inside the feed-forward layer")
    activation: Optional[str] = field(
        "architecture/activation", default=None, choices=ACTIVATIONS, help="feed-forward activation"
    )
    norm: Optional[str] = field("architecture/norm", default=None, choices=NORMS, help="layer norm or RMS norm")
    norm_eps: Optional[float] = field(
        "architecture/norm_eps", default=None, gt=0, lt=1, help="added to the variance in norms"
    )
    positions: Optional[str] = field(
        "architecture/positions", default=None, choices=POSITIONS, help="how positions enter the model"
    )
    rope_base: Optional[float] = field("architecture/rope_base", default=None, gt=1, help="base of rotary positions")
    rope_pct: Optional[float] = field(
        "architecture/rope_pct", default=None, gt=0, le=1, help="share of each head that is rotated"
    )
    rope_interleaved: Optional[bool] = field(
        "architecture/rope_interleaved", default=None, help="rotate neighbouring pairs instead of halves"
    )
    bias: Optional[bool] = field("architecture/bias", default=None, help="biases on projections and layer norms")
    qkv_bias: Optional[bool] = field(
        "architecture/qkv_bias", default=None, help="biases on query, key and value alone (follows bias)"
    )
    qk_norm: Optional[bool] = field("architecture/qk_norm", default=None, help="RMS norm of each query and key head")
    parallel_residual: Optional[bool] = field(
        "architecture/parallel_residual", default=None, help="attention and feed-forward side by side"
    )
    tie_embeddings: Optional[bool] = field(
        "architecture/tie_embeddings", default=None, help="input and output embeddings are one matrix"
    )
    dropout: Optional[float] = field(
        "architecture/dropout", default=None, ge=0, lt=1, help="dropout of embeddings and of residual branches"
    )
    param_dtype: Optional[str] = field(
        "architecture/param_dtype", default=None, choices=DTYPES, help="type of the parameters"
    )
    dtype: Optional[str] = field("architecture/dtype", default=None, choices=DTYPES, help="type of the activations")
    remat: Optional[bool] = field(
        "architecture/remat", default=None, help="recompute each layer in the backward pass to save memory"
    )
    scan_layers: Optional[bool] = field(
        "architecture/scan_layers",
        default=None,
        help="compile one layer and loop over it (from 13 layers on); same parameters either way",
    )
    vocab_size: Optional[int] = field(
        "architecture/vocab_size", default=None, ge=2, help="rows of the embedding; null: the tokenizer's"
    )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder in full: hashable, so that it can be a static argument; made by `resolve`."""

    n_layers: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_ff: int
    vocab_size: int
    block_size: int
    activation: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-5
    positions: str = "learned"
    rope_base: float = 10_000.0
    rope_pct: float = 1.0
    rope_interleaved: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    tie_embeddings: bool = True
    dropout: float = 0.0
    param_dtype: str = "float32"
    dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = False
    # Only pretrained models have these: how their rotary positions were stretched.
    rope_scaling: str = "none"  # none, linear or llama3
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies its activation with a second projection."""
        return self.activation.endswith("_gated")

    @property
    def rotary_dim(self) -> int:
        """How many channels of each head are rotated."""
        return int(self.head_dim * self.rope_pct)

    def num_parameters(self) -> int:
        """How many numbers the model has; a tied embedding counts once.

        >>> ModelSpec(12, 768, 12, 12, 64, 3072, vocab_size=50257, block_size=1024, bias=True, qkv_bias=True
        ... ).num_parameters()
        124439808
        """
        embeddings = self.vocab_size * self.n_embd * (1 if self.tie_embeddings else 2)
        learned = self.block_size * self.n_embd if self.positions == "learned" else 0
        return self.n_layers * self.layer_parameters() + embeddings + learned + self._norm_size()

    def layer_parameters(self) -> int:
        """How many numbers one layer has."""
        biases = 0
        if self.bias:
            biases += self.n_embd * 2 + self.n_ff * (2 if self.gated else 1)
        if self.qkv_bias:
            biases += self.head_dim * (self.n_head + 2 * self.n_kv_head)
        return self._layer_matmul() + biases + 2 * self._norm_size() + (2 * self.head_dim if self.qk_norm else 0)

    def _norm_size(self) -> int:
        return self.n_embd * (2 if self.norm == "layer" and self.bias else 1)

    def flops_per_token(self, sequence_length: int | None = None, *, backward: bool = True) -> float:
        """Floating point operations of matrix products for one token of a row, attention causal.

        Args:
            sequence_length: tokens that attend to each other; the block size unless given.
            backward: count the backward pass (twice the forward) too, as training does.

        >>> spec = ModelSpec(1, 2, 1, 1, 2, 8, vocab_size=10, block_size=3)
        >>> spec.flops_per_token(backward=False)  # 2 x (16 + 32 + 20 weights) + 4 x 2 channels x 2 keys
        152.0
        """
        length = self.block_size if sequence_length is None else sequence_length
        dense = 2.0 * (self.n_layers * self._layer_matmul() + self.n_embd * self.vocab_size)
        visible_keys = (length + 1) / 2
        attention = 4.0 * self.n_layers * self.n_head * self.head_dim * visible_keys
        return (dense + attention) * (3 if backward else 1)

    def _layer_matmul(self) -> int:
        attention = self.n_embd * self.head_dim * (2 * self.n_head + 2 * self.n_kv_head)
        return attention + self.n_embd * self.n_ff * (3 if self.gated else 2)


def resolve(architecture: ArchitectureConfig, *, block_size: int, vocab_size: int) -> ModelSpec:
    """The specification that a config asks for; what cannot work is a ConfigError that names its path.

    Args:
        architecture: the user's options.
        block_size: tokens in a row (the trainer's `architecture/block_size`).
        vocab_size: of the tokenizer; `architecture/vocab_size` may be larger, never smaller. For a pretrained
            model (`architecture/from`) exactly the tokenizer's, not rounded up.

    >>> resolve(ArchitectureConfig(n_layers=2), block_size=64, vocab_size=257).n_layers
    2
    """
    if architecture.source is not None:
        from holdfast.models.pretrained.adapt import adapt  # it needs this module

        return adapt(architecture, block_size=block_size, vocab_size=vocab_size)
    preset: Mapping[str, Any] = registry.models.get(architecture.preset, path="architecture/preset")
    asked = options_of(architecture)
    known = set(asked)
    if unknown := sorted(set(preset) - known):
        raise ConfigError(
            "architecture/preset",
            architecture.preset,
            f"a preset with keys of `architecture/` alone, not {', '.join(unknown)}",
            "correct the plug-in that registers it",
        )
    values = {**preset, **{name: value for name, value in asked.items() if value is not None}}
    if block_size < 1:
        raise ConfigError("architecture/block_size", block_size, "at least 1 token", "set it to 512")
    values["vocab_size"] = _vocabulary(values.get("vocab_size"), vocab_size)
    spec = ModelSpec(**_fill(values), block_size=block_size)
    _check_heads(spec)
    _check_rotary(spec)
    return spec


def options_of(architecture: ArchitectureConfig) -> dict[str, Any]:
    """The options that describe the model itself, None where the user left them open."""
    names = [item.name for item in dataclasses.fields(architecture) if item.name not in ("preset", "source")]
    return {name: getattr(architecture, name) for name in names}


def _vocabulary(asked: int | None, tokenizer: int) -> int:
    if asked is None:
        return tokenizer
    if asked < tokenizer:
        raise ConfigError(
            "architecture/vocab_size",
            asked,
            f"at least {tokenizer}, the size of the tokenizer's vocabulary",
            "leave it null to follow the tokenizer",
        )
    return asked


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    """Values that follow from others unless they were set."""
    for name in ("n_layers", "n_embd", "n_head"):
        if name not in values:
            raise ConfigError(f"architecture/{name}", None, "a whole number", "the preset does not set it: set it")
    n_embd, n_head = values["n_embd"], values["n_head"]
    if "head_dim" not in values:
        if n_embd % n_head:
            raise ConfigError(
                "architecture/n_head",
                n_head,
                f"a divisor of architecture/n_embd = {n_embd}",
                "change one of them, or set architecture/head_dim",
            )
        values["head_dim"] = n_embd // n_head
    values.setdefault("n_kv_head", n_head)
    if "n_ff" not in values:
        # A gated layer has three matrices, so two thirds of the usual width cost the same; 64 suits the hardware.
        gated = values.get("activation", "gelu").endswith("_gated")
        values["n_ff"] = -(-(8 * n_embd) // (3 * 64)) * 64 if gated else 4 * n_embd
    values.setdefault("qkv_bias", values.get("bias", False))
    # Unrolled layers run a fifth faster on a CPU and take less memory; deep models would compile for too long.
    values.setdefault("scan_layers", values["n_layers"] > 12)
    return values


def _check_heads(spec: ModelSpec) -> None:
    if spec.n_head % spec.n_kv_head:
        raise ConfigError(
            "architecture/n_kv_head",
            spec.n_kv_head,
            f"a divisor of architecture/n_head = {spec.n_head}",
            "each key/value head serves the same number of query heads",
        )


def _check_rotary(spec: ModelSpec) -> None:
    if spec.positions != "rotary":
        return
    if spec.rotary_dim < 2 or spec.rotary_dim % 2:
        raise ConfigError(
            "architecture/head_dim",
            spec.head_dim,
            f"an even number of rotated channels, and head_dim x rope_pct gives {spec.rotary_dim}",
            "change architecture/head_dim (or n_embd / n_head) or architecture/rope_pct",
        )
