"""What a decoder looks like: the options under `architecture/`, and the specification they resolve to.

`ArchitectureConfig` is what a user writes, where almost everything may be left to a preset. `resolve` checks it
and fills it in; the `ModelSpec` it returns has every number and is all that a `Decoder` needs to know.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.conversion import check_path
from holdfast.errors import ConfigError
from holdfast.types import Json, JsonView

ACTIVATIONS = ("gelu", "gelu_exact", "silu_gated", "gelu_gated")
NORMS = ("layer", "rms")
NORM_PLACES = ("before", "after", "both")
NORM_WIDTHS = ("head", "all")
POSITIONS = ("learned", "rotary")
WINDOWED, FULL = "w", "f"  # letters of `window_layers`
ROTATED, UNROTATED = "r", "n"  # letters of `rope_layers`
DTYPES = ("float32", "bfloat16")
KEEP_ALL, FULL_REMAT, DOTS, SAVE_ATTENTION = "none", "full", "dots", "save_attention"  # values of `remat`
REMAT = (KEEP_ALL, FULL_REMAT, DOTS, SAVE_ATTENTION, True, False)
DEFAULT_PRESET = "tiny"
MOST_LAYERS, MOST_PARAMETERS = 10_000, 10**14
LAYERS = "layers/"  # what the names of all parameters of the layers begin with


@dataclass(frozen=True)
class ArchitectureConfig:
    """The model: a preset, and the values that replace the preset's."""

    preset: str = field(
        "architecture/preset", default=DEFAULT_PRESET, help="named set of values; `holdfast jobs` lists them"
    )
    family: Optional[str] = field(
        "architecture/family",
        default=None,
        help="kind of model; null: the trainer's own (decoder), whose options these are",
    )
    source: Optional[str] = field(
        "architecture/from",
        default=None,
        help="pretrained model to start from: folder with config.json and safetensors, llama2.c file, hub name",
    )
    n_layers: Optional[int] = field(
        "architecture/n_layers", default=None, ge=1, le=MOST_LAYERS, help="layers; null here and below: from the preset"
    )
    n_embd: Optional[int] = field(
        "architecture/n_embd", default=None, ge=1, le=2**20, help="width of the residual stream"
    )
    n_head: Optional[int] = field("architecture/n_head", default=None, ge=1, le=2**16, help="attention heads")
    n_kv_head: Optional[int] = field(
        "architecture/n_kv_head", default=None, ge=1, le=2**16, help="key/value heads, fewer than n_head when grouped"
    )
    head_dim: Optional[int] = field("architecture/head_dim", default=None, ge=1, le=2**16, help="width of one head")
    n_ff: Optional[int] = field(
        "architecture/n_ff", default=None, ge=1, le=2**22, help="width inside the feed-forward layer"
    )
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
    rope_base: Optional[float] = field(
        "architecture/rope_base", default=None, gt=1, le=1e15, help="base of rotary positions"
    )
    rope_pct: Optional[float] = field(
        "architecture/rope_pct", default=None, gt=0, le=1, help="share of each head that is rotated"
    )
    rope_interleaved: Optional[bool] = field(
        "architecture/rope_interleaved", default=None, help="rotate neighbouring pairs instead of halves"
    )
    rope_layers: Optional[str] = field(
        "architecture/rope_layers",
        default=None,
        help="which layers rotate, repeated over all of them: r rotates, n does not (rrrn: every fourth does not)",
    )
    window: Optional[int] = field(
        "architecture/window", default=None, ge=1, le=2**31, help="tokens that a sliding window sees, itself among them"
    )
    window_layers: Optional[str] = field(
        "architecture/window_layers",
        default=None,
        help="which layers have the window, repeated over all of them: w has it, f sees the full row (wf: in turns)",
    )
    window_rope_base: Optional[float] = field(
        "architecture/window_rope_base",
        default=None,
        gt=1,
        le=1e15,
        help="base of rotary positions in layers with a window",
    )
    bias: Optional[bool] = field("architecture/bias", default=None, help="biases on projections and layer norms")
    qkv_bias: Optional[bool] = field(
        "architecture/qkv_bias", default=None, help="biases on query, key and value alone (follows bias)"
    )
    qk_norm: Optional[bool] = field("architecture/qk_norm", default=None, help="RMS norm of each query and key head")
    qk_norm_over: Optional[str] = field(
        "architecture/qk_norm_over", default=None, choices=NORM_WIDTHS, help="qk_norm over each head, or over all heads"
    )
    norm_place: Optional[str] = field(
        "architecture/norm_place",
        default=None,
        choices=NORM_PLACES,
        help="norms before attention and feed-forward, after them, or both",
    )
    norm_offset: Optional[bool] = field(
        "architecture/norm_offset", default=None, help="a norm's scale is 1 more than its parameter, as in Gemma"
    )
    attention_scale: Optional[float] = field(
        "architecture/attention_scale",
        default=None,
        gt=0,
        le=1e6,
        help="factor of attention scores; null: 1 / sqrt(head_dim)",
    )
    attention_softcap: Optional[float] = field(
        "architecture/attention_softcap", default=None, gt=0, le=1e6, help="bound c of attention scores: c tanh(s / c)"
    )
    logit_softcap: Optional[float] = field(
        "architecture/logit_softcap", default=None, gt=0, le=1e6, help="bound c of logits: c tanh(l / c)"
    )
    embedding_scale: Optional[float] = field(
        "architecture/embedding_scale",
        default=None,
        gt=0,
        le=1e6,
        help="factor of embeddings as they enter the first layer",
    )
    residual_scale: Optional[float] = field(
        "architecture/residual_scale",
        default=None,
        gt=0,
        le=1e6,
        help="factor of what each part adds to the residual stream",
    )
    logit_divisor: Optional[float] = field(
        "architecture/logit_divisor",
        default=None,
        gt=0,
        le=1e6,
        help="what the states before the logits are divided by",
    )
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
    remat: Optional[bool | str] = field(
        "architecture/remat",
        resume="free",
        default=None,
        choices=REMAT,
        help="what the backward pass computes again to save memory: none (false) of a layer, full (true): all of it, "
        "dots: all but matrix products, save_attention: all but attention",
    )
    scan_layers: Optional[bool] = field(
        "architecture/scan_layers",
        default=None,
        help="compile one layer and loop over it (from 13 layers on); same parameters either way",
    )
    vocab_size: Optional[int] = field(
        "architecture/vocab_size", default=None, ge=2, le=2**24, help="rows of the embedding; null: the tokenizer's"
    )

    def __post_init__(self) -> None:
        check_path(self.source, "architecture/from", "a folder, a file or a hub name")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder in full: hashable, so that it can be a static argument; made by `resolve`."""

    family: ClassVar[str] = "decoder"  # of models that it specifies

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
    remat: bool | str = False
    scan_layers: bool = False
    # Only pretrained models have these: how their rotary positions were stretched.
    rope_scaling: str = "none"  # none, linear or llama3
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192
    # Later additions, off unless a model has them: a manifest names them only where they are on (`LATER`).
    rope_layers: str = ROTATED
    window: int | None = None
    window_layers: str = WINDOWED
    window_rope_base: float | None = None
    qk_norm_over: str = "head"
    norm_place: str = "before"
    norm_offset: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies its activation with a second projection."""
        return self.activation.endswith("_gated")

    @property
    def remat_policy(self) -> str:
        """What of a layer the backward pass computes again, by name.

        >>> ModelSpec(1, 2, 1, 1, 2, 8, vocab_size=10, block_size=3, remat=True).remat_policy
        'full'
        """
        return self.remat if isinstance(self.remat, str) else FULL_REMAT if self.remat else KEEP_ALL

    @property
    def rotary_dim(self) -> int:
        """How many channels of each head are rotated."""
        return int(self.head_dim * self.rope_pct)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of one layer."""
        before, after = ("attention_norm", "mlp_norm"), ("attention_post_norm", "mlp_post_norm")
        return {"before": before, "after": after, "both": before + after}[self.norm_place]

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Over how many channels queries and keys are normed."""
        one = self.head_dim
        return (one, one) if self.qk_norm_over == "head" else (one * self.n_head, one * self.n_kv_head)

    def letters(self, pattern: str) -> str:
        """A pattern such as `window_layers`, one letter for each layer."""
        return (pattern * self.n_layers)[: self.n_layers]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many tokens each layer sees, None: all."""
        return tuple(self.window if letter == WINDOWED else None for letter in self.letters(self.window_layers))

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
        norms = len(self.norms) * self._norm_size() + (sum(self.qk_norm_widths) if self.qk_norm else 0)
        return self._attention_matmul() + self.mlp_parameters() + biases + norms

    def mlp_parameters(self) -> int:
        """How many numbers the matrices of one feed-forward part have."""
        return self.n_embd * self.n_ff * (3 if self.gated else 2)

    def mlp_active(self) -> int:
        """How many of these each token is multiplied with."""
        return self.mlp_parameters()

    def active_parameters(self) -> int:
        """How many of the model's numbers each token meets; all, but in a mixture of experts."""
        return self.num_parameters() - self.n_layers * (self.mlp_parameters() - self.mlp_active())

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
        layer = self._attention_matmul() + self.mlp_active()
        dense = 2.0 * (self.n_layers * layer + self.n_embd * self.vocab_size)
        attention = sum(4.0 * self.n_head * self.head_dim * visible_keys(length, window) for window in self.windows)
        return (dense + attention) * (3 if backward else 1)

    def seen_keys(self) -> float:
        """How many keys a token of a whole row sees, in the mean over its positions and the layers that attend.

        >>> ModelSpec(2, 2, 1, 1, 2, 8, vocab_size=10, block_size=4, window=2, window_layers="wf").seen_keys()
        2.125
        """
        return self._seen_in(self.windows)

    def _seen_in(self, windows: Sequence[int | None]) -> float:
        return sum(visible_keys(self.block_size, window) for window in windows) / len(windows)

    def _attention_matmul(self) -> int:
        return self.n_embd * self.head_dim * (2 * self.n_head + 2 * self.n_kv_head)


