"""A model's config.json, read key by key; what this decoder cannot do is refused by its key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError, UserError

T = TypeVar("T", int, float, bool, str)

# Names of activations in config.json; several are the same function.
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact"}
GATED = {"silu": "silu_gated", "swish": "silu_gated", "gelu_new": "gelu_gated", "gelu_pytorch_tanh": "gelu_gated"}


class Options:
    """The values of a config.json.

    >>> Options({"n_layer": 2}, "gpt2/config.json").get("n_layer", int)
    2
    """

    def __init__(self, values: Mapping[str, Any], where: str | Path) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value of that type; null and a missing key mean the default."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: {key}: missing, expected {kind.__name__}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self.where}: {key}: got {value!r}, expected {kind.__name__}")
        return value

    def refuse(self, key: str, why: str) -> UserError:
        """The error for a key whose value this decoder cannot do."""
        return UserError(f"{self.where}: {key}: got {self.values.get(key)!r}, {why}")

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

    def rope(self, theta: str = "rope_theta", share: str | None = None, positions: int = 0) -> dict[str, Any]:
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
        found: dict[str, Any] = {"rope_base": inner.get("rope_theta", float, self.get(theta, float, 10_000.0))}
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

    def positions(self, key: str, block_size: int | None, window: int | None = None) -> int:
        """How many positions to use: all, or the block size that is asked for.

        Args:
            key: of the model's positions.
            block_size: tokens in a row, None for as many as there are.
            window: the sliding window that the key `sliding_window` replaces.
        """
        longest = self.get(key, int)
        if block_size is not None and block_size > longest:
            raise ConfigError(
                "architecture/block_size",
                block_size,
                f"at most {longest}, {key} of {self.where}",
                f"set it to {longest}",
            )
        asked = longest if block_size is None else block_size
        window = self.values.get("sliding_window", window)
        if window is not None and asked > window:
            raise self.refuse(
                "sliding_window",
                f"expected null: attention here sees the whole row; set architecture/block_size to at most {window}, "
                "where the window changes nothing",
            )
        return asked


def rope_values(spec: Any, theta: str = "rope_theta") -> dict[str, Any]:
    """The keys of config.json for a model's rotary positions; old and new versions of transformers read these."""
    found: dict[str, Any] = {theta: spec.rope_base}
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


def name_of(known: Mapping[str, str], ours: str) -> str | None:
    """The first name that config.json has for one of our activations."""
    return next((name for name, value in known.items() if value == ours), None)
