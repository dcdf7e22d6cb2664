"""Cross-entropy, z-loss and token penalties from hidden states, in chunks of tokens.

Logits of a whole batch are never held when they are large: each chunk's logits are made, used and dropped. Their
gradient is simple enough to be computed in the forward pass, while they exist, so that the backward pass neither
stores nor recomputes them and only scales.

Shapes: R rows, T time, N = R × T tokens, C tokens of a chunk, D width, V vocabulary. Chunks cut the time axis, so
rows may be sharded over devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from holdfast.models import axes
from holdfast.models.layers import logical
from holdfast.objectives.penalties import forward, reverse
from holdfast.objectives.penalties.kinds import TokenPenalty

CHUNK_LOGITS = 1 << 24  # logits of one chunk on one device: 64 MB in float32


class Aux(NamedTuple):
    """The parts of a loss, each a weighted sum over tokens, without gradients."""

    ce: jax.Array
    penalty: jax.Array  # not multiplied by beta
    z: jax.Array  # log Z², not multiplied by z_loss


class _Options(NamedTuple):
    z_loss: float
    penalty: TokenPenalty | None
    chunk_tokens: int | None
    tied: bool


class _Reference(NamedTuple):
    """The penalty's side of each token: weights (R, T) and the reference's states (R, T, D)."""

    weights: jax.Array
    hidden: jax.Array


class _Tokens(NamedTuple):
    """What is known about each token besides its hidden state; (R, T) each."""

    targets: jax.Array
    ce_weights: jax.Array
    reference: _Reference | None


class _Anchor(NamedTuple):
    """The penalty's side of all tokens: its weight and the reference's (D, V) matrix."""

    beta: jax.Array
    unembedding: jax.Array


def token_loss(
    hidden: jax.Array,
    unembedding_DV: jax.Array,
    targets: jax.Array,
    ce_weights: jax.Array,
    *,
    z_loss: float = 0.0,
    penalty: TokenPenalty | None = None,
    beta: jax.Array | float | None = None,
    reference_hidden: jax.Array | None = None,
    reference_unembedding_DV: jax.Array | None = None,
    penalty_weights: jax.Array | None = None,
    chunk_tokens: int | None = None,
    tied: bool = False,
) -> tuple[jax.Array, Aux]:
    """Σ w·nll + z_loss · Σ w·(log Z)² + beta · Σ p·penalty, and the three sums.

    Gradients flow to `hidden` and `unembedding_DV` alone.

    Args:
        hidden: (…, T, D) states after the final norm; axes before T are rows and may be sharded.
        targets: (…, T); −1 is ignored by the cross-entropy.
        ce_weights: (…, T), the mask divided by whatever the caller normalises with.
        z_loss: weight of the squared log-normaliser (static).
        penalty: a token-level plug-in (static), with `beta` (may be traced) and the reference's states.
        penalty_weights: (…, T), as `ce_weights`; None, or a penalty on the loss's tokens: `ce_weights`.
        chunk_tokens: tokens whose logits exist at once; None: as many as 64 MB hold.
        tied: the matrix is a transposed embedding; then no transposed copy of it or of its gradient is made.
    """
    rows = (-1, hidden.shape[-2])
    valid = targets >= 0
    ce_weights = jnp.where(valid, ce_weights, 0).astype(jnp.float32).reshape(rows)
    reference = anchor = None
    if penalty is not None:
        assert beta is not None, "a penalty needs beta"
        assert reference_hidden is not None, "a penalty needs reference_hidden"
        assert reference_unembedding_DV is not None, "a penalty needs reference_unembedding_DV"
        if penalty.tokens == "loss" or penalty_weights is None:
            penalty_weights = ce_weights
        states_RTD = reference_hidden.reshape(*rows, reference_hidden.shape[-1])
        reference = _Reference(penalty_weights.astype(jnp.float32).reshape(rows), states_RTD)
        anchor = _Anchor(jnp.asarray(beta, jnp.float32), reference_unembedding_DV)
    tokens = _Tokens(jnp.where(valid, targets, 0).reshape(rows), ce_weights, reference)
    options = _Options(z_loss, penalty, chunk_tokens, tied)
    return _loss(options, hidden.reshape(*rows, hidden.shape[-1]), unembedding_DV, tokens, anchor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    options: _Options, hidden_RTD: jax.Array, unembedding_DV: jax.Array, tokens: _Tokens, anchor: _Anchor | None
) -> tuple[jax.Array, Aux]:
    def chunk(total: Aux, hidden_CD: jax.Array, part: _Tokens) -> tuple[Aux, None]:
        sums, _ = _chunk_loss(options, hidden_CD, unembedding_DV, part, anchor)
        return jax.tree.map(jnp.add, total, sums), None

    sums, _ = _over_chunks(chunk, _no_sums(), hidden_RTD, tokens, unembedding_DV.shape[1], options.chunk_tokens)
    return _total(options, anchor, sums), sums


def _loss_forward(
    options: _Options, hidden_RTD: jax.Array, unembedding_DV: jax.Array, tokens: _Tokens, anchor: _Anchor | None
) -> tuple[tuple[jax.Array, Aux], tuple[jax.Array, jax.Array]]:
    # Turned back outside the loop over chunks, where that undoes what made it, and used turned inside: the products
    # take either form as it lies in memory, and no transposed copy is made of the largest matrix of the model.
    def turn(matrix: jax.Array) -> jax.Array:
        return matrix.swapaxes(-1, -2) if options.tied else matrix

    stored = turn(unembedding_DV)

    def chunk(carry: Any, hidden_CD: jax.Array, part: _Tokens) -> tuple[Any, jax.Array]:
        total, matrix_gradient = carry
        matrix_DV = turn(stored)
        sums, logits_gradient = _chunk_loss(options, hidden_CD, matrix_DV, part, anchor)
        gradient_CV = logits_gradient().astype(hidden_CD.dtype)
        hidden_gradient = gradient_CV @ matrix_DV.astype(hidden_CD.dtype).T
        matrix_gradient += _by_shard(hidden_CD, gradient_CV, shards, options.tied)
        return (jax.tree.map(jnp.add, total, sums), matrix_gradient), hidden_gradient

    # Each shard of rows adds up its own chunks: summed over devices once, not once a chunk.
    shards = _row_shards(hidden_RTD.shape[0])
    zeros = logical(jnp.zeros((shards, *unembedding_DV.shape), jnp.float32), axes.BATCH, axes.ACTIVATION, axes.VOCAB)
    (sums, matrix_gradient), hidden_gradient = _over_chunks(
        chunk, (_no_sums(), turn(zeros)), hidden_RTD, tokens, unembedding_DV.shape[1], options.chunk_tokens
    )
    summed = matrix_gradient[0] if shards == 1 else matrix_gradient.sum(axis=0)
    saved = (hidden_gradient, turn(summed).astype(unembedding_DV.dtype))
    return (_total(options, anchor, sums), sums), saved


def _row_shards(rows: int) -> int:
    """Over how many shards the rows are spread on the mesh that is traced for; 1 without one."""
    sizes = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(sizes.get(axis, 1) for axis in axes.BATCH_AXES)
    return shards if rows % shards == 0 else 1


def _by_shard(hidden_CD: jax.Array, gradient_CV: jax.Array, shards: int, tied: bool) -> jax.Array:
    """The gradient of a chunk on the matrix as it is stored, (S, D, V) or (S, V, D): of each shard's tokens alone."""
    if shards == 1:
        pair = (gradient_CV.T, hidden_CD) if tied else (hidden_CD.T, gradient_CV)
        return jnp.dot(*pair, preferred_element_type=jnp.float32)[None]
    hidden_SCD, gradient_SCV = (array.reshape(shards, -1, array.shape[-1]) for array in (hidden_CD, gradient_CV))
    if tied:
        summed = jnp.einsum("scv,scd->svd", gradient_SCV, hidden_SCD, preferred_element_type=jnp.float32)
        return logical(summed, axes.BATCH, axes.VOCAB, axes.ACTIVATION)
    summed = jnp.einsum("scd,scv->sdv", hidden_SCD, gradient_SCV, preferred_element_type=jnp.float32)
    return logical(summed, axes.BATCH, axes.ACTIVATION, axes.VOCAB)


