"""A folder that other programs load: config.json, safetensors, tokenizer, generation config, model card."""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import sync, write_atomically, write_json
from holdfast.models.config import ModelSpec
from holdfast.models.pretrained.families import Family, family_for
from holdfast.models.pretrained.source import CONFIG, INDEX, SINGLE
from holdfast.models.pretrained.tokenizers import save_tokenizer
from holdfast.models.pretrained.weights import LAYERS, Array, Weight

MAX_FILE_BYTES = 5_000_000_000


@dataclass
class Stored:
    """A tensor to write and the parameters that stand in it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[str, int | None, Weight]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_pretrained(
    params: Any,
    spec: ModelSpec,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
    card: str | None = None,
    extra: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Family:
    """Write a model as `transformers` reads it; the folder appears whole or not at all.

    Args:
        params: as the decoder has them.
        family: its name in config.json; None takes the first that can express the specification.
        card: text of README.md.
        extra: further keys of config.json.
        max_file_bytes: size from which weights go into several files.
    """
    chosen = family_for(spec, family)
    leaves: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    config = {
        "architectures": [chosen.architecture],
        "model_type": chosen.model_type,
        "torch_dtype": str(np.dtype(leaves["embed/embedding"].dtype)),
        **chosen.config(spec),
        **(extra or {}),
    }
    tokens = {}
    if tokenizer is not None:
        tokens = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id, "pad_token_id": tokenizer.pad_id}
    with new_folder(folder) as temporary:
        write_json(temporary / CONFIG, {**tokens, **config})
        write_json(temporary / "generation_config.json", tokens)
        if card is not None:
            write_atomically(temporary / "README.md", card)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, spec.block_size)
        write_weights(leaves, chosen.weights(spec), temporary, max_file_bytes)
    return chosen


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the wanted one, renamed to it when the block ends well."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors makes files that others cannot read
                sync(file)
        temporary.chmod(0o755)
        temporary.replace(folder)  # an empty folder gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(folder: Path) -> None:
    """Refuse a place that holds something."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder}: there is something already; name a new folder")


def write_weights(leaves: Mapping[str, Any], table: Mapping[str, Weight], folder: Path, max_file_bytes: int) -> None:
    """Write parameters as safetensors, one file in memory at a time."""
    from safetensors.numpy import save_file

    groups = _groups(_tensors(leaves, table), max_file_bytes)
    names = [SINGLE] if len(groups) == 1 else []
    names = names or [f"model-{at:05d}-of-{len(groups):05d}.safetensors" for at in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        save_file({key: _build(leaves, stored) for key, stored in group.items()}, folder / name, {"format": "pt"})
    if len(groups) > 1:
        total = sum(stored.num_bytes for group in groups for stored in group.values())
        places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        write_atomically(
            folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        )


def _tensors(leaves: Mapping[str, Any], table: Mapping[str, Weight]) -> dict[str, Stored]:
    """The tensors of the files, by name."""
    found: dict[str, Stored] = {}
    for path, leaf in leaves.items():
        weight, stacked = table[path], path.startswith(LAYERS)
        shape = weight.stored_shape(tuple(leaf.shape[1:] if stacked else leaf.shape))
        for layer in range(leaf.shape[0]) if stacked else (None,):
            name = weight.name if layer is None else weight.name.format(layer)
            found.setdefault(name, Stored(shape, np.dtype(leaf.dtype))).parts.append((path, layer, weight))
    return found


def _groups(tensors: Mapping[str, Stored], max_file_bytes: int) -> list[dict[str, Stored]]:
    """The tensors of each file."""
    groups: list[dict[str, Stored]] = [{}]
    room = max_file_bytes
    for name, stored in tensors.items():
        if stored.num_bytes > room and groups[-1]:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = stored
        room -= stored.num_bytes
    return groups


def _build(leaves: Mapping[str, Any], stored: Stored) -> Array:
    tensor: Array = np.empty(stored.shape, stored.dtype)
    for path, layer, weight in stored.parts:
        weight.write(tensor, np.asarray(leaves[path] if layer is None else leaves[path][layer]))
    return tensor
