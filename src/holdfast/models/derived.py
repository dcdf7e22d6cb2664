"""What follows from a family's module where the family does not say it: shapes, counts, shardings, and decoding.

Shapes and counts come from `jax.eval_shape` of the module and the logical axes of its parameters. Decoding without a
cache of the family's own keeps the tokens and computes all of them again: slow, and right for every causal model.

Shapes: B rows, T time, S slots of the cache, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from flax.linen import spmd

from holdfast.errors import ConfigError
from holdfast.models import axes
from holdfast.models.layers import Dense, logits
from holdfast.types import Tree

if TYPE_CHECKING:
    from holdfast.models.family import Model, Parameter, Projection


class Leaf(NamedTuple):
    """One parameter: its shape, its type, and the logical names of its axes (None where one has no name)."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...]


def boxed_params(model: "Model") -> Any:
    """The parameters of a model as shapes and types, in the boxes that hold the names of their axes."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.module.init, key, jax.ShapeDtypeStruct((1, 1), jnp.int32))["params"]


def param_shardings(boxed: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where parameters lie, from the logical names of their axes."""
    return spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, axes.RULES)


def abstract_params(model: "Model", mesh: jax.sharding.Mesh) -> Any:
    """The parameters of a model as shapes, types and shardings."""
    boxed = boxed_params(model)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.meta.unbox(boxed),
        param_shardings(boxed, mesh),
    )


@functools.lru_cache(maxsize=16)
def _leaves(model: "Model") -> tuple[dict[str, Leaf], tuple[str, ...]]:
    """The parameters by slash path, and the paths of the `Dense` modules among them."""
    dense: dict[str, None] = {}

    def note(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, Dense):
            dense["/".join(context.module.path)] = None
        return run(*args, **kwargs)

    with nn.intercept_methods(note):
        boxed = boxed_params(model)
    found = {}
    for path, leaf in traverse_util.flatten_dict(boxed, sep="/").items():
        value = nn.meta.unbox(leaf)
        names = leaf.names if isinstance(leaf, nn.Partitioned) else ()
        found[path] = Leaf(value.shape, value.dtype, tuple(names) or (None,) * value.ndim)
    return found, tuple(dense)


def parameters(model: "Model") -> dict[str, "Parameter"]:
    """Every parameter by slash path."""
    from holdfast.models.family import Parameter

    return {
        path: Parameter(leaf.shape, leaf.shape[0] if leaf.names[:1] == (axes.LAYERS,) else 0)
        for path, leaf in _leaves(model)[0].items()
    }


def projections(model: "Model") -> dict[str, "Projection"]:
    """The `Dense` modules by slash path."""
    from holdfast.models.family import Projection

    leaves, dense = _leaves(model)
    found = {}
    for module in dense:
        *stack, inputs, outputs = leaves[f"{module}/kernel"].shape
        found[module] = Projection(inputs, outputs, tuple(stack))
    return found


def check_divisible(model: "Model", option_of_axis: Mapping[str, str], mesh_sizes: Mapping[str, int]) -> None:
    """Raise a ConfigError if the mesh cannot split a parameter evenly.

    Args:
        option_of_axis: the path of the option behind a logical axis; without one the parameter is named.
    """
    rules = dict(axes.RULES)
    for path, leaf in _leaves(model)[0].items():
        for size, name in zip(leaf.shape, leaf.names, strict=True):
            axis = rules.get(name) if name is not None else None
            parts = mesh_sizes.get(axis, 1) if isinstance(axis, str) else 1
            if name is not None and size % parts:
                own = option_of_axis.get(name)
                fix = f", or set {own} to {-(-size // parts) * parts}" if own else ""
                what = f"{own} = {size}" if own else f"{size}, the axis {name!r} of {path}"
                raise ConfigError(f"topology/{axis}", parts, f"a divisor of {what}", f"change topology/{axis}{fix}")


