"""One optimizer step and one validation step as pure functions, compiled by the loop.

Legend: S micro-batches, B rows of one, T tokens of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from holdfast.data.batches import Batch, slot_rows
from holdfast.evaluation.scoring import Sums, batch_sums
from holdfast.methods import ParameterPenalty, PenaltyTokens, TokenPenalty
from holdfast.models.kernels import target_platform
from holdfast.models.lora import merged
from holdfast.models.parameters import leaves_of, tree_of
from holdfast.objectives.token_loss import Penalised, token_loss
from holdfast.training.state import TrainState
from holdfast.types import Json, Tree

# A KL budget aims below its target, at this share of it, because single batches scatter around the mean.
BUDGET_AIM = 0.7
BUDGET_MEMORY = 0.875  # of the running mean, each step that measures a KL: a window of eight
# log(beta) follows the excess, log(mean / aim), at once by this factor, and drifts up or down by these shares of it.
BUDGET_GAIN, BUDGET_UP, BUDGET_DOWN = 2.0, 0.05, 0.02
BUDGET_EXCESS = (-1.0, 3.0)
BUDGET_RANGE = 1e4

DATA = "data"  # the axis of the mesh over which parameters are copied

KEEP = "keep/"  # before what is measured of budgets

# What the record of a step has, whatever the model: no auxiliary loss may have these names.
RECORDED = frozenset(
    {
        "step",
        "tokens",
        "kind",
        "loss",
        "ce",
        "penalty",
        "penalty_measured",
        "beta",
        "learning_rate",
        "grad_norm",
        "rows",
        "stage",
        "skipped",
        "skipped_in_a_row",
        "seconds",
        "memory",
    }
)


class Weights(NamedTuple):
    """How much each token counts, (S, B, T) each; each sums to 1 over the whole batch."""

    loss: jax.Array
    anchor: jax.Array
    methods: dict[str, jax.Array]  # in their token penalties, by name
    kept: tuple[jax.Array, ...] = ()  # in what budgets ask for, as `Controller.penalties` has it
    factors: jax.Array | None = None  # on `loss`, of methods that look at the whole batch


Loss = tuple[tuple[jax.Array, dict[str, jax.Array]], Tree]  # (loss, parts), gradients


class StepGradients(NamedTuple):
    """What a step minimises, its parts, and its gradients."""

    loss: jax.Array
    parts: dict[str, jax.Array]
    total: Tree  # that go to the optimizer
    rows: Tree  # of the rows' loss at the parameters themselves, before penalties on parameters and methods' changes
    old: Tree | None  # of the cross-entropy of old rows, where a method asks for them


def train_step(
    state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int
) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
    """Gradients over S micro-batches, normalised by the tokens of the whole batch, and one optimizer step."""
    assert batch.x.shape[0] == accumulate_steps, "a batch has as many micro-batches as the step accumulates"
    objective, methods, trained = state.objective, state.objective.methods, state.trained()
    found = loss_and_gradients(state, batch, key)
    loss, parts, norm = found.loss, found.parts, optax.global_norm(found.total)
    learning_rate = objective.schedule(state.step)
    updates, opt_state = objective.optimizer.update(found.total, state.opt_state, trained, learning_rate)
    updates = methods.updates(state.memory, updates, trained)
    params = optax.apply_updates(trained, updates)
    params = methods.weights(state.memory, params, state.trained_reference(), jnp.asarray(state.step) + 1)

    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def keep(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    measured = penalty_measured(state, batch)
    beta, kl_mean = next_beta(state, parts["penalty"], finite & measured)
    params = keep(params, trained)
    stepped = state.replace(
        step=state.step + 1,
        params=objective.completed(state.params, params),
        opt_state=keep(opt_state, state.opt_state),
        skipped=state.skipped + (1 - finite.astype(jnp.int32)),
        skipped_in_a_row=in_a_row,
        beta=beta,
        kl_mean=kl_mean,
    )
    if objective.keep is not None:
        sums = {int(name.removeprefix(KEEP)): parts.pop(name) for name in list(parts) if name.startswith(KEEP)}
        held = objective.keep.stepped(state.keep, batch, sums, jnp.asarray(state.step), finite)
        parts = {**parts, **objective.keep.records(state.keep, held)}
        stepped = stepped.replace(keep={**state.keep, **held})
    if state.ema is not None:
        stepped = stepped.replace(ema=keep(averaged(state.ema, params, objective.ema), state.ema))
    if methods.watching:
        taken = jax.tree.map(jnp.subtract, params, trained)
        parts = {**parts, **methods.measure(state.memory, found.rows, found.old, taken, trained)}
        stepped = stepped.replace(memory=keep(methods.observe(state.memory, found.rows, taken, trained), state.memory))
    meta = {
        **parts,
        "penalty_measured": measured,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(learning_rate, jnp.float32),
        "skipped": stepped.skipped,
        "skipped_in_a_row": in_a_row,
        "beta": state.beta,
    }
    return stepped, loss, meta


def loss_and_gradients(state: TrainState, batch: Batch, key: jax.Array) -> StepGradients:
    """What a step minimises, its parts, and the gradients that go to the optimizer."""
    methods = state.objective.methods
    old_gradients = None
    if methods.needs_old_gradients:
        assert batch.old_mask is not None, "a method that asks for gradients of old rows gets batches that mark them"
        old_gradients = gradients_of_old(state, batch, key)
        batch = batch._replace(y=jnp.where(batch.old_mask > 0, -1, batch.y))
    factors, measured = loss_factors(state, batch, key)
    (loss, parts), gradients = accumulated(micro_loss, state, batch, key, factors)
    parts = {**measured, **parts}
    rows = gradients
    if state.objective.sam:
        _, gradients = accumulated(micro_loss, uphill(state, gradients), batch, key, factors)
    if methods.having("parameter_penalty"):
        reference = state.trained_reference()
        gradients, added, values = methods.penalise(state.memory, state.trained(), reference, gradients)
        loss = loss + added
        parts = {**parts, **{f"method/{name}": value for name, value in values.items()}}
    total = methods.gradients(state.memory, gradients, old_gradients)
    return StepGradients(loss, parts, total, rows, old_gradients)


def _trained(state: TrainState, batch: Batch) -> Batch:
    """A batch as the cross-entropy sees it: under budgets without the targets of control rows."""
    return batch if state.objective.keep is None else state.objective.keep.trained(batch)


def uphill(state: TrainState, gradients: Tree) -> TrainState:
    """The state at θ + ρ g/‖g‖, where sharpness-aware minimisation (SAM) takes its gradient; at θ where g is 0."""
    length = state.objective.sam / jnp.maximum(optax.global_norm(gradients), 1e-30)
    moved = jax.tree.map(lambda own, g: own + (length * g).astype(own.dtype), state.trained(), gradients)
    return state.replace(params=state.objective.completed(state.params, moved))


def gradients_of_old(state: TrainState, batch: Batch, key: jax.Array) -> Tree:
    """Gradients of the cross-entropy of old rows over their tokens; where they lie in slots, from these alone."""
    held = batch if batch.slots is None else slot_rows(batch)
    if held.x.shape[1] == 0:
        return jax.tree.map(jnp.zeros_like, state.trained())
    targets = jnp.where(held.old_mask > 0, held.y, -1)
    return accumulated(_cross_entropy, state, held._replace(y=targets), key)[1]


def averaged(ema: Tree, params: Tree, decay: float) -> Tree:
    """decay · ema + (1 − decay) · params, in float32.

    >>> float(averaged({"w": jnp.float32(1.0)}, {"w": jnp.float32(3.0)}, 0.75)["w"])
    1.5
    """
    return jax.tree.map(lambda mean, new: mean + (1 - decay) * (new.astype(jnp.float32) - mean), ema, params)


def accumulated(
    loss_fn: Callable[..., Any], state: TrainState, batch: Batch, key: jax.Array, factors: jax.Array | None = None
) -> Loss:
    """Sum over micro-batches of a loss that is already normalised, with its parts and its gradient.

    Args:
        factors: of `loss_factors`.
    """
    weights = token_weights(state, batch)._replace(factors=factors)
    model, num_micro = state.objective.model, batch.x.shape[0]
    shards = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    if shards == 1 or not model.kind.sums_rows(model.options):
        return _summed(loss_fn, state, batch, weights, key, num_micro)

    # Each shard of `data` adds up its own micro-batches, and the sums meet once a step. Inside, the compiler splits
    # over the other axes alone: it sums a layer's gradients into their fsdp shards, and never over `data`.
    def of_shard(state: TrainState, batch: Batch, weights: Weights, key: jax.Array) -> Loss:
        own = _summed(loss_fn, state, batch, weights, key, num_micro * shards)
        total: Loss = jax.lax.psum(own, DATA)
        return total

    rows, whole = PartitionSpec(None, DATA), PartitionSpec()
    split = jax.shard_map(
        of_shard, in_specs=(whole, rows, rows, whole), out_specs=whole, axis_names={DATA}, check_vma=False
    )
    total: Loss = split(state, batch, weights, key)
    return total


def _summed(
    loss_fn: Callable[..., Any], state: TrainState, batch: Batch, weights: Weights, key: jax.Array, num_parts: int
) -> Loss:
    """The sum over the micro-batches of a batch, one after the other.

    Args:
        num_parts: micro-batches of the step, those of other shards among them.
    """
    trained, num_micro = state.trained(), batch.x.shape[0]
    if num_micro > 1 and (target_platform() != "cpu" or not jax.sharding.get_abstract_mesh().empty):
        return _summed_in_place(loss_fn, state, batch, weights, key, num_parts)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def one(index: Tree, micro: Batch, weight: Tree) -> Loss:
        found: Loss = gradient(trained, state, micro, weight, jax.random.fold_in(key, index), num_parts)
        return found

    def body(total: Loss, item: Tree) -> tuple[Loss, None]:
        index, micro, weight = item
        return jax.tree.map(jnp.add, total, one(index, micro, weight)), None

    first = one(0, *jax.tree.map(lambda leaf: leaf[0], (batch, weights)))
    if num_micro == 1:
        return first
    rest = jax.tree.map(lambda leaf: leaf[1:], (batch, weights))
    summed: Loss = jax.lax.scan(body, first, (jnp.arange(1, num_micro), *rest))[0]
    return summed


def _summed_in_place(
    loss_fn: Callable[..., Any], state: TrainState, batch: Batch, weights: Weights, key: jax.Array, num_parts: int
) -> Loss:
    """As `_summed`, with one program for all micro-batches and one copy of the gradients.

    Each backward pass adds to the sum where it lies, layer by layer, so that no micro-batch has gradients of its own.
    """
    trained = state.trained()
    sums = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), trained)

    def body(_: None, item: Tree) -> tuple[None, Tree]:
        index, micro, weight = item

        def loss(trained: Tree) -> Tree:
            return loss_fn(trained, state, micro, weight, jax.random.fold_in(key, index), num_parts)

        pull: Any  # JAX's own types call it a function alone
        value, pull, parts = jax.vjp(loss, trained, has_aux=True)
        pull.with_refs(sums)(jnp.ones_like(value))
        return None, (value, parts)

    found = jax.lax.scan(body, None, (jnp.arange(batch.x.shape[0]), batch, weights))[1]
    return jax.tree.map(lambda each: each.sum(axis=0), found), jax.tree.map(jax.freeze, sums)


def token_weights(state: TrainState, batch: Batch) -> Weights:
    """Weights of every token in the cross-entropy and in each penalty, which has tokens of its own."""
    objective, kept = state.objective, ()
    if objective.keep is not None:
        given = objective.keep.row_weights(state.keep, batch)
        kept = (*given.control, *(() if given.anchor is None else (given.anchor,)))
        batch = _trained(state, batch)
    counted = _counted(batch)
    loss = _normalised(counted)

    def seen(tokens: PenaltyTokens) -> jax.Array:
        if tokens == "loss":
            return loss
        if tokens == "new":
            assert batch.old_mask is not None, "a penalty on new rows gets batches that mark the old ones"
            return _normalised(counted & (batch.old_mask == 0))
        return _normalised((batch.padding_mask if batch.penalty_mask is None else batch.penalty_mask) > 0)

    anchor = loss
    if isinstance(objective.penalty, TokenPenalty) and (
        objective.penalty.tokens == "new" or batch.penalty_mask is not None
    ):
        anchor = seen(objective.penalty.tokens)
    penalising = objective.methods.having("token_penalty")
    own = {name: seen(each.config.penalty_tokens) for name, each in penalising.items()}
    return Weights(loss, anchor, own, kept)


def loss_factors(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Factors on each token's weight by methods that look at a whole batch and by budgets; each method's mean factor.

    What leaves the loss leaves its divisor; under budgets that of new rows, since old ones have an expected number.
    """
    trained, keep = _trained(state, batch), state.objective.keep
    factors, left, measured = batch_factors(state, trained, key)
    if keep is not None:
        mixed = keep.row_weights(state.keep, batch, left).factors
        return mixed if factors is None else mixed * factors, measured
    if factors is not None and left is not None:
        factors = factors * (jnp.maximum(_counted(trained).sum(), 1) / jnp.maximum(left.sum(), 1))
    return factors, measured