def _loss_backward(
    _options: _Options, saved: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, Aux]
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_gradient, matrix_gradient = saved
    factor = cotangent[0]
    return hidden_gradient * factor.astype(hidden_gradient.dtype), matrix_gradient * factor, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _no_sums() -> Aux:
    zero = jnp.float32(0)
    return Aux(zero, zero, zero)


def _total(options: _Options, anchor: _Anchor | None, sums: Aux) -> jax.Array:
    total = sums.ce
    if options.z_loss:
        total += options.z_loss * sums.z
    if anchor is not None:
        total += anchor.beta * sums.penalty
    return total


def _chunk_loss(
    options: _Options, hidden_CD: jax.Array, unembedding_DV: jax.Array, part: _Tokens, anchor: _Anchor | None
) -> tuple[Aux, Callable[[], jax.Array]]:
    """The sums of one chunk, and a function that gives their gradient on the logits, (C, V)."""
    logits_CV = _logits(hidden_CD, unembedding_DV)
    largest_C = logits_CV.max(axis=1)
    # The barrier keeps one exponential a logit: fused into the sum and into the gradient it would be taken twice.
    exp_CV: jax.Array = jax.lax.optimization_barrier(jnp.exp(logits_CV - largest_C[:, None]))
    sum_C = exp_CV.sum(axis=1)
    log_z_C = jnp.log(sum_C) + largest_C
    nll_C = log_z_C - _pick(logits_CV, part.targets)
    weights_C = part.ce_weights

    def ce_gradient() -> jax.Array:
        onehot_CV = jnp.arange(logits_CV.shape[1]) == part.targets[:, None]
        policy_C = weights_C * (1 + 2 * options.z_loss * log_z_C) if options.z_loss else weights_C
        return exp_CV * (policy_C / sum_C)[:, None] - jnp.where(onehot_CV, weights_C[:, None], 0)

    sums = Aux((weights_C * nll_C).sum(), jnp.float32(0), (weights_C * jnp.square(log_z_C)).sum())
    if options.penalty is None:
        return sums, ce_gradient
    assert anchor is not None
    assert part.reference is not None
    penalty, reference = options.penalty, part.reference
    logp_CV = logits_CV - log_z_C[:, None]
    reference_logp_CV, _ = _log_probabilities(reference.hidden, anchor.unembedding)
    value_C = penalty.value(logp_CV, reference_logp_CV, part.targets)

    def gradient() -> jax.Array:
        penalty_CV = _penalty_gradient(penalty, logp_CV, reference_logp_CV, part.targets, value_C)
        return ce_gradient() + (anchor.beta * reference.weights)[:, None] * penalty_CV

    return sums._replace(penalty=(reference.weights * value_C).sum()), gradient


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