_NUM_FIRST = [item.name for item in dataclasses.fields(ModelSpec)].index("rope_original") + 1
# Options that manifests leave out where they are off, so that a plain decoder is described as it ever was.
LATER: Json = {item.name: item.default for item in dataclasses.fields(ModelSpec)[_NUM_FIRST:]}


def told(spec: ModelSpec) -> Json:
    """A specification as manifests hold it."""
    found = dataclasses.asdict(spec)
    return {name: value for name, value in found.items() if name not in LATER or value != LATER[name]}


def visible_keys(length: int, window: int | None) -> float:
    """How many keys a token of a row sees in the mean, causally and inside the window.

    >>> visible_keys(4, None), visible_keys(4, 2), visible_keys(4, 9)
    (2.5, 1.75, 2.5)
    """
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of a decoder and its shape, stacked layers first axis first.

    >>> shapes = parameter_shapes(ModelSpec(2, 8, 2, 2, 4, 32, vocab_size=16, block_size=4))
    >>> shapes["layers/attention/q/kernel"], shapes["embed/embedding"]
    ((2, 8, 8), (16, 8))
    """
    width = spec.n_embd
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (spec.vocab_size, width)}
    if spec.positions == "learned":
        shapes["positions/embedding"] = (spec.block_size, width)
    for module, (inputs, outputs, bias) in projections(spec).items():
        shapes[f"{module}/kernel"] = (spec.n_layers, inputs, outputs)
        if bias:
            shapes[f"{module}/bias"] = (spec.n_layers, outputs)
    if spec.qk_norm:
        for name, channels in zip(("q_norm", "k_norm"), spec.qk_norm_widths, strict=True):
            shapes[f"layers/attention/{name}/scale"] = (spec.n_layers, channels)
    biased_norms = spec.norm == "layer" and spec.bias
    parts = ("scale", "bias")[: 2 if biased_norms else 1]
    for norm in spec.norms:
        shapes |= {f"{LAYERS}{norm}/{name}": (spec.n_layers, width) for name in parts}
    shapes |= {f"final_norm/{name}": (width,) for name in parts}
    if not spec.tie_embeddings:
        shapes["unembed/kernel"] = (width, spec.vocab_size)
    return shapes


def projections(spec: ModelSpec) -> dict[str, tuple[int, int, bool]]:
    """The linear maps inside the layers by module: inputs, outputs, whether it has a bias."""
    queries, keys = spec.n_head * spec.head_dim, spec.n_kv_head * spec.head_dim
    found = {
        "layers/attention/q": (spec.n_embd, queries, spec.qkv_bias),
        "layers/attention/k": (spec.n_embd, keys, spec.qkv_bias),
        "layers/attention/v": (spec.n_embd, keys, spec.qkv_bias),
        "layers/attention/out": (queries, spec.n_embd, spec.bias),
        "layers/mlp/up": (spec.n_embd, spec.n_ff, spec.bias),
    }
    if spec.gated:
        found["layers/mlp/gate"] = (spec.n_embd, spec.n_ff, spec.bias)
    return {**found, "layers/mlp/down": (spec.n_ff, spec.n_embd, spec.bias)}


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
        from holdfast.models.pretrained.source import adapt  # it needs this module

        return adapt(architecture, block_size=block_size, vocab_size=vocab_size)
    preset = preset_values(architecture)[1]
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
    values["vocab_size"] = vocabulary(values.get("vocab_size"), vocab_size)
    spec = ModelSpec(**_fill(values), block_size=block_size)
    _check_heads(spec)
    _check_rotary(spec)
    check_size(spec)
    _check_letters("window_layers", spec.window_layers, WINDOWED + FULL)
    _check_letters("rope_layers", spec.rope_layers, ROTATED + UNROTATED)
    return with_window(spec)


def preset_values(architecture: ArchitectureConfig) -> tuple[str | None, Json, Json]:
    """A preset in its parts: the family that it names, if any, options of the decoder, and the family's own."""
    preset: JsonView = registry.models.get(architecture.preset, path="architecture/preset")
    family = preset.get("family")
    own = {name.removeprefix(f"{family}/"): value for name, value in preset.items() if name.startswith(f"{family}/")}
    rest = {name: value for name, value in preset.items() if name != "family" and not name.startswith(f"{family}/")}
    return family, rest, own


