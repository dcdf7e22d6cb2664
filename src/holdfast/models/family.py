"""The model seam: a `ModelFamily` says how its models are built and used, a `Model` is one choice of a model.

A family is registered by name. All that a trainer, an evaluation or a command knows of a model is `Model`: hidden
states, the matrix that makes logits of them, caches, names of parameters and counts. Nothing here imports JAX before
an array is needed; the family `decoder` also knows its names, shapes and counts without it, while those of other
families come from `jax.eval_shape` of their module.

Shapes: B rows, T time, D width, V vocabulary.
"""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from holdfast import registry
from holdfast.errors import ConfigError
from holdfast.models import axes
from holdfast.models.config import (
    DEFAULT_PRESET,
    DOTS,
    KEEP_ALL,
    LAYERS,
    SAVE_ATTENTION,
    ArchitectureConfig,
    ModelSpec,
    options_of,
    parameter_shapes,
    preset_values,
    projections,
    resolve,
    told,
    vocabulary,
)
from holdfast.types import Json, JsonView, Tree

if TYPE_CHECKING:
    import jax

O = TypeVar("O")  # noqa: E741  # a family's options
S = TypeVar("S", bound=ModelSpec)  # the specification of a transformer

DECODER = "decoder"
SHARED_OPTIONS = ("family", "vocab_size", "block_size")  # directly below `architecture/` for all families

Losses = dict[str, tuple[Any, float]]  # auxiliary losses by name: a scalar, and its weight in the loss


class Parameter(NamedTuple):
    """One parameter: its shape, and how many layers its first axis stacks (0: it is of no layer or of one alone)."""

    shape: tuple[int, ...]
    num_layers: int = 0


class Projection(NamedTuple):
    """The kernel of a `Dense` module, (*stack, inputs, outputs)."""

    inputs: int
    outputs: int
    stack: tuple[int, ...] = ()