def _logits(hidden_CD: jax.Array, unembedding_DV: jax.Array) -> jax.Array:
    return jnp.dot(hidden_CD, unembedding_DV.astype(hidden_CD.dtype), preferred_element_type=jnp.float32)


def _log_probabilities(hidden_CD: jax.Array, unembedding_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits_CV = _logits(hidden_CD, unembedding_DV)
    log_z_C = jax.nn.logsumexp(logits_CV, axis=1)
    return logits_CV - log_z_C[:, None], log_z_C


def _pick(values_CV: jax.Array, indices_C: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_CV, indices_C[:, None], axis=1)[:, 0]


def _over_chunks(
    body: Callable[[Any, jax.Array, Any], tuple[Any, Any]],
    carry: Any,
    hidden_RTD: jax.Array,
    tokens: Any,
    vocabulary: int,
    chunk_tokens: int | None,
) -> tuple[Any, Any]:
    """Fold `body(carry, hidden_CD, tokens_C)` over chunks of time; outputs per token come back as (R, T, …)."""
    R, T = hidden_RTD.shape[:2]
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS * max(1, jax.sharding.get_abstract_mesh().size) // vocabulary)
    count = min(T, -(-R * T // chunk_tokens))
    length = -(-T // count)

    def cut(array_RT: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, count * length - T)] + [(0, 0)] * (array_RT.ndim - 2)
        padded = jnp.pad(array_RT, padding) if count * length > T else array_RT
        return jnp.moveaxis(padded.reshape(R, count, length, *array_RT.shape[2:]), 1, 0)

    def flat_body(carry: Any, chunk: Any) -> tuple[Any, Any]:
        flat = jax.tree.map(lambda array: array.reshape(R * length, *array.shape[2:]), chunk)
        carry, outputs = body(carry, *flat)
        return carry, jax.tree.map(lambda array: array.reshape(R, length, *array.shape[1:]), outputs)

    if count == 1:
        return flat_body(carry, (hidden_RTD, tokens))
    carry, outputs = jax.lax.scan(flat_body, carry, jax.tree.map(cut, (hidden_RTD, tokens)))

    def join(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 1).reshape(R, count * length, *array.shape[3:])[:, :T]

    return carry, jax.tree.map(join, outputs)


def token_nll(
    hidden: jax.Array, unembedding_DV: jax.Array, targets: jax.Array, *, chunk_tokens: int | None = None
) -> jax.Array:
    """Negative log-likelihood of each target, in float32 and the targets' shape; 0 where the target is −1.

    Args:
        hidden: (…, T, D).
        targets: (…, T).
        chunk_tokens: as for `token_loss`.
    """

    def chunk(carry: None, hidden_CD: jax.Array, targets_C: jax.Array) -> tuple[None, jax.Array]:
        logp_CV, _ = _log_probabilities(hidden_CD, unembedding_DV)
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
) -> tuple[jax.Array, jax.Array]:
    """KL(reference ‖ policy) and KL(policy ‖ reference) of each token, (…, T) in float32.

    Args:
        hidden: (…, T, D), as `reference_hidden`.
        chunk_tokens: as for `token_loss`.
    """

    def chunk(carry: None, hidden_CD: jax.Array, reference_CD: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        policy_CV, _ = _log_probabilities(hidden_CD, unembedding_DV)
        reference_CV, _ = _log_probabilities(reference_CD, reference_unembedding_DV)
        nowhere_C = jnp.zeros(hidden_CD.shape[0], jnp.int32)  # these penalties look at no target
        return carry, (
            forward.value(policy_CV, reference_CV, nowhere_C),
            reverse.value(policy_CV, reference_CV, nowhere_C),
        )

    rows = (-1, hidden.shape[-2], hidden.shape[-1])
    _, (forward_RT, reverse_RT) = _over_chunks(
        chunk, None, hidden.reshape(rows), reference_hidden.reshape(rows), unembedding_DV.shape[1], chunk_tokens
    )
    return forward_RT.reshape(hidden.shape[:-1]), reverse_RT.reshape(hidden.shape[:-1])
