"""llama2.c's files: a header of seven numbers, then float32 tensors in a fixed order; versions 0 and 1.

The tensors are given Llama's names. Pairs of rotated channels are neighbours there and are read in the order of
halves, so that the model is a Llama like any other.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import UserError
from holdfast.models.config import ModelSpec
from holdfast.models.pretrained import llama
from holdfast.models.pretrained.formats import Array, Weight, halves
from holdfast.types import Json

MAGIC = 0x616B3432  # "ak42", of version 1 and later
SIZE = 4  # bytes of a float32


@dataclass(frozen=True)
class Header:
    """The numbers at the start of a file."""

    version: int
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    tied: bool

    def config(self) -> Json:
        """The same as a config.json of Llama."""
        return {
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file; an empty name is left out."""
        head_dim = self.dim // self.heads
        kv = self.kv_heads * head_dim
        vector: tuple[int, ...] = (self.dim,)
        embedding = ("model.embed_tokens.weight", (self.vocab, self.dim))
        norms = ("input_layernorm", vector), ("post_attention_layernorm", vector)
        attention = [
            ("self_attn.q_proj", (self.dim, self.dim)),
            ("self_attn.k_proj", (kv, self.dim)),
            ("self_attn.v_proj", (kv, self.dim)),
            ("self_attn.o_proj", (self.dim, self.dim)),
        ]
        mlp = [
            ("mlp.gate_proj", (self.hidden, self.dim)),
            ("mlp.down_proj", (self.dim, self.hidden)),
            ("mlp.up_proj", (self.hidden, self.dim)),
        ]
        final = ("model.norm.weight", vector)
        if self.version == 0:
            yield embedding
            yield from self._each([norms[0], *attention, norms[1], *mlp])
            yield final
            yield "", (self.positions * head_dim,)  # tables of cosines and sines
        else:
            yield from self._each(norms)
            yield final
            yield embedding
            yield from self._each([*attention, *mlp])
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.dim)

    def _each(self, parts: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in parts:
            for layer in range(self.layers):
                yield f"model.layers.{layer}.{name}.weight", shape

    @property
    def start(self) -> int:
        """Where the tensors begin."""
        return 28 if self.version == 0 else 256


def find(path: Path) -> Path | None:
    """The model file at a path: itself, or the one of a folder beside its tokenizer."""
    files = [path] if path.is_file() else sorted(path.glob("*.bin"))
    found = [file for file in files if not file.name.startswith("tok") and _header(file) is not None]
    if len(found) > 1:
        raise UserError(f"{path}: several models, {', '.join(file.name for file in found)}; name one of the files")
    return found[0] if found else None


def read_header(path: Path) -> Header:
    """The header of a file that `find` found."""
    header = _header(path)
    assert header is not None, f"{path} has no header of llama2.c"
    return header


def _header(path: Path) -> Header | None:
    """The header, None where the file's size is not what it would say."""
    with path.open("rb") as file:
        start = file.read(37)
    if len(start) < 37:
        return None
    version = 0
    numbers = struct.unpack("<7i", start[:28])
    tied = numbers[5] > 0
    if struct.unpack("<I", start[:4])[0] == MAGIC:
        version = struct.unpack("<i", start[4:8])[0]
        if version != 1:
            raise UserError(f"{path}: llama2.c's version {version} is quantised; export version 0 or 1 (float32)")
        numbers, tied = struct.unpack("<7i", start[8:36]), bool(start[36])
    if min(*numbers[:5], abs(numbers[5]), numbers[6]) < 1 or numbers[0] % numbers[3]:
        return None
    dim, hidden, layers, heads, kv_heads, vocab, positions = numbers
    header = Header(version, dim, hidden, layers, heads, kv_heads, abs(vocab), positions, tied)
    size = header.start + SIZE * sum(math.prod(shape) for _, shape in header.tensors())
    return header if path.stat().st_size == size else None


class RawTensors:
    """The tensors of a file by Llama's names."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[str, int] = {}
        offset = header.start
        for name, shape in header.tensors():
            if name:
                self.shapes[name], self._offsets[name] = shape, offset
            offset += SIZE * math.prod(shape)

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A part of a tensor."""
        mapped = np.memmap(self._path, "<f4", "r", self._offsets[name], self.shapes[name])
        return np.array(mapped[index])


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Our parameters in these tensors."""
    table = llama.weights(spec)
    for name, heads in (("q", spec.n_head), ("k", spec.n_kv_head)):
        path = f"layers/attention/{name}/kernel"
        table[path] = dataclasses.replace(table[path], places=halves(heads, spec.head_dim, spec.rotary_dim))
    return table