class ModelFamily(ABC, Generic[O]):
    """A kind of model: how its module is built, and what the rest of the program needs to know about it.

    A family of your own needs `build` and `unembedding`. Its module takes tokens (B, T) in `__call__` (which `init`
    runs) and has a method

        hidden(tokens_BT, *, segment_ids=None, positions=None, deterministic=True)

    that gives states (B, T, D), or a pair of them and a dictionary of auxiliary losses: name -> (scalar, weight). It
    must be causal, and must not look across the borders of `segment_ids` (B, T) where they are given. Parameters
    carry the logical axes of `holdfast.models.axes`; adapters (LoRA) apply wherever `holdfast.models.Dense` is used.

    The options are a frozen dataclass of `field`s below `architecture/NAME/`, registered with the family, and
    hashable: a model is a static argument of compiled steps.
    """

    #: The option behind a logical axis, for errors about the mesh: {"embed": "architecture/NAME/width"}.
    option_of_axis: Mapping[str, str] = {}
    #: Options that may differ between a checkpoint and the run that takes its weights; `block_size` among them where
    #: no parameter depends on it.
    free: frozenset[str] = frozenset()
    #: Whether its module takes weights in any floating type, and in the host's memory, and brings each to the device
    #: where it uses it, as `holdfast.models.layers.parameter` does. Otherwise a reference is brought there in all.
    brings_weights: bool = False

    # What a family must have

    @abstractmethod
    def build(self, options: O, vocab_size: int, block_size: int) -> Any:
        """The Flax module of a model."""

    @abstractmethod
    def unembedding(self, options: O, params: Tree) -> "jax.Array":
        """The (D, V) matrix that turns hidden states into logits, from the (unboxed) parameters."""

    # What it may have

    def softcap(self, options: O) -> float | None:
        """The bound c of logits c · tanh(l / c); None: logits are not bounded."""
        return None

    def tied(self, options: O) -> bool:
        """Whether the unembedding is a transposed embedding, of which the loss then makes no transposed copy."""
        return False

    def stochastic(self, options: O) -> bool:
        """Whether a training step draws random numbers (`make_rng("dropout")`)."""
        return True

    def sums_rows(self, options: O) -> bool:
        """Whether the loss of a training step is a sum of its rows' own, so that parts of a batch can be summed apart.

        Not so with auxiliary losses of a whole batch, and with random numbers that depend on how it is cut.
        """
        return False

    def init_cache(self, model: "Model", num_rows: int, length: int) -> Any:
        """An empty cache for that many rows and tokens. By default it holds the tokens, and reading recomputes."""
        from holdfast.models import derived

        return derived.init_cache(num_rows, length)

    def read(
        self, model: "Model", params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None"
    ) -> "tuple[jax.Array, Any]":
        """Read more tokens of each row: their hidden states (B, T, D), and the new cache.

        Args:
            num_tokens_B: how many of the T are real, the rest is padding on the right; None: all.
        """
        from holdfast.models import derived

        return derived.read(model, params, tokens_BT, cache, num_tokens_B)

    def decode(
        self, model: "Model", params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None"
    ) -> "tuple[jax.Array, Any]":
        """As `read`, but gives logits (B, V) for the token after each row's last."""
        from holdfast.models import derived

        return derived.decode(model, params, tokens_BT, cache, num_tokens_B)

    def flops_per_token(self, model: "Model", sequence_length: int) -> float:
        """Floating point operations of the matrix products of a forward pass, for one token."""
        from holdfast.models import derived

        return derived.flops_per_token(model)

    def seen_keys(self, model: "Model") -> float | None:
        """Keys that a token of a whole row sees, in the mean; None means all before it, as without windows."""
        return None

    # What follows, unless a family knows it without JAX

    def resolve(
        self, name: str, architecture: ArchitectureConfig, options: Any, *, block_size: int, vocab_size: int
    ) -> "Model":
        """The choice of model that options ask for; what cannot be meant is a ConfigError that names its path."""
        _check_alone(name, architecture)
        if block_size < 1:
            raise ConfigError("architecture/block_size", block_size, "at least 1 token", "set it to 512")
        return Model(name, options, vocabulary(architecture.vocab_size, vocab_size), block_size)

    def described(self, model: "Model") -> Json:
        """The model as checkpoints' manifests hold it."""
        own = dataclasses.asdict(model.options) if model.options is not None else {}
        return {"family": model.family, **own, "vocab_size": model.vocab_size, "block_size": model.block_size}

    def harmless(self, described: JsonView) -> frozenset[str]:
        """Entries of `described` that may differ between a checkpoint and the run that takes its weights."""
        return self.free

    def parameters(self, model: "Model") -> dict[str, Parameter]:
        """Every parameter by slash path."""
        from holdfast.models import derived

        return derived.parameters(model)

    def projections(self, model: "Model") -> dict[str, Projection]:
        """The `Dense` modules by slash path: what adapters may stand beside."""
        from holdfast.models import derived

        return derived.projections(model)

    def check_mesh(self, model: "Model", mesh_sizes: Mapping[str, int]) -> None:
        """Raise a ConfigError if the mesh cannot split the model evenly, saying which number to change."""
        from holdfast.models import derived

        derived.check_divisible(model, self.option_of_axis, mesh_sizes)

    def states(self, model: "Model") -> tuple[int, str]:
        """Width and type of the hidden states."""
        from holdfast.models import derived

        return derived.states(model)

    def activation_bytes(self, model: "Model") -> int:
        """Bytes for each token that a forward pass keeps for the backward pass."""
        from holdfast.models import derived

        return derived.activation_bytes(model)

    def working_memory(self, model: "Model", rows: int, tensor: int) -> dict[str, int]:
        """Bytes on one device beside state, gradients and logits, in a step with that many rows.

        Args:
            tensor: over how many devices the axis `tensor` of the mesh splits the model.
        """
        width = 4 if model.dtype == "float32" else 2
        return {
            "activations": rows * model.block_size * self.activation_bytes(model) // tensor,
            "scores": 0,
            "gathered": model.num_parameters() // tensor * width,
        }

    def rematerialises(self, options: O) -> bool:
        """Whether the backward pass computes the forward pass again."""
        return False

    def attention(self, model: "Model", platform: str, *, packed: bool, described: bool = False) -> str | None:
        """Which attention the model gets on a platform, in words; None where the family does not tell.

        Args:
            described: the devices are not here, so that what is installed beside them is not known.
        """
        return None

    def tensor_sums(self, model: "Model") -> int:
        """How many sums of activations over the axis `tensor` of the mesh a forward pass needs."""
        from holdfast.models import derived

        return derived.tensor_sums(model)


