"""What is carried from step to step, and how it changes when a stage is entered."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state

from holdfast import registry
from holdfast.curriculum import Stage
from holdfast.models.config import ModelSpec
from holdfast.optim import Optimizer, Schedule


@dataclass(frozen=True)
class Objective:
    """What a compiled step minimises and how; a new one means a new compilation, so there is one per stage kind.

    Args:
        model: the decoder's specification.
        optimizer, schedule: how gradients become updates.
        z_loss: weight of the squared log-normaliser.
        penalty: the registered penalty, None where the stage has none (no reference forward is compiled then).
        target: KL budget in nats per token, None where beta is fixed.
    """

    model: ModelSpec
    optimizer: Optimizer
    schedule: Schedule
    z_loss: float = 0.0
    penalty: Any = None
    target: float | None = None

    def penalised(self, names: tuple[str, ...], target: float | None) -> "Objective":
        """The same objective with a registered penalty, if one is named."""
        if not names:
            return self
        assert len(names) == 1, "a step has one penalty"
        return dataclasses.replace(self, penalty=registry.penalties.get(names[0]), target=target)


class TrainState(train_state.TrainState):
    """Parameters, optimizer state and counts of skipped updates."""

    skipped: jax.Array  # updates skipped in all, because loss or gradient was not finite
    skipped_in_a_row: jax.Array
    objective: Objective = struct.field(pytree_node=False)

    def arrays(self) -> dict[str, Any]:
        """The arrays that a checkpoint holds; what is static is derived from the config and the step."""
        return {
            "step": self.step,
            "params": self.params,
            "opt_state": self.opt_state,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def entered(self, stage: Stage, objective: Objective) -> Self:
        """The state at the start of a stage."""
        state = self.replace(objective=objective)
        if stage.reset_optimizer:
            fresh = jax.jit(objective.optimizer.init, out_shardings=shardings_of(self.opt_state))(self.params)
            state = state.replace(opt_state=fresh)
        assert isinstance(state, type(self))
        return state


class KLDivergenceTrainState(TrainState):
    """Train state carrying a frozen reference-policy snapshot and KL weight."""

    beta: jax.Array  # weight of the penalty; a KL budget moves it
    reference: Any = None  # frozen parameters, None while no stage needs them

    def arrays(self) -> dict[str, Any]:
        """The arrays that a checkpoint holds."""
        held = {**super().arrays(), "beta": self.beta}
        return held if self.reference is None else {**held, "reference": self.reference}

    def entered(self, stage: Stage, objective: Objective) -> Self:
        """The state at the start of a stage, with that stage's beta."""
        beta = jax.device_put(jnp.float32(stage.beta), self.beta.sharding)
        return super().entered(stage, objective).replace(beta=beta)

    def snapshot(self) -> Self:
        """The state with its present parameters as the reference, an exact copy with the same sharding."""
        return self.replace(reference=copied(self.params))


def shardings_of(tree: Any) -> Any:
    """The sharding of every array of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def copied(tree: Any) -> Any:
    """A copy of every array, placed as the original; steps donate theirs."""
    shardings, structure = jax.tree.flatten(shardings_of(tree))
    return _copier(structure, tuple(shardings))(tree)


@functools.lru_cache(maxsize=16)
def _copier(structure: Any, shardings: tuple[Any, ...]) -> Any:
    """The compiled copy of one kind of tree: every checkpoint makes one, and must not compile it again."""
    placed = jax.tree.unflatten(structure, shardings)
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)
