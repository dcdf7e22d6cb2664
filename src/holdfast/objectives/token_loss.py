"""Cross-entropy, z-loss and token penalties from hidden states, in chunks of tokens.

Logits of a whole batch are never held when they are large: each chunk's logits are made, used and dropped. Their
gradient is simple enough to be computed in the forward pass, while they exist, so that the backward pass neither
stores nor recomputes them and only scales.

Shapes: R rows, T time, N = R × T tokens, C tokens of a chunk, D width, V vocabulary. Chunks cut the time axis, so
rows may be sharded over devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from holdfast.methods.anchors import forward_kl, reverse_kl
from holdfast.methods.method import TokenPenalty
from holdfast.models import axes
from holdfast.models.kernels import target_memory, target_platform
from holdfast.models.layers import logical, logits

CHUNK_LOGITS = 1 << 24  # logits of one chunk on one device: 64 MB in float32; more where there is much memory
CHUNK_SHARE = 256  # of an accelerator's memory that the logits of a chunk take
GROUP_TOKENS = 4  # tokens of an fsdp group for each word of the vocabulary, up to which its devices share that out


# (memory, logp_CV, reference_logp_CV or None, targets_C) -> factor_C on each token's cross-entropy.
TokenWeights = Callable[[Any, jax.Array, jax.Array | None, jax.Array], jax.Array]


class Penalised(NamedTuple):
    """A penalty of the loss: what it is, its weight, and how much each token counts in it.

    Args:
        beta: may be traced.
        weights: (…, T), as `ce_weights`; None, or a penalty on all tokens of the loss: `ce_weights`.
    """

    penalty: TokenPenalty
    beta: jax.Array | float
    weights: jax.Array | None = None


class Aux(NamedTuple):
    """The parts of a loss, each a weighted sum over tokens, without gradients."""

    ce: jax.Array
    penalties: tuple[jax.Array, ...]  # in the order given, not multiplied by beta
    z: jax.Array  # log Z², not multiplied by z_loss
    weighted_ce: jax.Array | None = None  # with all factors, where there are some

    @property
    def penalty(self) -> jax.Array:
        """The first penalty, 0 where there is none."""
        return self.penalties[0] if self.penalties else jnp.float32(0)


class _Options(NamedTuple):
    z_loss: float
    penalties: tuple[TokenPenalty, ...]
    token_weights: tuple[TokenWeights, ...]
    chunk_tokens: int | None
    tied: bool
    softcap: float | None
    weighted: bool
    blocks: int  # of the rows, where the reference has the first ones of each
    cut: bool = False  # devices of an fsdp group share out the vocabulary instead of the tokens


class _Reference(NamedTuple):
    """The reference's side of each token: the weights of each penalty (R, T) and its states (R, T, D).

    Of all rows, or of the first ones of each block.
    """

    weights: tuple[jax.Array, ...]
    hidden: jax.Array


class _Tokens(NamedTuple):
    """What is known about each token besides its hidden state; (R, T) each."""

    targets: jax.Array
    ce_weights: jax.Array
    factors: jax.Array | None
    reference: _Reference | None


class _Anchor(NamedTuple):
    """The same for all tokens: the penalties' weights, the reference's (D, V) matrix, methods' memories."""

    betas: tuple[jax.Array, ...]
    unembedding: jax.Array | None
    memories: tuple[Any, ...]


