"""A user's own module: a trainer that overrides everything that may be overridden, registered as a job."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import optax

from holdfast import registry
from holdfast.curriculum import Curriculum, FadeConfig
from holdfast.data.batches import Batch
from holdfast.evaluation.evaluator import Evaluator
from holdfast.methods import Method, MethodConfig
from holdfast.training import ABCDKLConfig, ABCDKLDivergenceTrainer
from holdfast.training.results import build_evaluator

OWN_RATE = 0.00125


@dataclass(frozen=True)
class HalfConfig(MethodConfig):
    """A method without options."""


@dataclass(frozen=True)
class Half(Method):
    """Halves every update and counts how many it has seen."""

    def init(self, params: Any) -> Any:
        import jax.numpy as jnp

        return {"seen": jnp.int32(0)}

    def updates(self, memory: Any, updates: Any, params: Any) -> Any:
        import jax

        return jax.tree.map(lambda update: 0.5 * update, updates)

    def observe(self, memory: Any, gradients: Any, updates: Any, params: Any) -> Any:
        return {"seen": memory["seen"] + 1}


class OwnTrainer(ABCDKLDivergenceTrainer[Any, Any]):
    """Overrides each of them."""

    @classmethod
    def optimizer(cls) -> Any:
        return optax.sgd(0.05)

    @classmethod
    def schedule(cls) -> Any:
        return lambda step: step * 0 + OWN_RATE

    @classmethod
    def curriculum(cls, options: Any) -> Curriculum:
        return dataclasses.replace(super().curriculum(options), fade=FadeConfig(overlap=0.5))

    @classmethod
    def methods(cls, options: Any) -> Any:
        return {"half": Half(HalfConfig())}

    def evaluator(self) -> Evaluator[Any]:
        rows = self.data.held_out()
        return build_evaluator(self.resolved, self.topology, {"lists": rows["lists"]}, tasks=["lists"])

    def batch(self, slice: str = "train", step: int | None = None) -> Batch:
        """The plan's rows backwards."""
        planned = super().batch(slice, step)
        return Batch(*(None if array is None else array[:, ::-1] for array in planned))


registry.jobs.register("own/train/everything", config=ABCDKLConfig, help="a trainer of one's own")(OwnTrainer)
