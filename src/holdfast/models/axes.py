"""Logical axes: each axis of a parameter or activation has a name, and rules map names to axes of the mesh.

The mesh has the axes `data` (rows), `fsdp` (rows, and parameters split along with them) and `tensor` (heads,
feed-forward width and vocabulary).
"""

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

BATCH_AXES = ("data", "fsdp")

MOMENTS = "moments"  # collection of what is measured of kernels' inputs (`models/moments.py`)

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
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
)


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
