"""How much each row of some steps moved a loss, to first order, through the optimizer.

A row that is left out changes the gradient of its step by δ. The loss after the last step changes by ⟨λ, δ⟩, where λ is
the loss's gradient carried back through the steps: through the learning rate, the second moments that Adam divides by,
the momentum by which a gradient acts on in the steps after its own, and the gradients of later steps, which are taken
where the weights would then be.

Shapes: S micro-batches, B rows of one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from holdfast.analysis.replay import Replay, Snapshot
from holdfast.analysis.target import Target
from holdfast.data.batches import Batch
from holdfast.training.compile import tracing_for
from holdfast.training.state import Objective, TrainState
from holdfast.training.step import loss_and_gradients
from holdfast.types import Tree

ROWS_AT_ONCE = 8  # whose gradients are in memory together


def row_effects(
    replay: Replay, target: Target, start: Snapshot, end: int, told: Callable[[int], object] = lambda _: None
) -> tuple[NDArray[np.float64], float]:
    """How much a loss after some steps would change, were single rows of them left out: (steps, rows of a step).

    Also the loss. Rows without a token that the loss counts change nothing: 0.

    Args:
        start: the state before the first of the steps.
        end: the step after the last.
        told: is called with the number of steps that are done.
    """
    state = replay.advance(start.state(), end)
    loss, back = target.losses(state).mean, target.gradient(state)
    moments = jax.tree.map(jnp.zeros_like, _floats(state.opt_state))
    found = []
    for step in reversed(range(start.step, end)):
        state = replay.entered(replay.advance(start.state(), step))
        batch = replay.loop.place(replay.batch(step))
        with tracing_for(replay.trainer.topology.mesh):
            back, moments, effects = _carried_back(state.objective)(
                state, batch, replay.loop.steps.key(state), back, moments
            )
        found.append(np.asarray(effects, np.float64).reshape(-1))
        curriculum = replay.curriculum
        begins = step == curriculum.stage_start(curriculum.stage_at(step))
        if begins and curriculum.stages[curriculum.stage_at(step)].reset_optimizer:
            moments = jax.tree.map(jnp.zeros_like, moments)
        told(end - step)
    return np.stack(found[::-1]), loss


@functools.lru_cache(maxsize=8)
def _carried_back(objective: Objective) -> Any:
    """The compiled way back through one step, for states of an objective."""
    return jax.jit(functools.partial(carried_back, objective))


def carried_back(
    objective: Objective, state: TrainState, batch: Batch, key: jax.Array, back: Tree, moments: Tree
) -> tuple[Tree, Tree, jax.Array]:
    """A loss's gradients in weights and optimizer's state, from after a step to before it, and its rows' effects.

    Args:
        back: in the trained weights after the step.
        moments: in the floating numbers of the optimizer's state after it.
    """
    learning_rate = objective.schedule(state.step)
    floats, trained = _floats(state.opt_state), state.trained()

    def gradients_at(trained: Tree) -> Tree:
        return loss_and_gradients(state.replace(params=objective.completed(state.params, trained)), batch, key).total

    def update(gradients: Tree, floats: Tree, trained: Tree) -> tuple[Tree, Tree]:
        updates, after = objective.optimizer.update(
            gradients, _with_floats(state.opt_state, floats), trained, learning_rate
        )
        return optax.apply_updates(trained, updates), _floats(after)

    gradients, pull_gradients = jax.vjp(gradients_at, trained)
    _, pull = jax.vjp(update, gradients, floats, trained)
    # A second moment of 0, of weights that never had a gradient, has no derivative: nothing goes through it.
    by_gradient, by_moments, by_weights = jax.tree.map(
        lambda leaf: jnp.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0), pull((back, moments))
    )
    (curved,) = pull_gradients(by_gradient)
    by_weights = jax.tree.map(jnp.add, by_weights, curved)
    return by_weights, by_moments, _effects(state, batch, by_gradient)


def _effects(state: TrainState, batch: Batch, direction: Tree) -> jax.Array:
    """⟨direction, change of the batch's gradient⟩ for each row that is left out, (S, B).

    With G the gradient of a row's tokens, n their number and N those of the batch, whose gradient is g, the change is
    (n g − G) / (N − n).
    """
    objective, trained = state.objective, state.trained()
    counted = (batch.padding_mask > 0) & (batch.y >= 0)
    if batch.kept is not None:
        counted &= batch.kept[..., :1] == 0  # control rows and rows of budgets are for their own weights
    num_SB = counted.sum(-1).astype(jnp.float32)
    used = batch._replace(slots=None, kept=None)

    def along(row: Batch) -> jax.Array:
        one = jax.tree.map(lambda leaf: leaf[None], row)

        def loss(trained: Tree) -> jax.Array:
            return state.token_losses(objective.completed(state.params, trained), one).sum()

        products = jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(trained), direction))
        return jnp.stack([jnp.asarray(each, jnp.float32) for each in products]).sum()

    S, B = batch.x.shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(S * B, *leaf.shape[2:]), used)
    along_SB = jax.lax.map(along, flat, batch_size=min(ROWS_AT_ONCE, S * B)).reshape(S, B)
    along_SB = jnp.where(num_SB > 0, along_SB, 0)
    total = jnp.maximum(num_SB.sum(), 1)
    left = jnp.maximum(total - num_SB, 1)
    return jnp.where(num_SB > 0, (num_SB * along_SB.sum() / total - along_SB) / left, 0)


def _floats(tree: Tree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _with_floats(tree: Tree, floats: list[Any]) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    given = iter(floats)
    return jax.tree.unflatten(
        structure, [next(given) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
    )
