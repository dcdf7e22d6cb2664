"""Where a pretrained model is: a folder of the hub's kind, a hub name, or llama2.c's files; nothing here imports JAX.

Weights only ever come from safetensors or raw arrays. Files that hold pickled objects are refused, since reading
one can run any code.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError, UserError
from holdfast.models.config import (
    DEFAULT_PRESET,
    MOST_LAYERS,
    MOST_PARAMETERS,
    ArchitectureConfig,
    ModelSpec,
    options_of,
)
from holdfast.models.pretrained import llama2c
from holdfast.models.pretrained.families import FAMILIES, FREE, HEADS, Family, family_of
from holdfast.models.pretrained.formats import Array, Options, Tensors, Weight
from holdfast.types import JsonView

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TYPES = ("F64", "F32", "F16", "BF16")
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "tokenizer.model")


@dataclass(frozen=True)
class Model:
    """A pretrained model on disk.

    Args:
        folder: the folder it is in.
        family, options: what its config.json says.
        tensors: opens its weights.
        weights: our parameters in them.
    """

    folder: Path
    family: Family
    options: Options
    tensors: Callable[[], Tensors]
    weights: Callable[[ModelSpec], dict[str, Weight]]

    def spec(self, block_size: int | None = None) -> ModelSpec:
        """Its specification, for rows of that many tokens or for as many as it has positions."""
        try:
            spec = self.family.spec(self.options, block_size)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            # Values that fit their types and yet not each other.
            raise UserError(f"{self.options.where}: not a model that can be built: {error}") from None
        if problem := _problem(spec):
            raise UserError(f"{self.options.where}: not a model that can be built: {problem}")
        return spec


def _problem(spec: ModelSpec) -> str | None:
    """What of a stored model's numbers cannot be, though each of them is a number."""
    if spec.head_dim < 1 or spec.n_head % spec.n_kv_head:
        return f"{spec.n_head} heads of {spec.head_dim} channels do not share {spec.n_kv_head} key/value heads"
    if spec.n_layers > MOST_LAYERS:
        return f"{spec.n_layers} layers, at most {MOST_LAYERS} are read"
    if spec.num_parameters() > MOST_PARAMETERS:
        return f"{spec.num_parameters():.1e} parameters are more than any machine holds"
    if not 0 <= spec.norm_eps < 1:
        return f"{spec.norm_eps:g} is no epsilon of a norm"
    if spec.positions == "rotary":
        if not 0 < spec.rope_pct <= 1 or spec.rotary_dim < 2 or spec.rotary_dim % 2:
            return f"{spec.rotary_dim} of {spec.head_dim} channels cannot be rotated in pairs"
        if not (
            0 < spec.rope_base <= 1e15 and 0 < spec.rope_factor <= 1e9 and 0 < spec.rope_low < spec.rope_high <= 1e9
        ):
            return "a base or factor of its rotary positions is out of range"
    return None


def load_spec(source: str | Path, block_size: int | None = None) -> ModelSpec:
    """The specification of a pretrained model.

    Args:
        source: a folder, a llama2.c file, or a hub name.
        block_size: tokens in a row; None for all the positions that the model has.
    """
    return open_model(source).spec(block_size)


def family_at(source: str | Path) -> str:
    """The family of models, of `registry.families`, that a pretrained model belongs to."""
    return open_model(source).spec().family


def adapt(architecture: ArchitectureConfig, *, block_size: int, vocab_size: int) -> ModelSpec:
    """The specification of the model that `architecture/from` names, for rows of that many tokens.

    Args:
        vocab_size: of the tokenizer; the model's may be larger.
    """
    source = architecture.source
    assert source is not None, "there is nothing to adapt to"
    if architecture.preset != DEFAULT_PRESET:
        raise ConfigError(
            "architecture/preset",
            architecture.preset,
            f"the default, since architecture/from = {source} brings its own options",
            "remove one of the two",
        )
    if block_size < 1:
        raise ConfigError("architecture/block_size", block_size, "at least 1 token", "set it to 512")
    try:
        spec = load_spec(source, block_size)
    except ConfigError:
        raise
    except UserError as error:
        raise UserError(f"architecture/from: {error}") from None
    free = {}
    for name, value in options_of(architecture).items():
        if value is None:
            continue
        if name in FREE:
            free[name] = value
        elif value != getattr(spec, name):
            raise ConfigError(
                f"architecture/{name}",
                value,
                f"{getattr(spec, name)!r}, which {source} has",
                "leave it null, or remove architecture/from",
            )
    if vocab_size > spec.vocab_size:
        raise ConfigError(
            "tokenizer/name",
            vocab_size,
            f"a tokenizer of at most {spec.vocab_size} tokens, the vocabulary of {source}",
            "leave tokenizer/name at its default: the model's own tokenizer is used",
        )
    return dataclasses.replace(spec, **free)