def own_values(name: str, architecture: ArchitectureConfig, options: Any) -> Json:
    """The options of a family of its own, below `architecture/NAME/`: the preset's, and what was set instead."""
    family, _, own = preset_values(architecture)
    known = [item.name for item in dataclasses.fields(options)]
    if unknown := sorted(set(own) - set(known)):
        raise ConfigError(
            "architecture/preset",
            architecture.preset,
            f"a preset with keys of `architecture/{name}/` alone below {name}/, not {', '.join(unknown)}",
            "correct the plug-in that registers it",
        )
    given = {item: getattr(options, item) for item in known if getattr(options, item) is not None}
    return {**(own if family == name else {}), **given}


def with_window(spec: ModelSpec) -> ModelSpec:
    """The same model in the shortest words: a window that no row is longer than changes nothing.

    >>> with_window(ModelSpec(2, 8, 2, 2, 4, 32, vocab_size=16, block_size=4, window=4, window_layers="wfwf")).window
    """
    windows = spec.letters(spec.window_layers)
    window = spec.window if spec.window is not None and spec.window < spec.block_size and WINDOWED in windows else None
    base = spec.window_rope_base if spec.window_rope_base != spec.rope_base and WINDOWED in windows else None
    told = window is not None or base is not None
    return dataclasses.replace(
        spec,
        window=window,
        window_rope_base=base,
        window_layers=shortest(windows) if told else WINDOWED,
        rope_layers=shortest(spec.letters(spec.rope_layers)),
    )


