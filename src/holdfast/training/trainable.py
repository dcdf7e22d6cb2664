"""Which parameters of a model training changes: all, those that are not frozen, or adapters alone.

Nothing here imports JAX: what the options ask is checked against the names of the parameters before a device is
touched, and trees of parameters are plain nested dictionaries, of arrays, shapes or shardings alike.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast.models import names
from holdfast.models.config import ModelSpec
from holdfast.models.names import LORA_IN, LORA_OUT, LORA_SCALE
from holdfast.optim.config import LoraConfig

SHORT = {"o": "out"}  # what others call it

# Options that decide what is trained; a branch may change them, and starts with a fresh optimizer then.
OPTIONS = ("optimization/lora/", "optimization/freeze", "training/ema")


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on some projections (modules such as `layers/attention/q`)."""

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What the product of an adapter's two matrices is multiplied with."""
        return self.alpha / self.rank

    def shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Every array of the adapters and its shape: (L, in, r), (L, r, out), (L,)."""
        found: dict[str, tuple[int, ...]] = {}
        for module, (inputs, outputs, _) in names.projections(spec).items():
            if module in self.modules:
                found[f"{module}/{LORA_IN}"] = (spec.n_layers, inputs, self.rank)
                found[f"{module}/{LORA_OUT}"] = (spec.n_layers, self.rank, outputs)
                found[f"{module}/{LORA_SCALE}"] = (spec.n_layers,)
        return found


@dataclass(frozen=True)
class Trainable:
    """The part of the parameters that gradients, optimizer state and averages exist for.

    Args:
        rows: names of parameters that are trained; with the layers that are, where some are frozen.
        lora: the adapters, if it is they that are trained.
    """

    rows: tuple[tuple[str, tuple[int, ...] | None], ...]
    lora: Lora | None = None

    def part(self, params: Any) -> dict[str, Any]:
        """The trained part of a tree of arrays."""
        leaves = leaves_of(params)
        return tree_of({name: leaves[name] if rows is None else leaves[name][_index(rows)] for name, rows in self.rows})

    def whole(self, tree: Any) -> dict[str, Any]:
        """The leaves of a tree, such as shardings, of which at least a part is trained."""
        leaves = leaves_of(tree)
        return tree_of({name: leaves[name] for name, _ in self.rows})

    def completed(self, params: Any, part: Any) -> dict[str, Any]:
        """All parameters, with a trained part in the place of theirs."""
        leaves, new = leaves_of(params), leaves_of(part)
        for name, rows in self.rows:
            leaves[name] = new[name] if rows is None else leaves[name].at[_index(rows)].set(new[name])
        return tree_of(leaves)

    def num_trained(self, spec: ModelSpec) -> int:
        """How many numbers are trained."""
        shapes = all_shapes(spec, self.lora)
        counts = {name: math.prod(shapes[name]) for name, _ in self.rows}
        return sum(
            counts[name] if rows is None else counts[name] // spec.n_layers * len(rows) for name, rows in self.rows
        )


def trainable_for(freeze: list[str], lora: LoraConfig, spec: ModelSpec) -> Trainable | None:
    """What the options leave to be trained, None where that is everything; what cannot be meant is a ConfigError."""
    adapters = _adapters(lora, spec) if lora.rank else None
    if adapters is None and not freeze:
        return None
    shapes = all_shapes(spec, adapters)
    frozen: dict[str, set[int]] = {name: set() for name in shapes}
    for index, pattern in enumerate(freeze):
        _freeze(frozen, pattern, f"optimization/freeze/{index}", spec)
    candidates = [name for name in shapes if adapters is None or name.endswith((LORA_IN, LORA_OUT))]
    rows: list[tuple[str, tuple[int, ...] | None]] = []
    for name in candidates:
        kept = tuple(layer for layer in range(spec.n_layers) if layer not in frozen[name])
        if len(kept) == spec.n_layers or (kept and not name.startswith(names.LAYERS)):
            rows.append((name, None))
        elif kept:
            rows.append((name, kept))
    if not rows:
        raise ConfigError("optimization/freeze", freeze, "something left to train", "freeze less")
    return Trainable(tuple(rows), adapters)


def trainable_of(config: Mapping[str, Any], spec: ModelSpec) -> Trainable | None:
    """The same from the flat options of a checkpoint's manifest."""
    keys = ("rank", "alpha", "targets")
    given = {key: config[f"optimization/lora/{key}"] for key in keys if f"optimization/lora/{key}" in config}
    return trainable_for(list(config.get("optimization/freeze") or []), LoraConfig(**given), spec)


def _adapters(lora: LoraConfig, spec: ModelSpec) -> Lora:
    modules = list(names.projections(spec))
    if not lora.targets:
        return Lora(lora.rank, lora.alpha, tuple(modules))
    chosen: set[str] = set()
    for index, target in enumerate(lora.targets):
        plain = target.removesuffix("/kernel")
        found = {
            module
            for module in modules
            if module.rsplit("/", 1)[1] == SHORT.get(plain, plain) or names.matches(plain, module)
        }
        if not found:
            short = {long: name for name, long in SHORT.items()}
            known = [short.get(name, name) for name in (module.rsplit("/", 1)[1] for module in modules)]
            raise ConfigError(
                f"optimization/lora/targets/{index}",
                target,
                f"one of {', '.join(known)}, or a glob over {', '.join(modules)}",
                "an empty list is all of them",
            )
        chosen |= found
    return Lora(lora.rank, lora.alpha, tuple(module for module in modules if module in chosen))


def _freeze(frozen: dict[str, set[int]], pattern: str, path: str, spec: ModelSpec) -> None:
    """Add the layers of every parameter that a pattern stands for; outside the layers that is all or nothing."""
    glob, layers = names.split_range(pattern, spec.n_layers)
    if not layers or layers[-1] >= spec.n_layers:
        raise ConfigError(path, pattern, f"layers from 0 to {spec.n_layers - 1}, such as layers/0-{spec.n_layers - 1}")
    found = [name for name in frozen if names.matches(glob, name)]
    if not found:
        near = names.nearest(glob, frozen)
        raise ConfigError(path, pattern, "a pattern that matches a parameter", f"the nearest name is {near}")
    for name in found:
        frozen[name] |= set(layers)


def all_shapes(spec: ModelSpec, lora: Lora | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, adapters too."""
    return {**names.parameter_shapes(spec), **(lora.shapes(spec) if lora else {})}


def leaves_of(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by slash path."""
    return dict(_walk(tree, prefix))


def _walk(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def tree_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from leaves by slash path.

    >>> tree_of({"a/b": 1, "a/c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


def _index(rows: tuple[int, ...]) -> Any:
    """Layers as an index: a slice where they are neighbours, which costs no gather."""
    if all(b - a == 1 for a, b in itertools.pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return np.asarray(rows)