def token_loss(
    hidden: jax.Array,
    unembedding_DV: jax.Array,
    targets: jax.Array,
    ce_weights: jax.Array,
    *,
    ce_factors: jax.Array | None = None,
    z_loss: float = 0.0,
    penalties: Sequence[Penalised] = (),
    token_weights: Sequence[tuple[TokenWeights, Any]] = (),
    reference_hidden: jax.Array | None = None,
    reference_unembedding_DV: jax.Array | None = None,
    reference_blocks: int = 1,
    chunk_tokens: int | None = None,
    tied: bool = False,
    softcap: float | None = None,
) -> tuple[jax.Array, Aux]:
    """Σ w·nll + z_loss · Σ w·(log Z)² + Σ beta · Σ p·penalty, and the sums.

    Gradients flow to `hidden` and `unembedding_DV` alone.

    Args:
        hidden: (…, T, D) states after the final norm; axes before T are rows and may be sharded.
        targets: (…, T); −1 is ignored by the cross-entropy.
        ce_weights: (…, T), the mask divided by whatever the caller normalises with.
        ce_factors: (…, T), further factors on each token's w, which `Aux.ce` leaves out, as those of `token_weights`.
        z_loss: weight of the squared log-normaliser (static).
        penalties: token-level plug-ins, each with its weight; they need the reference's states.
        token_weights: functions (static) and their memories: factors on each token's w, without gradient.
        reference_hidden: (…, T, D), of all rows, or of the first ones of each of `reference_blocks` equal blocks of
            rows: then penalties look at these rows alone, and `token_weights` are given no reference.
        chunk_tokens: tokens whose logits exist at once; None: as many as 64 MB hold.
        tied: the matrix is a transposed embedding; then no transposed copy of it or of its gradient is made.
        softcap: the bound c of logits c · tanh(l / c), of the reference's too; None: they have none.
    """
    rows = (-1, hidden.shape[-2])
    valid = targets >= 0
    ce_weights = jnp.where(valid, ce_weights, 0).astype(jnp.float32).reshape(rows)
    reference = anchor = None
    if reference_hidden is not None:
        given = (each.weights if each.penalty.tokens != "loss" else None for each in penalties)
        weights = tuple(ce_weights if own is None else own.astype(jnp.float32).reshape(rows) for own in given)
        states_RTD = reference_hidden.reshape(*rows, reference_hidden.shape[-1])
        count = states_RTD.shape[0]
        reference = _Reference(tuple(_first_of_blocks(each, count, reference_blocks) for each in weights), states_RTD)
    assert reference is not None or not penalties, "a penalty needs reference_hidden"
    if penalties or token_weights:
        betas = tuple(jnp.asarray(each.beta, jnp.float32) for each in penalties)
        anchor = _Anchor(betas, reference_unembedding_DV, tuple(memory for _, memory in token_weights))
    factors = None if ce_factors is None else ce_factors.astype(jnp.float32).reshape(rows)
    tokens = _Tokens(jnp.where(valid, targets, 0).reshape(rows), ce_weights, factors, reference)
    functions = tuple(function for function, _ in token_weights)
    weighted = bool(functions) or factors is not None
    plug_ins = tuple(each.penalty for each in penalties)
    cut = _cuts_vocabulary(hidden.shape, unembedding_DV.shape[1])
    options = _Options(z_loss, plug_ins, functions, chunk_tokens, tied, softcap, weighted, reference_blocks, cut)
    if anchor is not None and anchor.unembedding is not None:
        anchor = anchor._replace(unembedding=_placed(options, anchor.unembedding, hidden.dtype))
    return _loss(options, hidden.reshape(*rows, hidden.shape[-1]), _as_stored(options, unembedding_DV), tokens, anchor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    options: _Options, hidden_RTD: jax.Array, unembedding_DV: jax.Array, tokens: _Tokens, anchor: _Anchor | None
) -> tuple[jax.Array, Aux]:
    matrix_DV = _placed(options, unembedding_DV, hidden_RTD.dtype)

    def chunk(total: Aux, hidden_CD: jax.Array, part: _Tokens) -> tuple[Aux, None]:
        sums, _ = _chunk_loss(options, hidden_CD, matrix_DV, part, anchor)
        return jax.tree.map(jnp.add, total, sums), None

    chunking = unembedding_DV.shape[1], options.chunk_tokens, options.cut
    sums, _ = _over_chunks(chunk, _no_sums(options), hidden_RTD, tokens, *chunking)
    return _total(options, anchor, sums), sums


