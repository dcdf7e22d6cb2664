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
from holdfast.models.lora import fingerprint
from holdfast.models.names import is_adapter
from holdfast.optim import Optimizer, Schedule
from holdfast.training.trainable import Lora, Trainable, leaves_of, tree_of


@dataclass(frozen=True)
class Objective:
    """What a compiled step minimises and how; a new one means a new compilation, so there is one per stage kind.

    Args:
        model: the decoder's specification.
        optimizer, schedule: how gradients become updates.
        z_loss: weight of the squared log-normaliser.
        penalty: the registered penalty, None where the stage has none (no reference forward is compiled then).
        target: KL budget in nats per token, None where beta is fixed.
        trainable: the part of the parameters that is trained, None where that is all of them.
        ema: decay of the average of the trained parameters, 0 where there is none.
    """

    model: ModelSpec
    optimizer: Optimizer
    schedule: Schedule
    z_loss: float = 0.0
    penalty: Any = None
    target: float | None = None
    trainable: Trainable | None = None
    ema: float = 0.0

    @property
    def lora(self) -> Lora | None:
        """The adapters, if it is they that are trained."""
        return self.trainable.lora if self.trainable else None

    def trained(self, params: Any) -> Any:
        """The part of the parameters that gradients and optimizer state exist for."""
        return params if self.trainable is None else self.trainable.part(params)

    def average_of(self, params: Any) -> Any:
        """The average of trained parameters before the first step, in arrays of its own: they themselves."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), self.trained(params))

    def completed(self, params: Any, trained: Any) -> Any:
        """All parameters, with a trained part in the place of theirs."""
        return trained if self.trainable is None else self.trainable.completed(params, trained)

    def penalised(self, names: tuple[str, ...], target: float | None) -> "Objective":
        """The same objective with a registered penalty, if one is named."""
        if not names:
            return self
        assert len(names) == 1, "a step has one penalty"
        return dataclasses.replace(self, penalty=registry.penalties.get(names[0]), target=target)


@dataclass(frozen=True)
class Base:
    """The frozen weights that adapters belong to, which checkpoints do not hold.

    Args:
        fingerprint: of their values.
        source: the checkpoint they come from, `RUN@STEP` relative to the run's folder; None: from the run's options.
        step: at which the adapters were made, when they changed nothing.
    """

    fingerprint: str
    source: str | None = None
    step: int = 0


class TrainState(train_state.TrainState):
    """Parameters, optimizer state and counts of skipped updates."""

    skipped: jax.Array  # updates skipped in all, because loss or gradient was not finite
    skipped_in_a_row: jax.Array
    objective: Objective = struct.field(pytree_node=False)
    base: Base | None = struct.field(pytree_node=False)  # what the adapters belong to, if there are any
    ema: Any  # average of the trained part in float32, None where there is none

    def arrays(self) -> dict[str, Any]:
        """The arrays that a checkpoint holds; what is static is derived from the config and the step."""
        held = {
            "step": self.step,
            "params": self.params if self.base is None else adapters_of(self.params),
            "opt_state": self.opt_state,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        return held if self.ema is None else {**held, "ema": self.ema}

    def ema_params(self) -> Any:
        """All parameters with the average in the place of what is trained, None where there is no average."""
        if self.ema is None:
            return None
        trained = self.objective.trained(self.params)
        average = jax.tree.map(lambda mean, own: mean.astype(own.dtype), self.ema, trained)
        return self.objective.completed(self.params, average)

    def entered(self, stage: Stage, objective: Objective) -> Self:
        """The state at the start of a stage."""
        state = self.replace(objective=objective)
        if stage.reset_optimizer:
            fresh = jax.jit(
                lambda params: objective.optimizer.init(objective.trained(params)),
                out_shardings=shardings_of(self.opt_state),
            )
            state = state.replace(opt_state=fresh(self.params))
        assert isinstance(state, type(self))
        return state


class KLDivergenceTrainState(TrainState):
    """Train state carrying a frozen reference-policy snapshot and KL weight."""

    beta: jax.Array  # weight of the penalty; a KL budget moves it
    # Frozen parameters, None while no stage needs them. Beside adapters what the reference has other than the base:
    # nothing, other adapters, or other weights in all.
    reference: Any = None

    def arrays(self) -> dict[str, Any]:
        """The arrays that a checkpoint holds."""
        held = {**super().arrays(), "beta": self.beta}
        return {**held, "reference": self.reference} if self.reference else held

    def reference_params(self) -> Any:
        """The parameters of the reference in full, None where there is none."""
        if self.reference is None or self.base is None:
            return self.reference
        return overlaid(without_adapters(self.params), self.reference)

    def entered(self, stage: Stage, objective: Objective) -> Self:
        """The state at the start of a stage, with that stage's beta."""
        beta = jax.device_put(jnp.float32(stage.beta), self.beta.sharding)
        return super().entered(stage, objective).replace(beta=beta)

    def snapshot(self) -> Self:
        """The state with its present parameters as the reference, an exact copy with the same sharding.

        Beside adapters only those are copied, and nothing where they are new: the base itself is the reference.
        """
        if self.base is None:
            return self.replace(reference=copied(self.params))
        fresh = int(self.step) == self.base.step
        return self.replace(reference={} if fresh else copied(adapters_of(self.params)))

    def anchored(self, weights: Any) -> Self:
        """The state with other weights, without adapters, as the reference; those of the base are not held twice."""
        same = self.base is not None and fingerprint(leaves_of(weights)) == self.base.fingerprint
        return self.replace(reference={} if same else weights)


def adapters_of(params: Any) -> Any:
    """The adapters of a tree of parameters."""
    return tree_of({path: leaf for path, leaf in leaves_of(params).items() if is_adapter(path)})


def without_adapters(params: Any) -> Any:
    """The base of a tree of parameters."""
    return tree_of({path: leaf for path, leaf in leaves_of(params).items() if not is_adapter(path)})


def overlaid(params: Any, part: Any) -> Any:
    """A tree of parameters with the leaves of another in it."""
    return tree_of({**leaves_of(params), **leaves_of(part)})


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