@dataclass(frozen=True)
class Model:
    """The choice of a model: hashable, so that it can be a static argument, and made without JAX.

    Args:
        family: name of the registered family.
        options: the family's own, resolved: for `decoder` a `ModelSpec`.
        vocab_size: rows of the unembedding.
        block_size: tokens in a row.
    """

    family: str
    options: Any
    vocab_size: int
    block_size: int

    @property
    def kind(self) -> ModelFamily[Any]:
        """The family itself."""
        found: ModelFamily[Any] = registry.families.get(self.family, path="architecture/family")()
        return found

    @property
    def module(self) -> Any:
        """The Flax module."""
        return _module(self)

    def hidden(
        self,
        params: Tree,
        tokens_BT: "jax.Array",
        *,
        segment_ids: "jax.Array | None" = None,
        positions: "jax.Array | None" = None,
        key: "jax.Array | None" = None,
    ) -> "tuple[jax.Array, Losses]":
        """Hidden states (B, T, D) and auxiliary losses; with a key as in training, under dropout."""
        dropout = key is not None and self.kind.stochastic(self.options)
        found = self.module.apply(
            {"params": params},
            tokens_BT,
            segment_ids=segment_ids,
            positions=positions,
            deterministic=not dropout,
            method="hidden",
            rngs={"dropout": key} if dropout else None,
        )
        return found if isinstance(found, tuple) else (found, {})

    def unembedding(self, params: Tree) -> "jax.Array":
        """The (D, V) matrix that turns hidden states into logits, whole along the width as each use needs it."""
        from holdfast.models.layers import gathered

        return gathered(self.kind.unembedding(self.options, params), axes.EMBED, axes.VOCAB)

    def stored_unembedding(self, params: Tree) -> "jax.Array":
        """The same matrix in the shards that it is stored in: for `token_loss`, which places it by itself."""
        return self.kind.unembedding(self.options, params)

    @property
    def softcap(self) -> float | None:
        """The bound of the logits, if they have one."""
        return self.kind.softcap(self.options)

    @property
    def tied(self) -> bool:
        """Whether the unembedding is a transposed embedding."""
        return self.kind.tied(self.options)

    def init_cache(self, num_rows: int, length: int | None = None) -> Any:
        """An empty cache for that many rows and tokens (the block size unless given)."""
        return self.kind.init_cache(self, num_rows, length or self.block_size)

    def read(
        self, params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None" = None
    ) -> "tuple[jax.Array, Any]":
        """Read more tokens of each row: their hidden states (B, T, D), and the new cache."""
        return self.kind.read(self, params, tokens_BT, cache, num_tokens_B)

    def decode(
        self, params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None" = None
    ) -> "tuple[jax.Array, Any]":
        """As `read`, but gives logits (B, V) for the token after each row's last."""
        return self.kind.decode(self, params, tokens_BT, cache, num_tokens_B)

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by slash path."""
        return self.kind.parameters(self)

    def projections(self) -> dict[str, Projection]:
        """The `Dense` modules by slash path: what adapters may stand beside."""
        return self.kind.projections(self)

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.kind.states(self)[0]

    @property
    def dtype(self) -> str:
        """Type of the hidden states."""
        return self.kind.states(self)[1]

    def num_parameters(self) -> int:
        """How many numbers the model has; a tied embedding counts once."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters().values())

    def flops_per_token(self, sequence_length: int | None = None, *, backward: bool = True) -> float:
        """Floating point operations of matrix products for one token of a row.

        Args:
            sequence_length: tokens that attend to each other; the block size unless given.
            backward: count the backward pass (twice the forward) too, as training does.
        """
        length = self.block_size if sequence_length is None else sequence_length
        return self.kind.flops_per_token(self, length) * (3 if backward else 1)

    def check_mesh(self, mesh_sizes: Mapping[str, int]) -> None:
        """Raise a ConfigError if the mesh cannot split the model evenly, saying which number to change."""
        self.kind.check_mesh(self, mesh_sizes)

    def described(self) -> Json:
        """The model as checkpoints' manifests hold it."""
        return self.kind.described(self)


