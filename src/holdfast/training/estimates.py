"""Memory, collectives and time of a step from shapes and published numbers, where no compiler can be asked.

The formulas are those of the layout that `models/axes.py` declares: parameters are gathered over `fsdp` when a layer
is used and their gradients are summed back into shards, gradients are summed over `data`, and activations over
`tensor` twice a layer. All numbers are of one device.
"""

import math
from typing import Any

import jax
import numpy as np

from holdfast.execution.chips import Chip
from holdfast.models.attention import lowering_for
from holdfast.objectives.token_loss import CHUNK_LOGITS
from holdfast.training import compiling
from holdfast.training.program import Collectives
from holdfast.training.state import TrainState


def shard_bytes(tree: Any, width: int | None = None) -> int:
    """Bytes of a tree of shapes that lie on one device.

    Args:
        width: bytes of a number; that of each array's own type unless given.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (width or np.dtype(leaf.dtype).itemsize)
        for leaf in jax.tree.leaves(tree)
    )


def memory(trainer: Any, state: TrainState, per_device: int) -> dict[str, int]:
    """What a device holds in a step with this micro-batch."""
    spec, sizes = trainer.model_spec, trainer.topology.sizes
    width = np.dtype(spec.dtype).itemsize
    tokens = per_device * trainer.config.block_size
    split = sizes["tensor"]
    inner = (6 * spec.n_embd + (3 if spec.gated else 2) * spec.n_ff + 2 * spec.n_head * spec.head_dim) // split
    layer = (2 * spec.n_embd + inner) * tokens * width
    kept = spec.n_layers * spec.n_embd * tokens * width + layer if spec.remat else spec.n_layers * layer
    gradients = shard_bytes(_trained(state))
    micro = trainer.config.batch_size // (per_device * trainer.topology.num_row_shards)
    arrays = {name: value for name, value in state.arrays().items() if name != "reference"} | {"params": state.params}
    heads, length = spec.n_head // split, trainer.config.block_size
    unembedding = spec.n_embd * spec.vocab_size // split
    return {
        "state": shard_bytes(arrays),
        "reference": shard_bytes(getattr(state, "reference", None)),
        # One micro-batch's beside the sum so far.
        "gradients": gradients * (1 if micro == 1 else 2),
        "activations": kept,
        # Of one layer, where no fused kernel makes them needless: its scores, their softmax and its gradient.
        "scores": 0 if spec.dtype == "bfloat16" else 3 * 4 * per_device * heads * length * length,
        # Two layers, the one that is used and the one that comes; the unembedding, and its gradient in float32.
        "gathered": 2 * spec.layer_parameters() // split * width + unembedding * (width + 4),
        "logits": 3 * 4 * CHUNK_LOGITS,
    }


def collectives(trainer: Any, state: TrainState, per_device: int) -> list[Collectives]:
    """What the devices exchange in a step with this micro-batch."""
    spec, sizes = trainer.model_spec, trainer.topology.sizes
    width = np.dtype(spec.dtype).itemsize
    micro = trainer.config.batch_size // (per_device * trainer.topology.num_row_shards)
    anchored = state.objective.penalty is not None
    leaves, trained = len(jax.tree.leaves(state.params)), _trained(state)
    summed = micro * len(jax.tree.leaves(trained))
    found = []
    # Devices are counted along tensor first, then fsdp, then data.
    if sizes["fsdp"] > 1:
        uses = micro * (3 if anchored else 2)  # forward, backward, and the reference's forward
        over = sizes["fsdp"], sizes["fsdp"] * sizes["tensor"]
        found.append(Collectives("all-gather", uses * leaves, uses * _gathered(trainer, width), *over))
        whole = shard_bytes(trained) * sizes["fsdp"]
        found.append(Collectives("reduce-scatter", summed, micro * whole, *over))
    if sizes["data"] > 1:
        over = sizes["data"], math.prod(sizes.values())
        found.append(Collectives("all-reduce", summed, micro * shard_bytes(trained), *over))
    if sizes["tensor"] > 1:
        sums = micro * (2 + spec.remat + anchored) * 2 * spec.n_layers
        row_bytes = per_device * trainer.config.block_size * spec.n_embd * width
        found.append(Collectives("all-reduce", sums, sums * row_bytes, sizes["tensor"], sizes["tensor"]))
    return found


def _trained(state: TrainState) -> Any:
    """The parameters that have gradients; an array of which some layers are frozen counts whole."""
    trainable = state.objective.trainable
    return state.params if trainable is None else trainable.whole(state.params)


def _gathered(trainer: Any, width: int) -> int:
    """Bytes of all parameters when they are gathered over fsdp in the activations' type."""
    return shard_bytes(trainer.state.params, width) * int(trainer.topology.sizes["fsdp"])


def trace(trainer: Any, state: TrainState, per_device: int) -> Any:
    """The step on shapes alone, to count its operations; attention as accelerators have it without their kernels."""
    placed = compiling.abstract_arguments(trainer, per_device, state)
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), placed)
    num_micro = arguments[1].x.shape[0]
    with jax.sharding.use_abstract_mesh(trainer.topology.mesh), lowering_for("accelerator"):
        return jax.make_jaxpr(lambda s, b, k: trainer.train_step(s, b, k, num_micro))(*arguments)


def seconds(chip: Chip, flops: float, state_bytes: int, sent: list[Collectives] | None) -> dict[str, float] | None:
    """How long a step takes at the least: the work of each part of the machine over its published peak.

    `at_least` is for work that overlaps perfectly, `one_after_another` for work that does not.
    """
    if sent is None:
        return None
    parts = {
        "compute": flops / chip.flops,
        # Every step reads and writes the whole state; activations come on top.
        "memory": 2 * state_bytes / chip.bandwidth,
        "communication": sum(part.sent / chip.ring_bandwidth(part.span) for part in sent),
    }
    return {**parts, "at_least": max(parts.values()), "one_after_another": sum(parts.values())}
