"""Memory, collectives and time of a step from shapes and published numbers, where no compiler can be asked.

The formulas are those of the layout that `models/axes.py` declares: parameters are gathered over `fsdp` when a layer
is used and their gradients are summed back into shards, gradients are summed over `data` once a step (once a
micro-batch where the loss is no sum over rows), and activations over `tensor` twice a layer. Embeddings count as any
other weight, although what is sent of them is less where a group has few tokens. All numbers are of one device.
"""

import math
from typing import Any

import jax
import numpy as np

from holdfast.analysis.hlo import Collectives
from holdfast.execution import Topology
from holdfast.execution.chips import Chip
from holdfast.execution.memory import HOST
from holdfast.models.attention import COUNTING
from holdfast.models.family import Model
from holdfast.models.kernels import lowering_for
from holdfast.models.parameters import leaves_of
from holdfast.objectives.token_loss import chunk_logits
from holdfast.training.compile import TrainStep, abstract_arguments
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import TrainState
from holdfast.types import Tree


def shard_bytes(tree: Tree, width: int | None = None) -> int:
    """Bytes of a tree of shapes that lie in one device's memory.

    Args:
        width: bytes of a number; that of each array's own type unless given.
    """
    return _bytes([leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST], width)


def host_bytes(tree: Tree) -> int:
    """Bytes of a tree of shapes that lie in the host's memory for one device."""
    return _bytes([leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST])


def _bytes(leaves: list[Tree], width: int | None = None) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (width or np.dtype(leaf.dtype).itemsize) for leaf in leaves
    )


def streamed_bytes(model: Model, reference: Tree, held: int) -> int:
    """Bytes that a device has at once of a reference in the host's memory.

    Two layers, the one that is used and the one that comes, and what belongs to no layer; all of it for a family that
    does not bring weights by itself.

    Args:
        held: bytes of the reference.
    """
    if not model.kind.brings_weights or held == 0:
        return held
    found, numbers = model.parameters(), leaves_of(reference)
    sizes = {path: math.prod(leaf.shape) for path, leaf in numbers.items()}
    needed: float = sum(
        size * min(1.0, 2 / found[path].num_layers) if path in found and found[path].num_layers else size
        for path, size in sizes.items()
    )
    return int(held * needed / sum(sizes.values()))


def memory(run: ResolvedRun, topology: Topology, state: TrainState, per_device: int, chip: Chip) -> dict[str, int]:
    """What a device holds in a step with this micro-batch."""
    model = run.model
    gradients = shard_bytes(_trained(state))
    micro = run.config.batch_size // (per_device * topology.num_row_shards)
    arrays = {name: value for name, value in state.arrays().items() if name != "reference"} | {"params": state.params}
    return {
        "state": shard_bytes(arrays),
        "reference": shard_bytes(state.reference) + streamed_bytes(model, state.reference, host_bytes(state.reference)),
        # Layers add to the sum where it lies; the rest of a micro-batch's gradients takes at most a copy beside it.
        "gradients": gradients * (1 if micro == 1 else 2),
        **model.kind.working_memory(model, per_device, topology.sizes["tensor"]),
        "logits": 3 * 4 * chunk_logits(chip.memory),
    }


def collectives(run: ResolvedRun, topology: Topology, state: TrainState, per_device: int) -> list[Collectives]:
    """What the devices exchange in a step with this micro-batch."""
    model, sizes = run.model, topology.sizes
    width = np.dtype(model.dtype).itemsize
    micro = run.config.batch_size // (per_device * topology.num_row_shards)
    anchored = state.objective.penalty is not None
    leaves, trained = len(jax.tree.leaves(state.params)), _trained(state)
    summed = micro * len(jax.tree.leaves(trained))
    found = []
    # Devices are counted along tensor first, then fsdp, then data.
    if sizes["fsdp"] > 1:
        uses = micro * (3 if anchored else 2)  # forward, backward, and the reference's forward
        over = sizes["fsdp"], sizes["fsdp"] * sizes["tensor"], "fsdp"
        found.append(Collectives("all-gather", uses * leaves, uses * _gathered(state, sizes["fsdp"], width), *over))
        whole = shard_bytes(trained) * sizes["fsdp"]
        found.append(Collectives("reduce-scatter", summed, micro * whole, *over))
    if sizes["data"] > 1:
        over = sizes["data"], math.prod(sizes.values()), "data"
        times = 1 if model.kind.sums_rows(model.options) else micro
        found.append(Collectives("all-reduce", times * summed // micro, times * shard_bytes(trained), *over))
    if sizes["tensor"] > 1:
        sums = micro * (2 + model.kind.rematerialises(model.options) + anchored) * model.kind.tensor_sums(model)
        row_bytes = per_device * run.config.block_size * model.width * width
        found.append(Collectives("all-reduce", sums, sums * row_bytes, sizes["tensor"], sizes["tensor"], "tensor"))
    return found


def _trained(state: TrainState) -> Any:
    """The parameters that have gradients; an array of which some layers are frozen counts whole."""
    trainable = state.objective.trainable
    return state.params if trainable is None else trainable.whole(state.params)


def _gathered(state: TrainState, fsdp: int, width: int) -> int:
    """Bytes of all parameters when they are gathered over fsdp in the activations' type."""
    return shard_bytes(state.params, width) * fsdp


def trace(run: ResolvedRun, topology: Topology, train_step: TrainStep, state: TrainState, per_device: int) -> Any:
    """The step on shapes alone, to count its operations; attention as accelerators have it without their kernels."""
    placed = abstract_arguments(run, topology, per_device, state)
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), placed)
    num_micro = arguments[1].x.shape[0]
    mesh: Any = topology.mesh
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh), lowering_for(COUNTING):
        return jax.make_jaxpr(lambda s, b, k: train_step(s, b, k, num_micro))(*arguments)


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