def _counted(batch: Batch) -> jax.Array:
    counted: jax.Array = (batch.padding_mask > 0) & (batch.y >= 0)
    return counted


def batch_factors(
    state: TrainState, batch: Batch, key: jax.Array
) -> tuple[jax.Array | None, jax.Array | None, dict[str, jax.Array]]:
    """Factors by methods that look at a whole batch, the tokens that they leave in the divisor, and mean factors.

    The token losses that they ask for cost one forward pass without gradients; (None, None, {}) where no method asks.
    """
    weighing = state.objective.methods.having("batch_weights")
    if not weighing:
        return None, None, {}
    asked = {each.config.weighs_by for each in weighing.values()}
    nll = {whose: _batch_losses(state, batch, key, whose) for whose in sorted(asked)}
    counted = _counted(batch)
    tokens, left, factors = jnp.maximum(counted.sum(), 1), counted, jnp.ones(counted.shape, jnp.float32)
    measured = {}
    for name, method in weighing.items():
        memory = None if state.memory is None else state.memory.get(name)
        given = method.batch_weights(memory, nll[method.config.weighs_by], batch)
        factors = factors * given.factor
        left = left if given.counted is None else left & given.counted
        measured[f"method/{name}"] = jnp.where(counted, given.factor, 0).sum() / tokens
    return factors, None if left is counted else left, measured