def shortest(letters: str) -> str:
    """The shortest pattern whose repetition begins with these letters.

    >>> shortest("wwfwwf"), shortest("wfwfw"), shortest("wwww"), shortest("fww")
    ('wwf', 'wf', 'w', 'fww')
    """
    sizes = range(1, len(letters) + 1)
    return next(letters[:size] for size in sizes if (letters[:size] * len(letters))[: len(letters)] == letters)


def check_size(spec: ModelSpec) -> None:
    """Refuse a model that no machine holds, before its shapes overflow anything."""
    if spec.num_parameters() > MOST_PARAMETERS:
        raise ConfigError(
            "architecture/n_embd",
            spec.n_embd,
            f"a model of at most {MOST_PARAMETERS:.0e} parameters, and this one has {spec.num_parameters():.1e}",
            "lower n_layers, n_embd, n_ff, n_head x head_dim or vocab_size",
        )


def options_of(architecture: ArchitectureConfig) -> Json:
    """The options that describe the model itself, None where the user left them open."""
    names = [item.name for item in dataclasses.fields(architecture) if item.name not in ("preset", "family", "source")]
    return {name: getattr(architecture, name) for name in names}


def vocabulary(asked: int | None, tokenizer: int) -> int:
    """The size of a model's vocabulary: as asked (`architecture/vocab_size`), or the tokenizer's."""
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


def _fill(values: Json) -> Json:
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


def _check_letters(name: str, pattern: str, known: str) -> None:
    if not pattern or set(pattern) - set(known):
        raise ConfigError(
            f"architecture/{name}", pattern, f"letters {known[0]} and {known[1]}", f"one for each layer, as {known}"
        )
