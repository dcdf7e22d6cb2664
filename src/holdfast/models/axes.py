"""Logical axes: each axis of a parameter or activation has a name, and rules map names to axes of the mesh.

The mesh has the axes `data` (rows), `fsdp` (rows, and parameters split along with them) and `tensor` (heads,
feed-forward width and vocabulary).
"""

import math
from collections.abc import Mapping

from holdfast.errors import ConfigError
from holdfast.models.config import ModelSpec

BATCH = "batch"  # rows
LENGTH = "length"  # time, never split
EMBED = "embed"  # width of the residual stream, in parameters
HEADS = "heads"  # query heads x head size
KV_HEADS = "kv_heads"  # key/value heads x head size
MLP = "mlp"  # feed-forward width
VOCAB = "vocab"
EXPERTS = "experts"  # of a mixture, in parameters
ROUTES = "routes"  # the same where all are needed: what a router chooses from, and kernels in use
LAYERS = "layers"  # the stacked layers
NORM = "norm"  # small vectors: scales and biases, one copy on each device
ACTIVATION = "activation"  # width of the residual stream, in activations

GROUP = "group"  # rows of all fsdp shards together, where each holds a part of what every row needs
CUT_VOCAB = "cut_vocab"  # the vocabulary where fsdp shards hold parts of it, beside `GROUP`

BATCH_AXES = ("data", "fsdp")

MOMENTS = "moments"  # collection of what is measured of kernels' inputs (`models/moments.py`)

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]

RULES: Rules = (
    (BATCH, BATCH_AXES),
    (EXPERTS, "fsdp"),  # before the width: an axis of the mesh splits a parameter once
    (EMBED, "fsdp"),
    (HEADS, "tensor"),
    (KV_HEADS, "tensor"),
    (MLP, "tensor"),
    (VOCAB, "tensor"),
    (LENGTH, None),
    (LAYERS, None),
    (NORM, None),
    (ROUTES, None),
    (ACTIVATION, None),
    (CUT_VOCAB, ("tensor", "fsdp")),
)


def row_axes() -> tuple[str, ...]:
    """Axes of the mesh that rows are split over by the compiler.

    Inside a part that runs once for each shard of `data` (`training/step.py`) that axis is split already.
    """
    import jax

    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH_AXES if axis not in manual)


def rules() -> Rules:
    """The rules where they are asked for: `RULES`, without what is split already."""
    rows = row_axes()
    return ((BATCH, rows), (GROUP, rows[:-1]), *RULES[1:])


def group_rows(rows: int) -> int:
    """Over how many fsdp shards the rows are spread; 1 where the mesh does not split them evenly, or there is none."""
    import jax

    sizes = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(sizes.get(axis, 1) for axis in row_axes())
    return sizes.get("fsdp", 1) if rows % shards == 0 else 1


def shard_width(width: int) -> int | None:
    """Of the model's width, what one fsdp shard of a parameter has; None where the mesh does not split it."""
    import jax

    shards: int = jax.sharding.get_abstract_mesh().shape.get("fsdp", 1)
    return width // shards if shards > 1 and width % shards == 0 else None


def check_divisible(spec: ModelSpec, mesh_sizes: Mapping[str, int]) -> None:
    """Raise a ConfigError if the mesh cannot split the model evenly, saying which number to change.

    >>> spec = ModelSpec(2, 96, 6, 6, 16, 384, vocab_size=256, block_size=64)
    >>> check_divisible(spec, {"data": 8, "fsdp": 2, "tensor": 3})
    Traceback (most recent call last):
    ...
    holdfast.errors.ConfigError: topology/tensor: got 3, expected a divisor of architecture/vocab_size = 256; ...
    """
    splits = (
        ("fsdp", "architecture/n_embd", spec.n_embd),
        ("tensor", "architecture/n_head", spec.n_head),
        ("tensor", "architecture/n_kv_head", spec.n_kv_head),
        ("tensor", "architecture/n_ff", spec.n_ff),
        ("tensor", "architecture/vocab_size", spec.vocab_size),
    )
    for axis, path, size in splits:
        parts = mesh_sizes.get(axis, 1)
        if size % parts:
            raise ConfigError(
                f"topology/{axis}",
                parts,
                f"a divisor of {path} = {size}",
                f"change topology/{axis}, or set {path} to {-(-size // parts) * parts}",
            )