def _batch_losses(state: TrainState, batch: Batch, key: jax.Array, whose: str) -> jax.Array:
    """The loss of every token of a batch, (S, B, T), by the model as the step itself sees it, or by the reference."""
    params = state.reference_weights() if whose == "reference" else state.params

    def one(item: tuple[jax.Array, Batch]) -> jax.Array:
        index, micro = item
        return state.token_losses(params, micro, None if whose == "reference" else jax.random.fold_in(key, index))

    losses: jax.Array = jax.lax.map(one, (jnp.arange(batch.x.shape[0]), batch))
    return losses


def _normalised(mask: jax.Array) -> jax.Array:
    weights = mask.astype(jnp.float32)
    return weights / jnp.maximum(weights.sum(), 1.0)


def micro_loss(
    trained: Tree, state: TrainState, micro: Batch, weights: Weights, key: jax.Array, num_micro: int
) -> Tree:
    """The loss of a micro-batch, already normalised, and its parts; differentiable in the trained parameters."""
    objective, methods, penalty = state.objective, state.objective.methods, state.objective.penalty
    params, model = objective.completed(state.params, trained), objective.model
    hidden, losses = state.hidden_states(params, micro, key)
    arguments: Json = {"z_loss": objective.z_loss, "tied": model.tied, "softcap": model.softcap}
    given = methods.token_penalties()
    penalties = {name: Penalised(each, weight, weights.methods[name]) for name, (each, weight) in given.items()}
    if isinstance(penalty, TokenPenalty):
        penalties = {"": Penalised(penalty, state.beta, weights.anchor), **penalties}
    if objective.keep is not None:
        asked = zip(objective.keep.penalties(), weights.kept, strict=True)
        penalties |= {
            f"{KEEP}{place}": Penalised(each, weight, own) for place, ((each, weight), own) in enumerate(asked)
        }
    in_slots = objective.reference_on_old and micro.slots is not None
    nothing_old = in_slots and micro.slots.size == 0
    if (objective.needs_reference or penalties) and not nothing_old:
        assert state.reference is not None, "a stage with a penalty has a reference"
        reference = jax.lax.stop_gradient(state.reference_weights())
        arguments |= {
            "penalties": tuple(penalties.values()),
            "reference_hidden": state.hidden_states(reference, slot_rows(micro) if in_slots else micro)[0],
            "reference_unembedding_DV": model.stored_unembedding(reference),
            "reference_blocks": micro.slots.shape[0] if in_slots else 1,
        }
    arguments |= {"token_weights": methods.token_weights(state.memory), "ce_factors": weights.factors}
    total, aux = token_loss(hidden, model.stored_unembedding(params), micro.y, weights.loss, **arguments)
    value = aux.penalty if isinstance(penalty, TokenPenalty) else jnp.float32(0)
    if isinstance(penalty, ParameterPenalty):
        # A distance between parameters belongs to the step, not to a row: each micro-batch brings an equal part.
        value = penalty.value(plain(state, params), plain(state, state.reference_params())) / num_micro
        total = total + state.beta * value
    found = (jnp.float32(0),) * len(penalties) if nothing_old else aux.penalties
    by_name = zip(penalties, found, strict=True)
    measured = {name if name.startswith(KEEP) else f"method/{name}": each for name, each in by_name if name}
    parts = {"ce": aux.ce, "penalty": value, **measured}
    for name, (auxiliary, weight) in losses.items():
        assert name not in RECORDED, f"an auxiliary loss of the model has the name {name!r}, which records use"
        # The mean over micro-batches: it is of a batch, not of its tokens.
        parts[name] = auxiliary / num_micro
        total = total + weight * parts[name]
    return total, parts