@functools.lru_cache(maxsize=16)
def states(model: "Model") -> tuple[int, str]:
    """Width and type of the hidden states."""
    row = jax.ShapeDtypeStruct((1, model.block_size), np.int32)
    found = jax.eval_shape(lambda params, row: model.hidden(params, row)[0], nn.meta.unbox(boxed_params(model)), row)
    return int(found.shape[-1]), str(found.dtype)


@functools.lru_cache(maxsize=16)
def activation_bytes(model: "Model") -> int:
    """Bytes for each token that a forward pass keeps for the backward pass: what a second row adds."""
    params = nn.meta.unbox(boxed_params(model))

    def kept(num_rows: int) -> int:
        rows = jax.ShapeDtypeStruct((num_rows, model.block_size), np.int32)
        backward = jax.eval_shape(
            lambda params, rows: jax.vjp(lambda p: model.hidden(p, rows)[0], params)[1], params, rows
        )
        return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(backward))

    return (kept(2) - kept(1)) // model.block_size


def flops_per_token(model: "Model") -> float:
    """Twice the numbers of all matrices that a token is multiplied with, and of the unembedding."""
    width, _ = states(model)
    inner = sum(
        math.prod(leaf.shape)
        for leaf in _leaves(model)[0].values()
        if len(leaf.shape) - (leaf.names[:1] == (axes.LAYERS,)) >= 2 and axes.VOCAB not in leaf.names
    )
    return 2.0 * (inner + width * model.vocab_size)


def tensor_sums(model: "Model") -> int:
    """How many products sum over an axis that the mesh axis `tensor` splits."""
    leaves, dense = _leaves(model)
    split = {name for name, axis in axes.RULES if axis == "tensor"}
    kernels = (leaves[f"{module}/kernel"] for module in dense)
    return sum(math.prod(kernel.shape[:-2]) for kernel in kernels if kernel.names[-2] in split)


class TokenCache(NamedTuple):
    """The tokens that each row has read, slot s holding position s; made by `init_cache`."""

    tokens: jax.Array  # (B, S)
    lengths: jax.Array  # (B,), tokens read so far


def init_cache(num_rows: int, length: int) -> TokenCache:
    """An empty cache for that many rows and tokens."""
    return TokenCache(jnp.zeros((num_rows, length), jnp.int32), jnp.zeros((num_rows,), jnp.int32))


def read(
    model: "Model", params: Tree, tokens_BT: jax.Array, cache: TokenCache, num_tokens_B: jax.Array | None
) -> tuple[jax.Array, TokenCache]:
    """Read more tokens of each row: their hidden states (B, T, D), and the new cache.

    What padding leaves in the cache lies after the row's length, where a causal model does not see it.
    """
    B, T = tokens_BT.shape
    slots_BT = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)
    held_BS = cache.tokens.at[jnp.arange(B)[:, None], slots_BT].set(tokens_BT, mode="drop")
    states_BSD, _ = model.hidden(params, held_BS)
    states_BTD = jnp.take_along_axis(states_BSD, slots_BT[..., None], axis=1, mode="clip")
    counts_B = T if num_tokens_B is None else num_tokens_B.astype(jnp.int32)
    return states_BTD, TokenCache(held_BS, cache.lengths + counts_B)


def decode(
    model: "Model", params: Tree, tokens_BT: jax.Array, cache: Any, num_tokens_B: jax.Array | None
) -> tuple[jax.Array, Any]:
    """As the family's `read`, but gives logits (B, V) for the token after each row's last."""
    states_BTD, cache = model.read(params, tokens_BT, cache, num_tokens_B)
    B, T, _ = states_BTD.shape
    last_B = jnp.full((B,), T - 1) if num_tokens_B is None else jnp.maximum(num_tokens_B.astype(jnp.int32) - 1, 0)
    last_BD = jnp.take_along_axis(states_BTD, last_B[:, None, None], axis=1)[:, 0]
    return logits(last_BD, model.unembedding(params), model.softcap), cache
