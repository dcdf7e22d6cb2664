"""The two languages of a stored model: keys of its config.json, and places of our parameters in its tensors.

`Options` reads a config.json key by key; what this decoder cannot do is refused by its key. A family has a table from
our parameter paths (`layers/attention/q/kernel`) to a `Weight` each. The same entry reads and writes, any part of it,
so that a device's shard takes only its own rows and columns from the file.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError, UserError, shortened
from holdfast.models.config import FULL, WINDOWED, ModelSpec
from holdfast.types import Json, JsonView

T = TypeVar("T", int, float, bool, str)

# Names of activations in config.json; several are the same function.
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact"}
GATED = {"silu": "silu_gated", "swish": "silu_gated", "gelu_new": "gelu_gated", "gelu_pytorch_tanh": "gelu_gated"}


class Options:
    """The values of a config.json.

    >>> Options({"n_layer": 2}, "gpt2/config.json").get("n_layer", int)
    2
    """

    def __init__(self, values: JsonView, where: str | Path) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value of that type; null and a missing key mean the default."""
        value: Any = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: {key}: missing, expected {kind.__name__}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e300 else math.inf
        expected = kind.__name__
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if fits and kind is int:
            expected, fits = f"a number from 1 to {2**31 - 1}", 1 <= value < 2**31
        elif fits and kind is float:
            expected, fits = "a finite number", math.isfinite(value)
        if not fits:
            raise UserError(f"{self.where}: {key}: got {shortened(value)}, expected {expected}")
        found: T = value
        return found

    def refuse(self, key: str, why: str) -> UserError:
        """The error for a key whose value this decoder cannot do."""
        return UserError(f"{self.where}: {key}: got {shortened(self.values.get(key))}, {why}")

    def expect(self, key: str, wanted: Any) -> None:
        """Refuse any other value than the one that this decoder does; a missing key is that value."""
        if self.values.get(key, wanted) not in (wanted, None):
            raise self.refuse(key, f"expected {wanted!r}: this decoder has nothing else")

    def activation(self, key: str, known: Mapping[str, str], default: str) -> str:
        """Our name of an activation."""
        name = self.get(key, str, default)
        if name not in known:
            raise self.refuse(key, f"expected one of {', '.join(known)}")
        return known[name]

    def rope(self, theta: str = "rope_theta", share: str | None = None, positions: int = 0) -> Json:
        """Our `rope_…` values.

        Args:
            theta, share: keys of the base and of the rotated share in older files; newer ones have
                `rope_parameters` with all of them.
            positions: the model's positions, for a scaling that does not say what it was trained on.
        """
        key = "rope_parameters" if self.values.get("rope_parameters") else "rope_scaling"
        nested = self.values.get(key) or {}
        if not isinstance(nested, dict) or any(isinstance(value, dict) for value in nested.values()):
            raise self.refuse(key, "expected one mapping for all layers")
        inner = Options(nested, f"{self.where}: {key}")
        found: Json = {"rope_base": inner.get("rope_theta", float, self.get(theta, float, 10_000.0))}
        if share is not None:
            found["rope_pct"] = inner.get("partial_rotary_factor", float, self.get(share, float, 0.25))
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "linear":
            return {**found, "rope_scaling": "linear", "rope_factor": inner.get("factor", float)}
        if kind == "llama3":
            return {
                **found,
                "rope_scaling": "llama3",
                "rope_factor": inner.get("factor", float),
                "rope_low": inner.get("low_freq_factor", float),
                "rope_high": inner.get("high_freq_factor", float),
                "rope_original": inner.get("original_max_position_embeddings", int, positions),
            }
        if kind != "default":
            raise self.refuse(key, "expected rope_type default, linear or llama3: no other scaling is known here")
        return found

    def positions(self, key: str, block_size: int | None) -> int:
        """How many positions to use: all, or the block size that is asked for.

        Args:
            key: of the model's positions.
            block_size: tokens in a row, None for as many as there are.
        """
        longest = self.get(key, int)
        if block_size is not None and block_size > longest:
            raise ConfigError(
                "architecture/block_size",
                block_size,
                f"at most {longest}, {key} of {self.where}",
                f"set it to {longest}",
            )
        return longest if block_size is None else block_size

    def limit(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """A positive number of that type, or None where the key is null: no limit."""
        if self.values.get(key, default) is None:
            return None
        value = self.get(key, kind, default)
        if isinstance(value, int | float) and value <= 0:
            raise self.refuse(key, "expected a positive number or null")
        return value

    def layers(self, key: str, letters: Mapping[Any, str], default: str) -> str:
        """A list with one value for each layer, as letters; the default where the key is missing."""
        found = self.values.get(key)
        if found is None:
            return default
        num_layers = self.get("num_hidden_layers", int)
        if not isinstance(found, list) or len(found) != num_layers or any(value not in letters for value in found):
            raise self.refuse(key, f"expected {num_layers} values, each one of {', '.join(map(repr, letters))}")
        return "".join(letters[value] for value in found)


def rope_values(spec: ModelSpec, theta: str = "rope_theta") -> Json:
    """The keys of config.json for a model's rotary positions; old and new versions of transformers read these."""
    found: Json = {theta: spec.rope_base}
    if spec.rope_scaling == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": spec.rope_factor}
    if spec.rope_scaling == "llama3":
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope_factor,
            "low_freq_factor": spec.rope_low,
            "high_freq_factor": spec.rope_high,
            "original_max_position_embeddings": spec.rope_original,
        }
    return found


