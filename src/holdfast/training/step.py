"""One optimizer step and one validation step as pure functions, compiled by the loop.

Legend: S micro-batches, B rows of one, T tokens of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from holdfast.data.batches import Batch
from holdfast.evaluation.scoring import Sums, batch_sums
from holdfast.models.decoder import unembedding
from holdfast.models.lora import merged
from holdfast.objectives import ParameterPenalty, TokenPenalty
from holdfast.objectives.token_loss import token_loss
from holdfast.training.state import KLDivergenceTrainState, TrainState
from holdfast.training.trainable import leaves_of, tree_of

# A KL budget moves log(beta) by at most this much a step, so that one odd batch cannot throw it off.
BUDGET_RATE = 0.05
BUDGET_RANGE = 1e4


def train_step(
    state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int
) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
    """Gradients over S micro-batches, normalised by the tokens of the whole batch, and one optimizer step."""
    assert batch.x.shape[0] == accumulate_steps, "a batch has as many micro-batches as the step accumulates"
    (loss, parts), gradients = accumulated(_micro_loss, state, batch, key)
    norm = optax.global_norm(gradients)
    learning_rate = state.objective.schedule(state.step)
    trained = state.objective.trained(state.params)
    updates, opt_state = state.objective.optimizer.update(gradients, state.opt_state, trained, learning_rate)
    params = optax.apply_updates(trained, updates)

    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    params = keep(params, trained)
    stepped = state.replace(
        step=state.step + 1,
        params=state.objective.completed(state.params, params),
        opt_state=keep(opt_state, state.opt_state),
        skipped=state.skipped + (1 - finite.astype(jnp.int32)),
        skipped_in_a_row=in_a_row,
    )
    if state.ema is not None:
        stepped = stepped.replace(ema=keep(averaged(state.ema, params, state.objective.ema), state.ema))
    meta = {
        **parts,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(learning_rate, jnp.float32),
        "skipped": stepped.skipped,
        "skipped_in_a_row": in_a_row,
    }
    if isinstance(state, KLDivergenceTrainState):
        meta["beta"] = state.beta
        stepped = stepped.replace(beta=next_beta(state, parts["penalty"], finite))
    return stepped, loss, meta


def averaged(ema: Any, params: Any, decay: float) -> Any:
    """decay · ema + (1 − decay) · params, in float32.

    >>> float(averaged({"w": jnp.float32(1.0)}, {"w": jnp.float32(3.0)}, 0.75)["w"])
    1.5
    """
    return jax.tree.map(lambda mean, new: mean + (1 - decay) * (new.astype(jnp.float32) - mean), ema, params)


def accumulated(loss_fn: Any, state: TrainState, batch: Batch, key: jax.Array) -> Any:
    """Sum over micro-batches of a loss that is already normalised, with its parts and its gradient."""
    weights, num_micro = token_weights(state, batch), batch.x.shape[0]
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    trained = state.objective.trained(state.params)

    def one(index: Any, micro: Batch, weight: Any) -> Any:
        return gradient(trained, state, micro, weight, jax.random.fold_in(key, index), num_micro)

    first = one(0, *jax.tree.map(lambda leaf: leaf[0], (batch, weights)))
    if num_micro == 1:
        return first

    def body(total: Any, item: Any) -> Any:
        index, micro, weight = item
        return jax.tree.map(jnp.add, total, one(index, micro, weight)), None

    rest = jax.tree.map(lambda leaf: leaf[1:], (batch, weights))
    return jax.lax.scan(body, first, (jnp.arange(1, num_micro), *rest))[0]


def token_weights(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Weights of every token in the cross-entropy and in the penalty; each sums to 1 over the whole batch."""
    counted = (batch.padding_mask > 0) & (batch.y >= 0)
    loss = _normalised(counted)
    penalty = state.objective.penalty
    if not isinstance(penalty, TokenPenalty) or penalty.tokens == "loss" or batch.penalty_mask is None:
        return loss, loss
    return loss, _normalised(batch.penalty_mask > 0)


def _normalised(mask: jax.Array) -> jax.Array:
    weights = mask.astype(jnp.float32)
    return weights / jnp.maximum(weights.sum(), 1.0)