def _cross_entropy(
    trained: Tree, state: TrainState, micro: Batch, weights: Weights, key: jax.Array, _num_micro: int
) -> Tree:
    """The cross-entropy of a micro-batch alone."""
    objective = state.objective
    params, model = objective.completed(state.params, trained), objective.model
    hidden, _ = state.hidden_states(params, micro, key)
    matrix = model.stored_unembedding(params)
    total, aux = token_loss(hidden, matrix, micro.y, weights.loss, tied=model.tied, softcap=model.softcap)
    return total, {"ce": aux.ce}


def plain(state: TrainState, params: Tree) -> Tree:
    """Parameters whose adapters, if there are any, are added to their kernels."""
    return params if state.base is None else tree_of(merged(leaves_of(params)))


def penalty_measured(state: TrainState, batch: Batch) -> jax.Array:
    """Whether the penalty had anything to look at in a batch; False where the stage has none."""
    penalty = state.objective.penalty
    weights = token_weights(state, batch).anchor if isinstance(penalty, TokenPenalty) else None
    return jnp.asarray(penalty is not None if weights is None else (weights > 0).any())


def next_beta(state: TrainState, kl: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Beta for the next step and the running mean of the KL: as they are, or moved by the KL budget's controller.

    Beta follows the mean at once where it comes near the target, so that nothing winds up that would have to
    unwind, and drifts faster upwards than downwards: the target is a ceiling for the mean.

    Args:
        kl: of this step.
        counts: whether it was measured, and the step not skipped; where it was not, nothing changes.
    """
    target = state.objective.target
    if target is None or state.objective.penalty is None:
        return state.beta, state.kl_mean
    fresh = jnp.stack([kl, jnp.ones_like(kl)])
    kl_mean = BUDGET_MEMORY * state.kl_mean + (1 - BUDGET_MEMORY) * fresh
    now = _excess(kl_mean, target)
    before = jnp.where(state.kl_mean[1] > 0, _excess(state.kl_mean, target), now)
    drift = jnp.where(now > 0, BUDGET_UP, BUDGET_DOWN) * now
    moved = state.beta * jnp.exp(BUDGET_GAIN * (now - before) + drift)
    moved = jnp.clip(moved, 1.0 / BUDGET_RANGE, BUDGET_RANGE)
    return jnp.where(counts, moved, state.beta), jnp.where(counts, kl_mean, state.kl_mean)


def _excess(kl_mean: jax.Array, target: float) -> jax.Array:
    """How far a mean (sum, weight) is above what a budget aims at, in powers of e, within bounds."""
    mean = kl_mean[0] / jnp.maximum(kl_mean[1], 1e-30)
    excess: jax.Array = jnp.clip(jnp.log(jnp.maximum(mean, 1e-30) / (BUDGET_AIM * target)), *BUDGET_EXCESS)
    return excess


def val_step(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
    """Sum of the NLL and number of tokens over S micro-batches, and the last one's sums."""

    def body(total: Tree, micro: Batch) -> Tree:
        sums = batch_sums(state.objective.model, state.params, micro)
        return (total[0] + sums.nll, total[1] + sums.tokens), sums

    zero = (jnp.float32(0), jnp.float32(0))
    (loss_sum, token_count), each = jax.lax.scan(body, zero, batch)
    return loss_sum, token_count, jax.tree.map(lambda leaf: leaf[-1], each)


def probe_step(state: TrainState, batch: Batch, key: jax.Array, probes: tuple[Callable[..., Any], ...]) -> Tree:
    """What probes see of a step that is about to be taken: scalars by name; the step itself is another program."""
    objective, trained = state.objective, state.trained()
    gradients = loss_and_gradients(state, batch, key).total
    learning_rate = objective.schedule(state.step)
    updates, _ = objective.optimizer.update(gradients, state.opt_state, trained, learning_rate)
    updates = objective.methods.updates(state.memory, updates, trained)
    found: dict[str, jax.Array] = {}
    for probe in probes:
        found |= probe(state, batch, gradients, updates)
    return found