WINDOWS = {"sliding_attention": WINDOWED, "full_attention": FULL}


def window_values(spec: ModelSpec) -> Json:
    """The keys of config.json for a model's sliding window and the layers that have it.

    A window of the whole row, which changes nothing, is written where the layers still differ otherwise.
    """
    names = {letter: name for name, letter in WINDOWS.items()}
    return {
        "sliding_window": spec.window or spec.block_size,
        "layer_types": [names[letter] for letter in spec.letters(spec.window_layers)],
    }


def name_of(known: Mapping[str, str], ours: str) -> str | None:
    """The first name that config.json has for one of our activations."""
    return next((name for name, value in known.items() if value == ours), None)


Array = NDArray[Any]


class Tensors(Protocol):
    """Named tensors on disk, read in parts."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor and its shape."""

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A part of a tensor."""


@dataclass(frozen=True)
class Weight:
    """One of our parameters in a stored tensor.

    Args:
        name: of the tensor; `{}` stands for the layer, a second one for the expert: our stacked axes.
        transposed: a matrix is stored (out, in), ours are (in, out).
        places: for each of our outputs its place on the tensor's output axis; None where they are the same.
        num_places: length of the tensor's output axis, where it holds more than this parameter.
        may_be_longer: the first axis may be longer than ours, the rest is left out (learned positions).
    """

    name: str
    transposed: bool = False
    places: NDArray[np.int64] | None = None
    num_places: int | None = None
    may_be_longer: bool = False

    @property
    def num_stacked(self) -> int:
        """How many of our first axes stand in the tensor's name."""
        return self.name.count("{}")

    def places_of(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Every index of the stacked axes of a parameter of that shape, and the name of its tensor."""
        for index in np.ndindex(*shape[: self.num_stacked]):
            yield index, self.name.format(*index)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape where ours (without stacked axes) is `shape`."""
        if self.num_places is not None:
            shape = (*shape[:-1], self.num_places)
        return shape[::-1] if self.transposed else shape

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape holds a parameter of ours."""
        expected = self.stored_shape(shape)
        if self.may_be_longer and len(stored) == len(expected):
            return stored[0] >= expected[0] and stored[1:] == expected[1:]
        return stored == expected

    def read(self, tensors: Tensors, at: tuple[int, ...], index: tuple[slice, ...]) -> Array:
        """A part of our parameter at a place of its stacked axes; `index` has a start and a stop for every other."""
        chosen = None
        if self.places is not None:
            chosen = self.places[index[-1]]
            low, high = int(chosen.min()), int(chosen.max()) + 1
            index = (*index[:-1], slice(low, high))
            # Neighbours in order are a plain range already.
            chosen = None if np.array_equal(chosen, np.arange(low, high)) else chosen - low
        part = tensors.read(self.name.format(*at), index[::-1] if self.transposed else index)
        part = part.T if self.transposed else part
        return part if chosen is None else part[..., chosen]

    def write(self, stored: Array, ours: Array) -> None:
        """Put our parameter where it stands in a tensor."""
        target = stored.T if self.transposed else stored
        if self.places is None:
            target[...] = ours
        else:
            target[..., self.places] = ours


def thirds(part: int, heads: int, size: int) -> NDArray[np.int64]:
    """Places of q (0), k (1) or v (2) where each head's three parts of that size stand side by side.

    >>> thirds(1, heads=2, size=2).tolist()
    [2, 3, 8, 9]
    """
    blocks = np.arange(heads * 3 * size).reshape(heads, 3, size)
    return blocks[:, part].reshape(-1)


def neighbours(*sizes: int) -> list[tuple[NDArray[np.int64], int]]:
    """Places of parts that stand behind each other in one tensor, and how many places it has.

    >>> [(places.tolist(), total) for places, total in neighbours(2, 1)]
    [([0, 1], 3), ([2], 3)]
    """
    ends = np.cumsum(sizes)
    return [(np.arange(end - size, end), int(ends[-1])) for size, end in zip(sizes, ends, strict=True)]


def halves(heads: int, head_dim: int, rotated: int) -> NDArray[np.int64]:
    """Places of each head's channels in the order of halves, for heads whose rotated pairs are neighbours.

    >>> halves(heads=1, head_dim=6, rotated=4).tolist()
    [0, 2, 1, 3, 4, 5]
    """
    one = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, head_dim)])
    places: NDArray[np.int64] = (np.arange(heads)[:, None] * head_dim + one).reshape(-1)
    return places