def _loss_forward(
    options: _Options, hidden_RTD: jax.Array, unembedding_DV: jax.Array, tokens: _Tokens, anchor: _Anchor | None
) -> tuple[tuple[jax.Array, Aux], tuple[jax.Array, jax.Array]]:
    # Turned back outside the loop over chunks, where that undoes what made it, and used turned inside: the products
    # take either form as it lies in memory, and no transposed copy is made of the largest matrix of the model.
    def turn(matrix: jax.Array) -> jax.Array:
        return matrix.swapaxes(-1, -2) if options.tied else matrix

    stored = turn(_placed(options, unembedding_DV, hidden_RTD.dtype))

    def chunk(carry: Any, hidden_CD: jax.Array, part: _Tokens) -> tuple[Any, jax.Array]:
        total, matrix_gradient = carry
        matrix_DV = turn(stored)
        sums, logits_gradient = _chunk_loss(options, hidden_CD, matrix_DV, part, anchor)
        gradient_CV = logits_gradient().astype(hidden_CD.dtype)
        hidden_gradient = gradient_CV @ matrix_DV.astype(hidden_CD.dtype).T
        matrix_gradient += _by_shard(options, hidden_CD, gradient_CV, shards)
        return (jax.tree.map(jnp.add, total, sums), matrix_gradient), hidden_gradient

    # Each shard of rows adds up its own chunks: summed over devices once, not once a chunk.
    shards, (rows, vocabulary) = _row_shards(options, hidden_RTD.shape[0]), _axes_of(options)
    zeros = logical(jnp.zeros((shards, *unembedding_DV.shape), jnp.float32), rows, axes.ACTIVATION, vocabulary)
    chunking = unembedding_DV.shape[1], options.chunk_tokens, options.cut
    (sums, matrix_gradient), hidden_gradient = _over_chunks(
        chunk, (_no_sums(options), turn(zeros)), hidden_RTD, tokens, *chunking
    )
    summed = matrix_gradient[0] if shards == 1 else matrix_gradient.sum(axis=0)
    saved = (hidden_gradient, turn(summed).astype(unembedding_DV.dtype))
    return (_total(options, anchor, sums), sums), saved


def _cuts_vocabulary(shape: tuple[int, ...], vocabulary: int) -> bool:
    """Whether the devices of an fsdp group share out the vocabulary: each then has its part for all of their tokens.

    Otherwise each has the whole matrix for its own tokens, and a gradient of the same size in float32. Tokens are
    sent instead of the matrix, which is less as long as the group has not many more of them than it has words.
    """
    rows, sizes = math.prod(shape[:-2]), jax.sharding.get_abstract_mesh().shape
    group = axes.group_rows(rows)
    shards = math.prod(sizes.get(axis, 1) for axis in axes.row_axes()) // group
    return (
        group > 1
        and rows * shape[-2] <= GROUP_TOKENS * shards * vocabulary
        and vocabulary % (group * sizes.get("tensor", 1)) == 0
    )


def _axes_of(options: _Options) -> tuple[str, str]:
    """Logical axes of rows or tokens and of the vocabulary."""
    return (axes.GROUP, axes.CUT_VOCAB) if options.cut else (axes.BATCH, axes.VOCAB)


def _as_stored(options: _Options, matrix_DV: jax.Array) -> jax.Array:
    """The matrix where it is; its gradient gets the same place, or else the optimizer would follow the loss's cut."""
    return logical(matrix_DV, axes.EMBED, axes.VOCAB) if options.cut else matrix_DV


def _placed(options: _Options, matrix_DV: jax.Array, dtype: Any) -> jax.Array:
    """An unembedding as the devices of a mesh need it, sent in the type that it is used in."""
    if jax.sharding.get_abstract_mesh().empty:
        return matrix_DV
    return logical(matrix_DV.astype(dtype), axes.ACTIVATION, _axes_of(options)[1])


def _row_shards(options: _Options, rows: int) -> int:
    """Over how many shards the rows are spread on the mesh that is traced for; 1 without one."""
    sizes = jax.sharding.get_abstract_mesh().shape
    split = axes.row_axes()[:-1] if options.cut else axes.row_axes()
    shards = math.prod(sizes.get(axis, 1) for axis in split)
    return shards if rows % shards == 0 else 1


def _by_shard(options: _Options, hidden_CD: jax.Array, gradient_CV: jax.Array, shards: int) -> jax.Array:
    """The gradient of a chunk on the matrix as it is stored, (S, D, V) or (S, V, D): of each shard's tokens alone."""
    if shards == 1:
        pair = (gradient_CV.T, hidden_CD) if options.tied else (hidden_CD.T, gradient_CV)
        return jnp.dot(*pair, preferred_element_type=jnp.float32)[None]
    hidden_SCD, gradient_SCV = (array.reshape(shards, -1, array.shape[-1]) for array in (hidden_CD, gradient_CV))
    rows, vocabulary = _axes_of(options)
    if options.tied:
        summed = jnp.einsum("scv,scd->svd", gradient_SCV, hidden_SCD, preferred_element_type=jnp.float32)
        return logical(summed, rows, vocabulary, axes.ACTIVATION)
    summed = jnp.einsum("scd,scv->sdv", hidden_SCD, gradient_SCV, preferred_element_type=jnp.float32)
    return logical(summed, rows, axes.ACTIVATION, vocabulary)