def is_model(path: Path) -> bool:
    """Whether a path holds a pretrained model: a folder of the hub's kind, or llama2.c's file."""
    return (path / CONFIG).is_file() or (path.exists() and llama2c.find(path) is not None)


def open_model(source: str | Path, *, weights: bool = False) -> Model:
    """A pretrained model by its path or hub name.

    Args:
        weights: fetch a hub model's weights too, not only its configuration and tokenizer.
    """
    path = locate(source, weights=weights)
    if (path / CONFIG).is_file():
        return _open_folder(path)
    raw = llama2c.find(path)
    if raw is None:
        raise UserError(
            f"{path}: expected {CONFIG} and {SINGLE} (or {INDEX}), or llama2.c's model file{_pickled(path)}"
        )
    header = llama2c.read_header(raw)
    return Model(
        folder=raw.parent,
        family=FAMILIES["llama"],
        options=Options(header.config(), raw),
        tensors=lambda: llama2c.RawTensors(raw, header),
        weights=llama2c.weights,
    )


def _open_folder(folder: Path) -> Model:
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping, got {type(values).__name__}")
    family = family_of(values, path)
    options = Options(values, path)
    options.expect("quantization_config", None)
    return Model(folder, family, options, lambda: SafetensorsFolder(folder, family.prefix), family.weights)


def locate(source: str | Path, *, weights: bool = False) -> Path:
    """The path of a model, fetched from the hub where it is neither a path nor in the local cache."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    name = str(source)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name}: there is no such file or folder")
    from huggingface_hub import snapshot_download

    wanted = [*SMALL_FILES, "*.safetensors"] if weights else list(SMALL_FILES)
    try:
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
            complete = (folder / CONFIG).is_file() and (not weights or not _missing_files(folder))
        except Exception:  # not in the cache: the library has its own exception for each reason
            complete = False
        return folder if complete else Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # network, permission, unknown name
        raise UserError(
            f"{name}: there is no such path, and the hub's model of that name cannot be had "
            f"({type(error).__name__}); offline, fetch it first with `hf download {name}` or give a folder"
        ) from None


def _missing_files(folder: Path) -> list[str]:
    """Weight files that the folder should have and has not."""
    if (folder / INDEX).is_file():
        files = set(_index(folder).values())
        return sorted(file for file in files if not (folder / file).is_file())
    return [] if (folder / SINGLE).is_file() else [SINGLE]


def _index(folder: Path) -> Mapping[str, str]:
    try:
        found: Mapping[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / INDEX}: cannot be read: {error!r}") from None
    if not isinstance(found, dict) or not found or not all(_is_file_name(file) for file in found.values()):
        raise UserError(f"{folder / INDEX}: weight_map: expected a mapping of tensors to names of files beside it")
    return found


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 255 and Path(name).name == name and "\0" not in name


def _pickled(path: Path) -> str:
    """What to say where all there is are pickled weights."""
    files = [path] if path.is_file() else [file for pattern in PICKLES for file in sorted(path.glob(pattern))]
    if not files:
        return ""
    folder = path.parent if path.is_file() else path
    return (
        f"; {files[0].name} is refused, because unpickling a file can run any code in it: convert it where you "
        f'trust it and have torch, with `python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\"`, and import that folder"
    )


class SafetensorsFolder:
    """The tensors of a folder, in one file or in several.

    Every read opens its file anew: pages of a file that stays mapped count as this process's memory, and a whole
    model would be held twice.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._open = safe_open
        if missing := _missing_files(folder):
            raise UserError(f"{folder}: there is no {', '.join(missing)}{_pickled(folder)}")
        files = sorted(set(_index(folder).values())) if (folder / INDEX).is_file() else [SINGLE]
        self._places: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        wrong = []
        for file in files:
            try:
                with safe_open(folder / file, framework="numpy") as opened:
                    for name in opened.keys():  # noqa: SIM118  # not a mapping
                        part = opened.get_slice(name)
                        self._places[name] = (folder / file, name)
                        self.shapes[name] = tuple(part.get_shape())
                        if part.get_dtype() not in TYPES:
                            wrong.append(f"  {name}: {part.get_dtype()}, expected one of {', '.join(TYPES)}")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{folder / file}: not a whole safetensors file: {error}") from None
        if not any(name.startswith(prefix) for name in self.shapes):
            self._add_prefix(prefix)
        if wrong:
            raise UserError(f"{folder}: weights of types that cannot be trained:\n" + "\n".join(wrong))

    def _add_prefix(self, prefix: str) -> None:
        """Name the weights of a file that was written without the model's head, or by another program."""
        full = {name: name if name in HEADS else prefix + name for name in self.shapes}
        self._places = {full[name]: place for name, place in self._places.items()}
        self.shapes = {full[name]: shape for name, shape in self.shapes.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A part of a tensor."""
        file, stored = self._places[name]
        with self._open(file, framework="numpy") as opened:
            part: Array = opened.get_slice(stored)[index]
            return part


def config_values(model: Model) -> JsonView:
    """Everything in a model's config.json."""
    return model.options.values