@functools.lru_cache(maxsize=16)
def _module(model: Model) -> Any:
    """The module of a model, one for all who ask: what is compiled with it is found again."""
    return model.kind.build(model.options, model.vocab_size, model.block_size)


def resolve_model(
    name: str, architecture: ArchitectureConfig, options: Any, *, block_size: int, vocab_size: int
) -> Model:
    """The choice of model that a configuration asks for; what cannot be meant is a ConfigError that names its path.

    Args:
        name: of the family: `architecture/family`, or the trainer's `MODEL` where that is null.
        architecture: the options that all jobs have.
        options: the family's own, None where it has none.
        vocab_size: of the tokenizer.

    >>> resolve_model("decoder", ArchitectureConfig(n_layers=2), None, block_size=64, vocab_size=257).options.n_layers
    2
    """
    kind: ModelFamily[Any] = registry.families.get(name, path="architecture/family")()
    return kind.resolve(name, architecture, options, block_size=block_size, vocab_size=vocab_size)


def chosen_family(architecture: ArchitectureConfig, own: str) -> str:
    """The family that options ask for: by its name, by a pretrained model, by a preset, or else the trainer's own."""
    if architecture.family is not None:
        return architecture.family
    if architecture.source is None:
        return preset_values(architecture)[0] or own
    if own != DECODER:
        return own
    from holdfast.models.pretrained.source import family_at  # it needs this module

    return family_at(architecture.source)


def check_family(name: str, architecture: ArchitectureConfig, spec: ModelSpec) -> None:
    """Refuse a preset or a pretrained model of another family than the one that was named."""
    key, value, found = "from", architecture.source, spec.family
    if architecture.source is None:
        key, value, found = "preset", architecture.preset, preset_values(architecture)[0] or name
    if found != name:
        raise ConfigError(
            f"architecture/{key}",
            value,
            f"one of the family {name}, which architecture/family asks for, and it is of the family {found}",
            "leave architecture/family null to follow it",
        )


def decoder(spec: ModelSpec) -> Model:
    """A transformer as a choice of model: its specification says of which family."""
    return Model(spec.family, spec, spec.vocab_size, spec.block_size)


def described_spec(described: JsonView) -> ModelSpec | None:
    """The specification of a model as manifests hold it; None for a family that has none."""
    values = dict(described)
    kind = registry.families.get(values.pop("family", DECODER), path="architecture/family")()
    return kind.specification(**values) if isinstance(kind, TransformerFamily) else None


def option_path(family: str, name: str) -> str:
    """The config path behind an entry of a described model."""
    kind, config = registry.families.get(family, path="architecture/family")(), registry.families.config(family)
    own = name not in SHARED_OPTIONS
    if isinstance(kind, TransformerFamily):
        own = config is not None and name in {item.name for item in dataclasses.fields(config)}
    return f"architecture/{family}/{name}" if own else f"architecture/{name}"


def harmless_differences(described: JsonView) -> frozenset[str]:
    """Entries of a described model that may differ between a checkpoint and the run that takes its weights."""
    kind: ModelFamily[Any] = registry.families.get(described["family"], path="architecture/family")()
    return kind.harmless(described)


