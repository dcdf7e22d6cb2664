"""Parameters by name: patterns over their names, and which of them training changes: all, some, or adapters alone.

A name is a slash path: `embed/embedding`, `layers/attention/q/kernel`. Where a model stacks its layers (the first axis
of a parameter has the logical name `layers`), all of them stand in one array; `layers/3/attention/q/kernel` is the
fourth row of it. Patterns are globs over names in which `*` also matches slashes, and the name of a module stands for
everything below it.

Nothing here imports JAX: trees of parameters are plain nested dictionaries, of arrays, shapes or shardings alike.
"""

import difflib
import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast.models.config import LAYERS
from holdfast.models.family import Model, Parameter
from holdfast.optim.config import LoraConfig
from holdfast.types import Json, JsonView, Tree

LORA_IN, LORA_OUT, LORA_SCALE = "lora_in", "lora_out", "lora_scale"  # beside a kernel that has an adapter
_RANGE = re.compile(r"layers/(?P<first>\d+)(?P<dash>-(?P<last>\d+)?)?(?:/(?P<rest>.*))?$")
_NUMBERED = re.compile(r"(?:^|/)(?:layer|layers|block|blocks)_(\d+)(?:/|$)")
SHORT = {"o": "out"}  # what others call it

# Options that decide what is trained; a branch may change them, and starts with a fresh optimizer then.
OPTIONS = ("optimization/lora/", "optimization/freeze", "training/ema")


def is_adapter(path: str) -> bool:
    """Whether a name is that of an adapter's array."""
    return path.rsplit("/", 1)[-1] in (LORA_IN, LORA_OUT, LORA_SCALE)


def split_range(pattern: str, num_layers: int) -> tuple[str, range]:
    """A pattern without its layer numbers, and the layers that it speaks of.

    >>> split_range("layers/0-3/attention/*", 12), split_range("layers/8-", 12), split_range("embed*", 12)
    (('layers/attention/*', range(0, 4)), ('layers/*', range(8, 12)), ('embed*', range(0, 12)))
    """
    found = _RANGE.match(pattern)
    if found is None:
        return pattern, range(num_layers)
    first = int(found["first"])
    last = int(found["last"]) if found["last"] else num_layers - 1 if found["dash"] else first
    return LAYERS + (found["rest"] or "*"), range(first, last + 1)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without layer numbers stands for a name, or for a module above it.

    >>> matches("embed*", "embed/embedding"), matches("layers/mlp", "layers/mlp/up/kernel"), matches("mlp", "mlp_norm")
    (True, True, False)
    """
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The name, or the module above one, that is most like a pattern that matches nothing."""
    known: set[str] = set()
    for name in names:
        parts = name.split("/")
        known |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    plain = pattern.rstrip("*/") or pattern
    return max(sorted(known), key=lambda name: difflib.SequenceMatcher(None, plain, name).ratio())


def layer_number(path: str) -> int | None:
    """The layer, from 0, that the name of a parameter of one layer alone tells; None where it tells none.

    >>> layer_number("layers/layer_3/up/kernel"), layer_number("layers/up/kernel")
    (3, None)
    """
    found = _NUMBERED.search(path)
    return int(found[1]) if found else None


def leaves_of(tree: Tree, prefix: str = "") -> Json:
    """The leaves of nested dictionaries by slash path."""
    return dict(_walk(tree, prefix))


