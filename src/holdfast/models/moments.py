"""What the dense kernels of a model are given: the mean square of each input feature.

Every `Dense` module is listened to in a pass without gradients, whatever family it belongs to. A family that scans its
layers lists `MOMENTS` among the scan's `variable_axes`, so that each layer's are kept apart.

Shapes: S micro-batches, B rows, T time, I inputs of a kernel.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from holdfast.errors import UserError
from holdfast.models.axes import MOMENTS
from holdfast.models.experts import ExpertDense
from holdfast.models.layers import Dense
from holdfast.types import Json, Tree

if TYPE_CHECKING:
    from holdfast.data.batches import Batch
    from holdfast.models.family import Model


def input_moments(model: "Model", params: Tree, rows: "Batch") -> dict[str, jax.Array]:
    """Mean square (…, I) of the inputs of every dense kernel over the real tokens of rows (S, B, T), by its path."""

    def body(total: Tree, micro: "Batch") -> Tree:
        return jax.tree.map(jnp.add, total, _sums(model, params, micro)), None

    first = _sums(model, params, jax.tree.map(lambda leaf: leaf[0], rows))
    summed, _ = jax.lax.scan(body, first, jax.tree.map(lambda leaf: leaf[1:], rows))
    return {path: squares / jnp.maximum(count, 1.0)[..., None] for path, (squares, count) in summed.items()}


def _observe(module: ExpertDense, x_BTJI: jax.Array, choice_BTJ: jax.Array, real_BT: jax.Array) -> None:
    """The same for experts, each over the tokens that it was chosen for."""
    goes_BTJE = (choice_BTJ[..., None] == jnp.arange(module.num_experts)) * real_BT[..., None, None]
    squares_EI = jnp.einsum(
        "btji,btje->ei", jnp.broadcast_to(jnp.square(x_BTJI), (*choice_BTJ.shape, x_BTJI.shape[-1])), goes_BTJE
    )
    for name, value in (("squares", squares_EI), ("count", goes_BTJE.sum(axis=(0, 1, 2)))):
        module.sow(MOMENTS, name, value, init_fn=lambda: jnp.float32(0), reduce_fn=jnp.add)


def _sums(model: "Model", params: Tree, micro: "Batch") -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sums of squares (…, I) over real tokens and how many these are (…,), by the kernel's path."""
    real_BT = (micro.padding_mask > 0).astype(jnp.float32)

    def note(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, Dense) and context.method_name == "__call__":
            x = args[0].astype(jnp.float32)
            # Whatever a family maps that has no time axis is all real.
            real = real_BT if x.shape[:2] == real_BT.shape else jnp.ones(x.shape[:1], jnp.float32)
            real = jnp.broadcast_to(real.reshape(*real.shape, *(1,) * (x.ndim - 1 - real.ndim)), x.shape[:-1])
            squares_I = jnp.einsum("ni,n->i", jnp.square(x).reshape(-1, x.shape[-1]), real.reshape(-1))
            for name, value in (("squares", squares_I), ("count", real.sum())):
                context.module.sow(MOMENTS, name, value, init_fn=lambda: jnp.float32(0), reduce_fn=jnp.add)
        elif isinstance(context.module, ExpertDense) and context.method_name == "observe":
            _observe(context.module, args[0].astype(jnp.float32), args[1], real_BT)
        return run(*args, **kwargs)

    with nn.intercept_methods(note):
        _, held = model.module.apply(
            {"params": params},
            micro.x,
            segment_ids=micro.segment_ids,
            positions=micro.positions,
            deterministic=True,
            method="hidden",
            mutable=[MOMENTS],
        )
    found: Json = traverse_util.flatten_dict(held.get(MOMENTS, {}), sep="/")
    for module in model.projections():
        if f"{module}/squares" not in found:
            raise UserError(
                f"architecture/family: the inputs of {module} in models of the family {model.family} cannot be "
                "measured; list holdfast.models.MOMENTS among the variable_axes of the scan over its layers"
            )
    return {f"{m}/kernel": (found[f"{m}/squares"], found[f"{m}/count"]) for m in model.projections()}