def _check_alone(name: str, architecture: ArchitectureConfig) -> None:
    """Refuse options of the decoder beside another family: they would have no effect."""
    given = {key: value for key, value in options_of(architecture).items() if value is not None and key != "vocab_size"}
    if architecture.preset != DEFAULT_PRESET:
        given = {"preset": architecture.preset, **given}
    if architecture.source is not None:
        given = {"from": architecture.source, **given}
    for key, value in given.items():
        raise ConfigError(
            f"architecture/{key}",
            value,
            f"nothing, since it is an option of the decoder and architecture/family is {name}",
            f"the options of {name} stand below architecture/{name}/",
        )


class TransformerFamily(ModelFamily[S]):
    """What families have in common whose specification is a `ModelSpec` and whose module is a `Decoder`."""

    specification: type[ModelSpec] = ModelSpec
    brings_weights = True

    def unembedding(self, options: S, params: Tree) -> "jax.Array":
        """The transposed embedding, or the matrix beside it."""
        from holdfast.models.layers import brought

        if options.tie_embeddings:
            return brought(params["embed"]["embedding"], axes.VOCAB, axes.EMBED, dtype=options.dtype).T
        return brought(params["unembed"]["kernel"], axes.EMBED, axes.VOCAB, dtype=options.dtype)

    def softcap(self, options: S) -> float | None:
        """As `architecture/logit_softcap` has it."""
        return options.logit_softcap

    def tied(self, options: S) -> bool:
        """As `architecture/tie_embeddings` has it."""
        return options.tie_embeddings

    def stochastic(self, options: S) -> bool:
        """Whether there is dropout."""
        return options.dropout > 0

    def init_cache(self, model: Model, num_rows: int, length: int) -> Any:
        """Keys and values of all layers."""
        from holdfast.models.decoder import init_cache

        return init_cache(model.options, num_rows, length)

    def read(
        self, model: Model, params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None"
    ) -> "tuple[jax.Array, Any]":
        """By attention to the cache."""
        states: tuple[jax.Array, Any] = model.module.apply(
            {"params": params}, tokens_BT, cache, num_tokens_B, method="read"
        )
        return states

    def decode(
        self, model: Model, params: Tree, tokens_BT: "jax.Array", cache: Any, num_tokens_B: "jax.Array | None"
    ) -> "tuple[jax.Array, Any]":
        """By attention to the cache."""
        logits: tuple[jax.Array, Any] = model.module.apply(
            {"params": params}, tokens_BT, cache, num_tokens_B, method="decode"
        )
        return logits

    def flops_per_token(self, model: Model, sequence_length: int) -> float:
        """As `ModelSpec.flops_per_token` counts them."""
        spec: ModelSpec = model.options
        return spec.flops_per_token(sequence_length, backward=False)

    def seen_keys(self, model: Model) -> float | None:
        """As its specification counts them."""
        spec: ModelSpec = model.options
        return spec.seen_keys()

    def harmless(self, described: JsonView) -> frozenset[str]:
        """What changes no parameter; the block size does where positions are learned."""
        always = frozenset({"remat", "scan_layers", "dtype", "dropout"})
        return always if described["positions"] == "learned" else always | {"block_size"}

    def states(self, model: Model) -> tuple[int, str]:
        """From the specification alone."""
        return model.options.n_embd, model.options.dtype

    def attention(self, model: Model, platform: str, *, packed: bool, described: bool = False) -> str | None:
        """A kernel of the table in `models/kernels.py`, or the plain formula."""
        from holdfast.models.attention import attention_taken

        return attention_taken(model.options, platform, packed=packed, described=described)

    def rematerialises(self, options: S) -> bool:
        """As `architecture/remat` has it."""
        return options.remat_policy != KEEP_ALL


def saved_numbers(spec: ModelSpec) -> int:
    """Numbers for each token that a layer which is computed again saves, beside its input.

    >>> spec = ModelSpec(1, 8, 2, 1, 4, 32, vocab_size=10, block_size=3, remat="save_attention")
    >>> saved_numbers(spec), saved_numbers(dataclasses.replace(spec, remat="full"))
    (8, 0)
    """
    products = sum(outputs for _, outputs, _ in projections(spec).values())
    return {DOTS: products, SAVE_ATTENTION: spec.n_head * spec.head_dim}.get(spec.remat_policy, 0)