def _walk(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def tree_of(leaves: JsonView) -> Json:
    """Nested dictionaries from leaves by slash path.

    >>> tree_of({"a/b": 1, "a/c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: Json = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


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

    def shapes(self, model: Model) -> dict[str, tuple[int, ...]]:
        """Every array of the adapters and its shape: (L, in, r), (L, r, out), (L,); without L where not stacked."""
        found: dict[str, tuple[int, ...]] = {}
        for module, projection in model.projections().items():
            if module in self.modules:
                found[f"{module}/{LORA_IN}"] = (*projection.stack, projection.inputs, self.rank)
                found[f"{module}/{LORA_OUT}"] = (*projection.stack, self.rank, projection.outputs)
                found[f"{module}/{LORA_SCALE}"] = projection.stack
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

    def part(self, params: Tree) -> Json:
        """The trained part of a tree of arrays; the tree may lack some."""
        leaves = leaves_of(params)
        return tree_of(
            {
                name: leaves[name] if rows is None else leaves[name][_index(rows)]
                for name, rows in self.rows
                if name in leaves
            }
        )

    def whole(self, tree: Tree) -> Json:
        """The leaves of a tree, such as shardings, of which at least a part is trained."""
        leaves = leaves_of(tree)
        return tree_of({name: leaves[name] for name, _ in self.rows})

    def completed(self, params: Tree, part: Tree) -> Json:
        """All parameters, with a trained part in the place of theirs."""
        leaves, new = leaves_of(params), leaves_of(part)
        for name, rows in self.rows:
            leaves[name] = new[name] if rows is None else leaves[name].at[_index(rows)].set(new[name])
        return tree_of(leaves)

    def num_trained(self, model: Model) -> int:
        """How many numbers are trained."""
        parameters = all_parameters(model, self.lora)
        counts = {name: math.prod(parameters[name].shape) for name, _ in self.rows}
        return sum(
            counts[name] if rows is None else counts[name] // parameters[name].num_layers * len(rows)
            for name, rows in self.rows
        )


def trainable_for(freeze: list[str], lora: LoraConfig, model: Model) -> Trainable | None:
    """What the options leave to be trained, None where that is everything; what cannot be meant is a ConfigError."""
    adapters = _adapters(lora, model) if lora.rank else None
    if adapters is None and not freeze:
        return None
    parameters = all_parameters(model, adapters)
    frozen: dict[str, set[int]] = {name: set() for name in parameters}
    for index, pattern in enumerate(freeze):
        _freeze(frozen, pattern, f"optimization/freeze/{index}", parameters)
    candidates = [name for name in parameters if adapters is None or name.endswith((LORA_IN, LORA_OUT))]
    rows: list[tuple[str, tuple[int, ...] | None]] = []
    for name in candidates:
        num_layers = parameters[name].num_layers or 1
        kept = tuple(layer for layer in range(num_layers) if layer not in frozen[name])
        if len(kept) == num_layers:
            rows.append((name, None))
        elif kept:
            rows.append((name, kept))
    if not rows:
        raise ConfigError("optimization/freeze", freeze, "something left to train", "freeze less")
    return Trainable(tuple(rows), adapters)


def trainable_of(config: JsonView, model: Model) -> Trainable | None:
    """The same from the flat options of a checkpoint's manifest."""
    keys = ("rank", "alpha", "targets")
    given = {key: config[f"optimization/lora/{key}"] for key in keys if f"optimization/lora/{key}" in config}
    return trainable_for(list(config.get("optimization/freeze") or []), LoraConfig(**given), model)


def _adapters(lora: LoraConfig, model: Model) -> Lora:
    modules = list(model.projections())
    if not modules:
        raise ConfigError(
            "optimization/lora/rank",
            lora.rank,
            f"0, since models of the family {model.family} use no holdfast.models.Dense",
            "set it to 0",
        )
    if not lora.targets:
        return Lora(lora.rank, lora.alpha, tuple(modules))
    chosen: set[str] = set()
    for index, target in enumerate(lora.targets):
        plain = target.removesuffix("/kernel")
        found = {
            module
            for module in modules
            if module.rsplit("/", 1)[-1] == SHORT.get(plain, plain) or matches(plain, module)
        }
        if not found:
            short = {long: name for name, long in SHORT.items()}
            known = dict.fromkeys(short.get(name, name) for name in (module.rsplit("/", 1)[-1] for module in modules))
            raise ConfigError(
                f"optimization/lora/targets/{index}",
                target,
                f"one of {', '.join(known)}, or a glob over {', '.join(modules)}",
                "an empty list is all of them",
            )
        chosen |= found
    return Lora(lora.rank, lora.alpha, tuple(module for module in modules if module in chosen))


def _freeze(frozen: dict[str, set[int]], pattern: str, path: str, parameters: Mapping[str, Parameter]) -> None:
    """Add the layers of every parameter that a pattern stands for; outside the layers that is all or nothing."""
    num_layers = max(max(parameter.num_layers for parameter in parameters.values()), 1)
    glob, layers = split_range(pattern, num_layers)
    if not layers or layers[-1] >= num_layers:
        raise ConfigError(path, pattern, f"layers from 0 to {num_layers - 1}, such as layers/0-{num_layers - 1}")
    found = [name for name in frozen if matches(glob, name)]
    if not found:
        near = nearest(glob, frozen)
        raise ConfigError(path, pattern, "a pattern that matches a parameter", f"the nearest name is {near}")
    for name in found:
        frozen[name] |= set(layers)


def all_parameters(model: Model, lora: Lora | None) -> dict[str, Parameter]:
    """All parameters by name, adapters too, which are stacked as their kernels are."""
    found = model.parameters()
    adapters = lora.shapes(model) if lora else {}
    stacks = {path: found[f"{path.rsplit('/', 1)[0]}/kernel"].num_layers for path in adapters}
    return {**found, **{path: Parameter(shape, stacks[path]) for path, shape in adapters.items()}}


def _index(rows: tuple[int, ...]) -> Any:
    """Layers as an index: a slice where they are neighbours, which costs no gather."""
    if all(b - a == 1 for a, b in itertools.pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return np.asarray(rows)
