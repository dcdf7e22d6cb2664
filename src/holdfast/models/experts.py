"""Feed-forward parts that are mixtures of experts: each token goes to the few that its router chooses, none is dropped.

Assignments of tokens to experts are sorted by expert into slots. Each expert's slots are padded to whole blocks, so
that a block belongs to one expert and is an ordinary product with that expert's kernel: a loop over the blocks that are
used. On a CPU that is as fast as one dense product of the same size, where `jax.lax.ragged_dot` becomes a product with
every expert; elsewhere `ragged_dot` has kernels of its own and is used.

What happens to a token depends on the token alone: there is no capacity, and places in a block are by order. Only the
auxiliary losses look at all tokens. On a mesh each device sorts the rows that it has and gathers the experts' kernels,
which are split over `fsdp`, as it does with every other weight; `tensor` splits the width inside the experts.

Shapes: N tokens, B rows, T time, E experts, J chosen of them, M = N J assignments, S slots, Z slots of a block,
D width, F width inside an expert, I inputs and O outputs of a product, R rank of an adapter.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from holdfast.execution.memory import on_device
from holdfast.models import axes
from holdfast.models.kernels import target_platform
from holdfast.models.layers import INIT_STD, Dense, Measured, Mlp, activate, gathered, parameter
from holdfast.models.moe import BALANCE, BIAS, ROUTER_Z, MoeSpec
from holdfast.models.parameters import LORA_IN

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128


class Slots(NamedTuple):
    """Where assignments stand when they are sorted by expert."""

    slot: jax.Array  # (N, J), of each assignment
    assignment: jax.Array  # (S,), in each slot; M where it is empty
    expert_of_block: jax.Array
    num_blocks: jax.Array  # that are used


class Kernel(NamedTuple):
    """The kernels of all experts for one product, and their adapters if they have any."""

    kernel: jax.Array  # (E, I, O)
    inward: jax.Array | None = None  # (E, I, R)
    outward: jax.Array | None = None  # (E, R, O)


class Kernels(NamedTuple):
    """Those of a feed-forward part."""

    up: Kernel
    gate: Kernel | None
    down: Kernel


def block_size(num_assignments: int, num_experts: int) -> int:
    """Slots of a block: an expert leaves half of one empty in the mean, which should be few beside its own.

    >>> [block_size(n, 8) for n in (2, 1024, 8192, 65536)]
    [8, 16, 128, 128]
    """
    wanted = num_assignments // (8 * num_experts)
    return max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << max(wanted, 1).bit_length() - 1))


def slots_for(choice_NJ: jax.Array, num_experts: int, size: int) -> Slots:
    """Sort assignments by expert, each expert's in the order of tokens, into blocks of that size."""
    num_slots = -(-choice_NJ.size // size) * size + num_experts * size
    choice_M = choice_NJ.reshape(-1)
    chosen_ME = (choice_M[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    place_M = jnp.take_along_axis(jnp.cumsum(chosen_ME, axis=0), choice_M[:, None], axis=1)[:, 0] - 1
    blocks_E = -(-chosen_ME.sum(axis=0) // size)
    ends_E = jnp.cumsum(blocks_E)
    slot_M = (ends_E - blocks_E)[choice_M] * size + place_M
    numbers = jnp.arange(choice_M.size, dtype=jnp.int32)
    assignment_S = jnp.full((num_slots,), choice_M.size, jnp.int32).at[slot_M].set(numbers, unique_indices=True)
    expert_of_block = jnp.searchsorted(ends_E, jnp.arange(num_slots // size), side="right")
    last = jnp.minimum(expert_of_block, num_experts - 1).astype(jnp.int32)
    return Slots(slot_M.reshape(choice_NJ.shape), assignment_S, last, ends_E[-1])


# Tokens to slots and back: each is the other's transpose, and both only gather, since scattering rows is slow.


@jax.custom_vjp
def to_slots(x_ND: jax.Array, slots: Slots) -> jax.Array:
    """The token of each slot (S, D); zeros where it is empty."""
    num_chosen = slots.slot.shape[1]
    return jnp.take(x_ND, slots.assignment // num_chosen, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(y_SD: jax.Array, slots: Slots) -> jax.Array:
    """What stands in the slots of each token's assignments (N, J, D)."""
    return jnp.take(y_SD, slots.slot, axis=0)


def _to_slots_backward(slots: Slots, d_SD: jax.Array) -> tuple[jax.Array, None]:
    return jnp.take(d_SD, slots.slot, axis=0).sum(axis=1), None


def _from_slots_backward(slots: Slots, d_NJD: jax.Array) -> tuple[jax.Array, None]:
    d_MD = d_NJD.reshape(-1, d_NJD.shape[-1])
    return jnp.take(d_MD, slots.assignment, axis=0, mode="fill", fill_value=0), None


to_slots.defvjp(lambda x, slots: (to_slots(x, slots), slots), _to_slots_backward)
from_slots.defvjp(lambda y, slots: (from_slots(y, slots), slots), _from_slots_backward)


@jax.custom_vjp
def block_product(x_SI: jax.Array, kernel_EIO: jax.Array, slots: Slots) -> jax.Array:
    """Each slot with the kernel of its expert (S, O), block by block; unused blocks stay zero."""
    x_ZI, size = _blocks(x_SI, slots)

    def one(at: jax.Array, y: jax.Array) -> jax.Array:
        return y.at[at].set(_dot(x_ZI[at], kernel_EIO[slots.expert_of_block[at]], x_SI.dtype))

    y = jnp.zeros((x_ZI.shape[0], size, kernel_EIO.shape[2]), x_SI.dtype)
    found: jax.Array = jax.lax.fori_loop(0, slots.num_blocks, one, y)
    return found.reshape(x_SI.shape[0], -1)


def _block_product_backward(saved: Any, dy_SO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_SI, kernel_EIO, slots = saved
    (x_ZI, size), (dy_ZO, _) = _blocks(x_SI, slots), _blocks(dy_SO, slots)

    def one(at: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx, dkernel = found
        expert = slots.expert_of_block[at]
        dx = dx.at[at].set(_dot(dy_ZO[at], kernel_EIO[expert].T, x_SI.dtype))
        return dx, dkernel.at[expert].add(_dot(x_ZI[at].T, dy_ZO[at], jnp.float32))

    start = jnp.zeros((x_ZI.shape[0], size, x_SI.shape[1]), x_SI.dtype), jnp.zeros(kernel_EIO.shape, jnp.float32)
    dx, dkernel_EIO = jax.lax.fori_loop(0, slots.num_blocks, one, start)
    return dx.reshape(x_SI.shape), dkernel_EIO.astype(kernel_EIO.dtype), None


def _blocks(x_SI: jax.Array, slots: Slots) -> tuple[jax.Array, int]:
    num_blocks = slots.expert_of_block.shape[0]
    size = x_SI.shape[0] // num_blocks
    return x_SI.reshape(num_blocks, size, x_SI.shape[1]), size


def _dot(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


block_product.defvjp(
    lambda x, kernel, slots: (block_product(x, kernel, slots), (x, kernel, slots)), _block_product_backward
)


def grouped_product(x_SI: jax.Array, kernel: Kernel, slots: Slots) -> jax.Array:
    """Each slot with the kernel of its expert, and with its adapter."""
    if target_platform() == "cpu":
        product = functools.partial(block_product, slots=slots)
    else:
        size = x_SI.shape[0] // slots.expert_of_block.shape[0]
        used = jnp.arange(slots.expert_of_block.shape[0]) < slots.num_blocks
        num_experts = kernel.kernel.shape[0]
        sizes_E = size * jnp.zeros((num_experts,), jnp.int32).at[slots.expert_of_block].add(used.astype(jnp.int32))
        product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E)
    y_SO: jax.Array = product(x_SI, kernel.kernel)
    if kernel.inward is None:
        return y_SO
    return y_SO + product(product(x_SI, kernel.inward), kernel.outward)


def mixed(
    x_ND: jax.Array, choice_NJ: jax.Array, weights_NJ: jax.Array, kernels: Kernels, activation: str
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of what the chosen experts say of each token (N, D), and what is inside them (N, J, F)."""
    num_experts = kernels.up.kernel.shape[0]
    slots = slots_for(choice_NJ, num_experts, block_size(choice_NJ.size, num_experts))
    x_SD = to_slots(x_ND, slots)
    up_SF = grouped_product(x_SD, kernels.up, slots)
    gate_SF = None if kernels.gate is None else grouped_product(x_SD, kernels.gate, slots)
    inner_SF = activate(activation, up_SF, gate_SF)
    y_NJD = from_slots(grouped_product(inner_SF, kernels.down, slots), slots)
    return (y_NJD * weights_NJ[..., None].astype(x_ND.dtype)).sum(axis=1), from_slots(inner_SF, slots)


class ExpertDense(Dense):
    """One linear map for each expert; its product is made by whoever sorts the tokens."""

    num_experts: int = 1

    @nn.compact
    def kernels(self, inputs: int) -> Kernel:
        """The kernels (E, I, O) and adapters in the type of activations, whole along `fsdp`."""
        dtype, names = jnp.dtype(self.dtype), (axes.EXPERTS, *self.names)
        shape = (self.num_experts, inputs, self.features)
        kernel = parameter(self, "kernel", nn.initializers.normal(self.std), shape, names).astype(dtype)
        kernel = gathered(kernel, axes.ROUTES, *self.names)
        if not self.has_variable("params", LORA_IN):
            return Kernel(kernel)
        inward, outward, scale = self._stored(dtype)
        return Kernel(
            kernel,
            gathered(inward, axes.ROUTES, self.names[0], axes.NORM),
            gathered(outward * scale[..., None, None], axes.ROUTES, axes.NORM, self.names[1]),
        )

    def observe(self, x_BTJI: jax.Array, choice_BTJ: jax.Array) -> None:
        """What goes into the maps and to which expert; `models/moments.py` listens here."""


class Experts(nn.Module):
    """The router, the experts that it chooses from, and those that all tokens go to.

    Parameters: router/kernel (D, E), bias (E,) where it evens the loads, {up, gate, down}/kernel (E, in, out) and
    shared/{up, gate, down}/kernel.
    """

    spec: MoeSpec

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Measured | None]:
        spec = self.spec
        split = axes.EMBED, axes.ROUTES
        logits_BTE = Dense(spec.n_experts, split, param_dtype=spec.param_dtype, name="router")(x_BTD)
        scores_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        ranked_BTE = scores_BTE
        if spec.balance == "bias":
            bias_E = self._bias()
            ranked_BTE = scores_BTE + jax.lax.stop_gradient(bias_E)
        choice_BTJ = jax.lax.top_k(ranked_BTE, spec.top_k)[1]
        weights_BTJ = jnp.take_along_axis(scores_BTE, choice_BTJ, axis=-1)
        if spec.normalise:
            weights_BTJ = weights_BTJ / weights_BTJ.sum(axis=-1, keepdims=True)
        measured = _measured(spec, logits_BTE, scores_BTE, choice_BTJ)
        if spec.balance == "bias":
            measured[BIAS] = _moving(bias_E, choice_BTJ)
        y_BTD = self._chosen(x_BTD, choice_BTJ, weights_BTJ)
        if spec.n_shared:
            shared = Mlp(dataclasses.replace(spec, n_ff=spec.n_shared * spec.n_ff), name="shared")
            y_BTD = y_BTD + shared(x_BTD)[0]
        return y_BTD, measured

    def _bias(self) -> jax.Array:
        boxed = nn.with_logical_partitioning(nn.initializers.zeros, (axes.NORM,))
        bias_E: Any = on_device(self.param("bias", boxed, (self.spec.n_experts,), jnp.dtype(self.spec.param_dtype)))
        found: jax.Array = bias_E.astype(jnp.float32)
        return found

    def _chosen(self, x_BTD: jax.Array, choice_BTJ: jax.Array, weights_BTJ: jax.Array) -> jax.Array:
        """What the chosen experts add."""
        spec, inward, outward = self.spec, (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
        std = INIT_STD / (2 * spec.n_layers) ** 0.5
        maps = {"up": self._map("up", spec.n_ff, inward), "down": self._map("down", spec.n_embd, outward, std)}
        if spec.gated:
            maps["gate"] = self._map("gate", spec.n_ff, inward)
        kernels = Kernels(
            maps["up"].kernels(spec.n_embd),
            maps["gate"].kernels(spec.n_embd) if spec.gated else None,
            maps["down"].kernels(spec.n_ff),
        )
        if self.is_mutable_collection(axes.MOMENTS):
            y_BTD, inner_BTJF = _by_rows(x_BTD, choice_BTJ, weights_BTJ, kernels, activation=spec.activation)
            for name, used in maps.items():
                used.observe(inner_BTJF if name == "down" else x_BTD[:, :, None], choice_BTJ)
            return y_BTD
        return _on_mesh(x_BTD, choice_BTJ, weights_BTJ, kernels, spec.activation)

    def _map(self, name: str, features: int, names: tuple[str, str], std: float = INIT_STD) -> ExpertDense:
        spec = self.spec
        return ExpertDense(features, names, False, std, spec.dtype, spec.param_dtype, spec.n_experts, name=name)


def _by_rows(
    x_BTD: jax.Array, choice_BTJ: jax.Array, weights_BTJ: jax.Array, kernels: Kernels, *, activation: str
) -> tuple[jax.Array, jax.Array]:
    """As `mixed`, for rows of tokens."""
    B, T, J = choice_BTJ.shape
    x_ND, choice_NJ, weights_NJ = (array.reshape(B * T, -1) for array in (x_BTD, choice_BTJ, weights_BTJ))
    y_ND, inner_NJF = mixed(x_ND, choice_NJ, weights_NJ, kernels, activation)
    return y_ND.reshape(x_BTD.shape), inner_NJF.reshape(B, T, J, -1)


def _on_mesh(
    x_BTD: jax.Array, choice_BTJ: jax.Array, weights_BTJ: jax.Array, kernels: Kernels, activation: str
) -> jax.Array:
    """What the chosen experts add; on a mesh every device sorts its own rows, and widths of experts are split."""
    mesh = jax.sharding.get_abstract_mesh()
    shards = math.prod(mesh.shape[axis] for axis in axes.BATCH_AXES) if not mesh.empty else 1
    # The rows that parameters are made with are too few to be split.
    if mesh.empty or mesh.size == 1 or x_BTD.shape[0] % shards:
        return _by_rows(x_BTD, choice_BTJ, weights_BTJ, kernels, activation=activation)[0]

    def local(x_BTD: jax.Array, choice_BTJ: jax.Array, weights_BTJ: jax.Array, kernels: Kernels) -> jax.Array:
        y_BTD, _ = _by_rows(x_BTD, choice_BTJ, weights_BTJ, kernels, activation=activation)
        summed: jax.Array = jax.lax.psum(y_BTD, "tensor")
        return summed

    rows, whole = PartitionSpec(axes.BATCH_AXES), PartitionSpec()
    inward, outward = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")
    wide, narrow = (inward, whole, inward), (outward, outward, whole)
    places = Kernels(
        _where(wide, kernels.up),
        None if kernels.gate is None else _where(wide, kernels.gate),
        _where(narrow, kernels.down),
    )
    split = jax.shard_map(local, in_specs=(rows, rows, rows, places), out_specs=rows, check_vma=False)
    y_BTD: jax.Array = split(x_BTD, choice_BTJ, weights_BTJ, kernels)
    return y_BTD


def _where(splits: tuple[PartitionSpec, ...], given: Kernel) -> Any:
    """Where the arrays of kernels lie, without those that are not there."""
    return Kernel._make(split if array is not None else None for split, array in zip(splits, given, strict=True))


def _measured(spec: MoeSpec, logits_BTE: jax.Array, scores_BTE: jax.Array, choice_BTJ: jax.Array) -> Measured:
    """How even the loads are (1: wholly), and how large the router's logits."""
    load_E, mean_E = _loads(choice_BTJ, spec.n_experts), scores_BTE.mean(axis=(0, 1))
    found = {BALANCE: spec.n_experts * (load_E * mean_E).sum()}
    if spec.z_loss:
        found[ROUTER_Z] = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)).mean()
    return found


def _loads(choice_BTJ: jax.Array, num_experts: int) -> jax.Array:
    """The share of assignments that each expert has."""
    return (choice_BTJ[..., None] == jnp.arange(num_experts)).astype(jnp.float32).mean(axis=(0, 1, 2))


def _moving(bias_E: jax.Array, choice_BTJ: jax.Array) -> jax.Array:
    """Nothing, whose gradient in the bias is the sign of each expert's load above the mean.

    So the optimizer lowers the bias of an expert with too many tokens by a step of its own size and raises the others'.
    """
    num_experts = bias_E.shape[0]
    above_E = jnp.sign(_loads(choice_BTJ, num_experts) - 1 / num_experts)
    pulled = (jax.lax.stop_gradient(above_E) * bias_E).sum()
    return pulled - jax.lax.stop_gradient(pulled)