@registry.families.register(DECODER, help="decoder-only transformer: GPT-2, Llama, Qwen, GPT-NeoX are settings of it")
class DecoderFamily(TransformerFamily[ModelSpec]):
    """The decoder of `decoder.py`; its options stand directly below `architecture/`."""

    def resolve(
        self, name: str, architecture: ArchitectureConfig, options: Any, *, block_size: int, vocab_size: int
    ) -> Model:
        """As `config.resolve` has it, also from a pretrained model."""
        spec = resolve(architecture, block_size=block_size, vocab_size=vocab_size)
        check_family(name, architecture, spec)
        return decoder(spec)

    def build(self, options: ModelSpec, vocab_size: int, block_size: int) -> Any:
        """A `Decoder`."""
        from holdfast.models.decoder import Decoder

        return Decoder(options)

    def sums_rows(self, options: ModelSpec) -> bool:
        """Without dropout."""
        return not self.stochastic(options)

    def described(self, model: Model) -> Json:
        """The specification, as manifests have held it since before there were families."""
        return told(model.options)

    def parameters(self, model: Model) -> dict[str, Parameter]:
        """From the specification alone."""
        spec: ModelSpec = model.options
        return {
            name: Parameter(shape, spec.n_layers if name.startswith(LAYERS) else 0)
            for name, shape in parameter_shapes(spec).items()
        }

    def projections(self, model: Model) -> dict[str, Projection]:
        """From the specification alone."""
        spec: ModelSpec = model.options
        return {
            module: Projection(inputs, outputs, (spec.n_layers,))
            for module, (inputs, outputs, _) in projections(spec).items()
        }

    def check_mesh(self, model: Model, mesh_sizes: Mapping[str, int]) -> None:
        """From the specification alone."""
        axes.check_divisible(model.options, mesh_sizes)

    def activation_bytes(self, model: Model) -> int:
        """Of the arrays that a layer keeps, roughly; where it is computed again, of what is saved and of one layer."""
        spec: ModelSpec = model.options
        layer = 10 * spec.n_embd + 3 * spec.n_ff
        if spec.remat_policy == KEEP_ALL:
            numbers = spec.n_layers * layer + 4 * spec.n_embd
        else:
            numbers = spec.n_layers * (spec.n_embd + saved_numbers(spec)) + layer + 4 * spec.n_embd
        return numbers * (4 if spec.dtype == "float32" else 2)

    def working_memory(self, model: Model, rows: int, tensor: int) -> dict[str, int]:
        """From the specification, for the layout that `models/axes.py` declares."""
        from holdfast.models.attention import kept_scores

        spec: ModelSpec = model.options
        width, tokens = 4 if spec.dtype == "float32" else 2, rows * spec.block_size
        inner = (6 * spec.n_embd + (3 if spec.gated else 2) * spec.n_ff + 2 * spec.n_head * spec.head_dim) // tensor
        layer = (2 * spec.n_embd + inner) * tokens * width
        kept = spec.n_layers * layer
        if spec.remat_policy != KEEP_ALL:
            kept = spec.n_layers * (spec.n_embd + saved_numbers(spec) // tensor) * tokens * width + layer
        unembedding = spec.n_embd * spec.vocab_size // tensor
        return {
            "activations": kept,
            "scores": kept_scores(spec, "gpu", rows) // tensor,  # a TPU's compiler is asked instead
            # Two layers, the one that is used and the one that comes; the unembedding, and its gradient in float32.
            "gathered": 2 * spec.layer_parameters() // tensor * width + unembedding * (width + 4),
        }

    def tensor_sums(self, model: Model) -> int:
        """After attention and after the feed-forward part of each layer."""
        return 2 * int(model.options.n_layers)
