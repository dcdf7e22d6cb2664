"""Probes: what can be seen of a step that is about to be taken, in scalars, every few steps.

A probe is a registered pure function of (state, batch, gradients, updates). Probes run in a compiled program of their
own, so that the train step is the same with and without them, to the last bit. `logging/probes` names them.
"""

import jax
import jax.numpy as jnp
import optax

from holdfast.data.batches import Batch
from holdfast.models.parameters import layer_number, leaves_of
from holdfast.training.state import TrainState
from holdfast.training.step import accumulated, loss_factors, micro_loss
from holdfast.types import Tree

Scalars = dict[str, jax.Array]

# Below this share of the cross-entropy's gradient norm the penalty's gradient is rounding, as right after a snapshot.
NEGLIGIBLE = 1e-3


def penalty_cosine(state: TrainState, batch: Batch, _gradients: Tree, _updates: Tree) -> Scalars:
    """Cosine between the gradients of the penalty and of the cross-entropy on the same batch.

    At 1 the penalty only rescales plain training and cannot hold the model back. NaN, which is recorded as null, where
    the penalty's gradient is too small to have a direction.
    """
    if state.objective.penalty is None:
        return {"penalty_cosine": jnp.float32(jnp.nan)}

    def part(name: str) -> Tree:
        def loss_fn(params: Tree, state: Tree, micro: Batch, *rest: Tree) -> Tree:
            without = state.replace(beta=jnp.zeros_like(state.beta))
            plain, parts = micro_loss(params, without, micro, *rest)
            if name == "ce":
                return plain, parts
            full, parts = micro_loss(params, state.replace(beta=jnp.ones_like(state.beta)), micro, *rest)
            return full - plain, parts

        return accumulated(loss_fn, state, batch, key, factors)[1]

    key = jax.random.key(0)
    factors, _ = loss_factors(state, batch, key)
    pull, push = part("penalty"), part("ce")
    dot = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(pull), jax.tree.leaves(push), strict=True))
    pulls, pushes = optax.global_norm(pull), optax.global_norm(push)
    cosine = dot / jnp.maximum(pulls * pushes, 1e-30)
    return {"penalty_cosine": jnp.where(pulls > NEGLIGIBLE * pushes, cosine, jnp.nan)}


def update_norms(_state: TrainState, _batch: Batch, _gradients: Tree, updates: Tree) -> Scalars:
    """The norm of each module's update; of stacked layers one for each layer, as far as they are trained."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in leaves_of(updates).items():
        top = path.split("/")[0]
        parts = {top: jnp.square(leaf.astype(jnp.float32)).sum()}
        number = layer_number(path)
        if number is not None:  # of layers that are not stacked, each with its number in its name
            parts = {f"layers/{number}": parts[top]}
        elif top == "layers":
            by_layer = jnp.square(leaf.astype(jnp.float32)).reshape(leaf.shape[0], -1).sum(axis=1)
            parts = {f"layers/{index}": by_layer[index] for index in range(leaf.shape[0])}
        for name, square in parts.items():
            squares[name] = squares.get(name, jnp.float32(0)) + square
    return {f"update_norm/{name}": jnp.sqrt(square) for name, square in squares.items()}


def hidden_drift(state: TrainState, batch: Batch, _gradients: Tree, _updates: Tree) -> Scalars:
    """‖h − h_ref‖ / ‖h_ref‖ over the real tokens of the first micro-batch; nothing where there is no reference."""
    reference = state.reference_weights()
    if reference is None:
        return {}
    micro = jax.tree.map(lambda leaf: leaf[0], batch)
    own, frozen = (state.hidden_states(params, micro)[0].astype(jnp.float32) for params in (state.params, reference))
    real = (micro.padding_mask > 0)[..., None]
    moved, length = (jnp.sqrt(jnp.where(real, jnp.square(x), 0).sum()) for x in (own - frozen, frozen))
    return {"hidden_drift": moved / jnp.maximum(length, 1e-30)}
