"""Weights from disk onto the mesh, each device's part alone, so that no host holds the whole model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from holdfast.errors import UserError
from holdfast.models.config import ModelSpec
from holdfast.models.derived import abstract_params
from holdfast.models.family import decoder
from holdfast.models.pretrained.families import BUFFERS, HEADS
from holdfast.models.pretrained.formats import Array, Tensors, Weight
from holdfast.models.pretrained.source import Model, open_model

Leaves = dict[str, jax.ShapeDtypeStruct]


def load_params(source: str | Path, spec: ModelSpec, mesh: Mesh) -> Any:
    """The parameters of a pretrained model, sharded on the mesh as the decoder's are.

    Args:
        source: a folder, a llama2.c file, or a hub name.
        spec: what `load_spec` or `resolve` made of it; types of parameters may differ from the file's.
    """
    model = open_model(source, weights=True)
    tensors = model.tensors()
    leaves: Leaves = traverse_util.flatten_dict(abstract_params(decoder(spec), mesh), sep="/")
    table = model.weights(spec)
    check(model, tensors, {path: table[path] for path in leaves}, leaves, tied=spec.tie_embeddings)
    placed = {path: _place(tensors, table[path], leaf) for path, leaf in leaves.items()}
    return traverse_util.unflatten_dict(placed, sep="/")


def check(model: Model, tensors: Tensors, table: Mapping[str, Weight], leaves: Leaves, *, tied: bool) -> None:
    """Refuse weights that are unknown, missing or of another shape, all in one list."""
    expected: dict[str, tuple[Weight, tuple[int, ...]]] = {}
    for path, weight in table.items():
        shape = leaves[path].shape
        for _, name in weight.places_of(shape):
            expected[name] = (weight, shape[weight.num_stacked :])
    lines = []
    for name, (weight, shape) in expected.items():
        found = tensors.shapes.get(name)
        if found is None:
            lines.append(f"  {name}: missing")
        elif not weight.fits(found, shape):
            lines.append(f"  {name}: shape {list(found)}, expected {list(weight.stored_shape(shape))}")
    for name in tensors.shapes:
        if name not in expected and not BUFFERS.search(name) and not (tied and name in HEADS):
            lines.append(f"  {name}: unknown")
    if lines:
        raise UserError(
            f"{model.folder}: the weights are not those of its configuration ({model.family.model_type}):\n"
            + "\n".join(lines)
        )


def _place(tensors: Tensors, weight: Weight, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter: each device reads its own part; devices with the same part share the reading."""
    assert isinstance(leaf.sharding, NamedSharding)
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    parts = []
    for bounds, same in devices.items():
        block = _block(tensors, weight, bounds, np.dtype(leaf.dtype))
        for device in same:
            # A copy of its own: steps donate parameters, and the block is freed before the next one is read.
            parts.append(jax.device_put(block, device, may_alias=False).block_until_ready())
        del block
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _block(tensors: Tensors, weight: Weight, bounds: tuple[tuple[int, int], ...], dtype: np.dtype[Any]) -> Array:
    """A part of one parameter in host memory."""
    index, stacked = tuple(slice(*pair) for pair in bounds), weight.num_stacked
    if not stacked:
        return np.ascontiguousarray(weight.read(tensors, (), index).astype(dtype, copy=False))
    block: Array = np.empty([stop - start for start, stop in bounds], dtype)
    for row in np.ndindex(*block.shape[:stacked]):
        at = tuple(start + own for (start, _), own in zip(bounds, row, strict=False))
        block[row] = weight.read(tensors, at, index[stacked:])
    return block