def _loss_backward(
    _options: _Options, saved: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, Aux]
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_gradient, matrix_gradient = saved
    # Each in its own type: the factor is in float32, and would widen a gradient in bfloat16.
    hidden, matrix = (gradient * cotangent[0].astype(gradient.dtype) for gradient in (hidden_gradient, matrix_gradient))
    return hidden, matrix, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _no_sums(options: _Options) -> Aux:
    zero = jnp.float32(0)
    return Aux(zero, (zero,) * len(options.penalties), zero, zero if options.weighted else None)


def _total(options: _Options, anchor: _Anchor | None, sums: Aux) -> jax.Array:
    total = sums.ce if sums.weighted_ce is None else sums.weighted_ce
    if options.z_loss:
        total += options.z_loss * sums.z
    if anchor is not None:
        for beta, value in zip(anchor.betas, sums.penalties, strict=True):
            total += beta * value
    return total


def _chunk_loss(
    options: _Options, hidden_CD: jax.Array, unembedding_DV: jax.Array, part: _Tokens, anchor: _Anchor | None
) -> tuple[Aux, Callable[[], jax.Array]]:
    """The sums of one chunk, and a function that gives their gradient on the logits, (C, V)."""
    logits_CV = logical(logits(hidden_CD, unembedding_DV, options.softcap), *_axes_of(options))
    largest_C = logits_CV.max(axis=1)
    exp_CV = jnp.exp(logits_CV - largest_C[:, None])
    if target_platform() == "cpu":
        # One exponential a logit: fused into the sum and into the gradient it would be taken twice. An accelerator
        # takes it faster than it would write it down and read it again.
        exp_CV = jax.lax.optimization_barrier(exp_CV)
    sum_C = exp_CV.sum(axis=1)
    log_z_C = jnp.log(sum_C) + largest_C
    nll_C = log_z_C - _pick(logits_CV, part.targets)
    weights_C, weighted_ce = part.ce_weights, None
    if part.factors is not None:
        weights_C = weights_C * part.factors
    logp_CV = reference_logp_CV = None
    if anchor is not None:
        logp_CV = logits_CV - log_z_C[:, None]
        if part.reference is not None:
            assert anchor.unembedding is not None, "a reference has an unembedding"
            reference_logp_CV, _ = _log_probabilities(part.reference.hidden, anchor.unembedding, options.softcap)
        whole_reference = None if _in_slots(part) else reference_logp_CV
        for function, memory in zip(options.token_weights, anchor.memories, strict=True):
            weights_C = weights_C * function(memory, logp_CV, whole_reference, part.targets)
    if options.weighted:
        weighted_ce = (weights_C * nll_C).sum()

    def ce_gradient() -> jax.Array:
        onehot_CV = jnp.arange(logits_CV.shape[1]) == part.targets[:, None]
        policy_C = weights_C * (1 + 2 * options.z_loss * log_z_C) if options.z_loss else weights_C
        return exp_CV * (policy_C / sum_C)[:, None] - jnp.where(onehot_CV, weights_C[:, None], 0)

    ce, z = (part.ce_weights * nll_C).sum(), (weights_C * jnp.square(log_z_C)).sum()
    if not options.penalties:
        return Aux(ce, (), z, weighted_ce), lambda: _uncapped(ce_gradient(), logits_CV, options.softcap)
    assert anchor is not None and part.reference is not None  # noqa: PT018  # one fact: a penalty has a reference
    assert logp_CV is not None and reference_logp_CV is not None  # noqa: PT018
    seen_CV, targets_C = (
        _first_of_blocks(each, reference_logp_CV.shape[0], options.blocks) for each in (logp_CV, part.targets)
    )
    values = [penalty.value(seen_CV, reference_logp_CV, targets_C) for penalty in options.penalties]
    sums = tuple((weights * value_C).sum() for weights, value_C in zip(part.reference.weights, values, strict=True))
    terms = [*zip(options.penalties, values, anchor.betas, part.reference.weights, strict=True)]

    def gradient() -> jax.Array:
        total = ce_gradient()
        for penalty, value_C, beta, penalty_weights_C in terms:
            penalty_CV = _penalty_gradient(penalty, seen_CV, reference_logp_CV, targets_C, value_C)
            total = total + _filled_up((beta * penalty_weights_C)[:, None] * penalty_CV, len(total), options.blocks)
        return _uncapped(total, logits_CV, options.softcap)

    return Aux(ce, sums, z, weighted_ce), gradient