def hidden_states(state: TrainState, params: Any, micro: Batch, key: jax.Array | None) -> jax.Array:
    """Hidden states (B, T, D) of a micro-batch; with a key, under dropout."""
    dropout = key is not None and state.objective.model.dropout > 0
    states: jax.Array = state.apply_fn(
        {"params": params},
        micro.x,
        segment_ids=micro.segment_ids,
        positions=micro.positions,
        deterministic=not dropout,
        method="hidden",
        rngs={"dropout": key} if dropout else None,
    )
    return states


def _micro_loss(trained: Any, state: TrainState, micro: Batch, weights: Any, key: jax.Array, num_micro: int) -> Any:
    objective, penalty = state.objective, state.objective.penalty
    params = objective.completed(state.params, trained)
    hidden = hidden_states(state, params, micro, key)
    arguments: dict[str, Any] = {"z_loss": objective.z_loss, "tied": objective.model.tie_embeddings}
    if isinstance(penalty, TokenPenalty):
        assert isinstance(state, KLDivergenceTrainState)
        assert state.reference is not None, "a stage with a penalty has a reference"
        reference = jax.lax.stop_gradient(state.reference_params())
        arguments |= {
            "penalty": penalty,
            "beta": state.beta,
            "reference_hidden": hidden_states(state, reference, micro, None),
            "reference_unembedding_DV": unembedding(reference, objective.model),
            "penalty_weights": weights[1],
        }
    total, aux = token_loss(hidden, unembedding(params, objective.model), micro.y, weights[0], **arguments)
    value = aux.penalty
    if isinstance(penalty, ParameterPenalty):
        assert isinstance(state, KLDivergenceTrainState)
        # A distance between parameters belongs to the step, not to a row: each micro-batch brings an equal part.
        value = penalty.value(plain(state, params), plain(state, state.reference_params())) / num_micro
        total = total + state.beta * value
    return total, {"ce": aux.ce, "penalty": value}


def plain(state: TrainState, params: Any) -> Any:
    """Parameters whose adapters, if there are any, are added to their kernels."""
    return params if state.base is None else tree_of(merged(leaves_of(params)))


def next_beta(state: KLDivergenceTrainState, measured: jax.Array, finite: jax.Array) -> jax.Array:
    """Beta for the next step: unchanged, or moved by the KL budget's controller towards the target."""
    target = state.objective.target
    if target is None or state.objective.penalty is None:
        return state.beta
    error = jnp.clip(measured / target - 1.0, -1.0, 1.0)
    moved = state.beta * jnp.exp(BUDGET_RATE * error)
    moved = jnp.clip(moved, 1.0 / BUDGET_RANGE, BUDGET_RANGE)
    return jnp.where(finite, moved, state.beta)


def val_step(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
    """Sum of the NLL and number of tokens over S micro-batches, and the last one's sums."""

    def body(total: Any, micro: Batch) -> Any:
        sums = batch_sums(state.apply_fn, state.objective.model, state.params, micro)
        return (total[0] + sums.nll, total[1] + sums.tokens), sums

    zero = (jnp.float32(0), jnp.float32(0))
    (loss_sum, token_count), each = jax.lax.scan(body, zero, batch)
    return loss_sum, token_count, jax.tree.map(lambda leaf: leaf[-1], each)


def penalty_cosine(state: KLDivergenceTrainState, batch: Batch, key: jax.Array) -> jax.Array:
    """Cosine between the gradients of the penalty and of the cross-entropy on the same batch.

    At 1 the penalty only rescales plain training and cannot hold the model back.
    """

    def part(name: str) -> Any:
        def loss_fn(params: Any, state: Any, micro: Batch, *rest: Any) -> Any:
            without = state.replace(beta=jnp.zeros_like(state.beta))
            plain, parts = _micro_loss(params, without, micro, *rest)
            if name == "ce":
                return plain, parts
            full, parts = _micro_loss(params, state.replace(beta=jnp.ones_like(state.beta)), micro, *rest)
            return full - plain, parts

        return accumulated(loss_fn, state, batch, key)[1]

    pull, push = part("penalty"), part("ce")
    dot = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(pull), jax.tree.leaves(push), strict=True))
    return dot / jnp.maximum(optax.global_norm(pull) * optax.global_norm(push), 1e-30)