def _in_slots(part: _Tokens) -> bool:
    """Whether the reference has other rows than the policy."""
    return part.reference is not None and part.reference.hidden.shape[0] < part.targets.shape[0]


def _first_of_blocks(array: jax.Array, count: int, blocks: int) -> jax.Array:
    """The first `count` rows or tokens, taken from the beginnings of equal blocks; all of them as they are."""
    if count == array.shape[0]:
        return array
    cut = array.reshape(blocks, -1, *array.shape[1:])[:, : count // blocks]
    return cut.reshape(count, *array.shape[1:])


def _filled_up(array_CV: jax.Array, count: int, blocks: int) -> jax.Array:
    """What stands at the beginnings of blocks, with zeros at all other tokens."""
    if count == array_CV.shape[0]:
        return array_CV
    first = array_CV.reshape(blocks, -1, array_CV.shape[1])
    return jnp.pad(first, ((0, 0), (0, count // blocks - first.shape[1]), (0, 0))).reshape(count, -1)


def _penalty_gradient(
    penalty: TokenPenalty, logp_CV: jax.Array, reference_logp_CV: jax.Array, targets_C: jax.Array, value_C: jax.Array
) -> jax.Array:
    """Gradient of each token's penalty on its own logits, by the penalty's formula or from its value."""
    if penalty.gradient is not None:
        return penalty.gradient(logp_CV, reference_logp_CV, targets_C, value_C)

    def summed(logits_CV: jax.Array) -> jax.Array:
        return penalty.value(jax.nn.log_softmax(logits_CV), reference_logp_CV, targets_C).sum()

    derived: jax.Array = jax.grad(summed)(logp_CV)
    return derived


def _uncapped(gradient_CV: jax.Array, logits_CV: jax.Array, softcap: float | None) -> jax.Array:
    """The gradient on logits before their bound, from the one on bounded logits."""
    return gradient_CV if softcap is None else gradient_CV * (1 - jnp.square(logits_CV / softcap))


def _log_probabilities(
    hidden_CD: jax.Array, unembedding_DV: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    logits_CV = logits(hidden_CD, unembedding_DV, softcap)
    log_z_C = jax.nn.logsumexp(logits_CV, axis=1)
    return logits_CV - log_z_C[:, None], log_z_C


def _pick(values_CV: jax.Array, indices_C: jax.Array) -> jax.Array:
    if target_platform() != "cpu" or not jax.sharding.get_abstract_mesh().empty:
        # Where the vocabulary may be split a comparison needs no exchange, and it is fused into what made the values.
        return jnp.where(jnp.arange(values_CV.shape[1]) == indices_C[:, None], values_CV, 0).sum(axis=1)
    return jnp.take_along_axis(values_CV, indices_C[:, None], axis=1)[:, 0]


def chunk_logits(memory: int | None) -> int:
    """Logits of one chunk on one device, a power of two.

    Args:
        memory: bytes of an accelerator; None for a CPU.

    >>> [chunk_logits(memory) // CHUNK_LOGITS for memory in (None, 4 << 30, 16 << 30, 32 << 30, 80 << 30)]
    [1, 1, 1, 2, 4]
    """
    if memory is None:
        return CHUNK_LOGITS
    # A little less than is printed on a device can be used: the nearest power is the same for both.
    return max(CHUNK_LOGITS, 1 << round(math.log2(memory / (4 * CHUNK_SHARE))))


def _over_chunks(
    body: Callable[[Any, jax.Array, Any], tuple[Any, Any]],
    carry: Any,
    hidden_RTD: jax.Array,
    tokens: Any,
    vocabulary: int,
    chunk_tokens: int | None,
    cut: bool = False,
) -> tuple[Any, Any]:
    """Fold `body(carry, hidden_CD, tokens_C)` over chunks of time; outputs per token come back as (R, T, …).

    Args:
        cut: as in `_Options`: every chunk is brought to all devices of a group.
    """
    R, T = hidden_RTD.shape[:2]
    if chunk_tokens is None:
        mesh = jax.sharding.get_abstract_mesh()
        devices = math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)
        chunk_tokens = max(1, chunk_logits(target_memory()) * devices // vocabulary)
    count = min(T, -(-R * T // chunk_tokens))
    length = -(-T // count)

    def in_chunks(array_RT: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, count * length - T)] + [(0, 0)] * (array_RT.ndim - 2)
        padded = jnp.pad(array_RT, padding) if count * length > T else array_RT
        return jnp.moveaxis(padded.reshape(-1, count, length, *array_RT.shape[2:]), 1, 0)

    def flat_body(carry: Any, chunk: Any) -> tuple[Any, Any]:
        if cut:
            chunk = jax.tree.map(lambda array: _laid(array, axes.GROUP), chunk)
        flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), chunk)
        carry, outputs = body(carry, *flat)
        shaped = jax.tree.map(lambda array: array.reshape(R, length, *array.shape[1:]), outputs)
        return carry, jax.tree.map(lambda array: _laid(array, axes.BATCH), shaped) if cut else shaped

    if count == 1:
        return flat_body(carry, (hidden_RTD, tokens))
    carry, outputs = jax.lax.scan(flat_body, carry, jax.tree.map(in_chunks, (hidden_RTD, tokens)))

    def join(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 1).reshape(R, count * length, *array.shape[3:])[:, :T]

    return carry, jax.tree.map(join, outputs)


def _laid(array: jax.Array, rows: str) -> jax.Array:
    return logical(array, rows, *[axes.LENGTH, axes.ACTIVATION][: array.ndim - 1])


def token_nll(
    hidden: jax.Array,
    unembedding_DV: jax.Array,
    targets: jax.Array,
    *,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Negative log-likelihood of each target, in float32 and the targets' shape; 0 where the target is −1.

    Args:
        hidden: (…, T, D).
        targets: (…, T).
        chunk_tokens, softcap: as for `token_loss`.
    """

    def chunk(carry: None, hidden_CD: jax.Array, targets_C: jax.Array) -> tuple[None, jax.Array]:
        logp_CV, _ = _log_probabilities(hidden_CD, unembedding_DV, softcap)
        return carry, jnp.where(targets_C >= 0, -_pick(logp_CV, jnp.maximum(targets_C, 0)), 0)

    rows = (-1, hidden.shape[-2])
    hidden_RTD = hidden.reshape(*rows, hidden.shape[-1])
    _, nll_RT = _over_chunks(chunk, None, hidden_RTD, targets.reshape(rows), unembedding_DV.shape[1], chunk_tokens)
    nll: jax.Array = nll_RT.reshape(targets.shape)
    return nll


def token_kl(
    hidden: jax.Array,
    unembedding_DV: jax.Array,
    reference_hidden: jax.Array,
    reference_unembedding_DV: jax.Array,
    *,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """KL(reference ‖ policy) and KL(policy ‖ reference) of each token, (…, T) in float32.

    Args:
        hidden: (…, T, D), as `reference_hidden`.
        chunk_tokens, softcap: as for `token_loss`.
    """

    def chunk(carry: None, hidden_CD: jax.Array, reference_CD: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        policy_CV, _ = _log_probabilities(hidden_CD, unembedding_DV, softcap)
        reference_CV, _ = _log_probabilities(reference_CD, reference_unembedding_DV, softcap)
        nowhere_C = jnp.zeros(hidden_CD.shape[0], jnp.int32)  # these penalties look at no target
        return carry, (
            forward_kl(policy_CV, reference_CV, nowhere_C),
            reverse_kl(policy_CV, reference_CV, nowhere_C),
        )

    rows = (-1, hidden.shape[-2], hidden.shape[-1])
    _, (forward_RT, reverse_RT) = _over_chunks(
        chunk, None, hidden.reshape(rows), reference_hidden.reshape(rows), unembedding_DV.shape[1], chunk_tokens
    )
    return forward_RT.reshape(hidden.shape[:-1]), reverse_RT.reshape(hidden.shape[:-1])
