"""The methods that act in a stage, composed: what the train step asks for, and nothing that no method has.

Memories are a dictionary by method's name; one is there while its method is listed, whether it acts or not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from holdfast.methods.method import Method, StageData, State, TokenPenalty
from holdfast.types import Tree


@dataclass(frozen=True, eq=False)
class ActiveMethods:
    """Methods by name, in the listed order; compared by identity, so that a stage kind has one compiled step."""

    by_name: Mapping[str, Method]

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def having(self, hook: str) -> dict[str, Method]:
        """The methods that have a hook."""
        return {name: method for name, method in self.by_name.items() if method.has(hook)}

    @property
    def loss_needs_reference(self) -> bool:
        """Whether a hook inside the loss looks at the reference."""
        return bool(self.having("token_penalty")) or self.weights_need_reference

    @property
    def weights_need_reference(self) -> bool:
        """Whether a method that weighs tokens looks at the reference, in whatever rows they are."""
        return any(method.config.needs_reference for method in self.having("token_weights").values())

    @property
    def needs_old_gradients(self) -> bool:
        """Whether the gradients of old rows are asked for."""
        return any(method.config.needs_old_gradients for method in self.by_name.values())

    def token_penalties(self) -> dict[str, tuple[TokenPenalty, float]]:
        """The token penalties and their weights."""
        found = {}
        for name, method in self.having("token_penalty").items():
            closed = _function(method.token_penalty_gradient) if method.has("token_penalty_gradient") else None
            penalty = TokenPenalty(_function(method.token_penalty), method.config.penalty_tokens, closed)
            found[name] = (penalty, method.config.weight)
        return found

    def token_weights(self, memory: Tree) -> list[tuple[Any, Tree]]:
        """The functions that weigh tokens, each with its memory; no gradient flows through them."""
        return [
            (_without_gradient(method.token_weights), _of(memory, name))
            for name, method in self.having("token_weights").items()
        ]

    def parameter_penalties(self, memory: Tree, params: Tree, reference: Tree | None) -> dict[str, jax.Array]:
        """The parameter penalties, not multiplied by their weights."""
        return {
            name: method.parameter_penalty(_of(memory, name), params, reference)
            for name, method in self.having("parameter_penalty").items()
        }

    def penalise(
        self, memory: Tree, trained: Tree, reference: Tree | None, gradients: Tree
    ) -> tuple[Tree, jax.Array, dict[str, jax.Array]]:
        """Gradients with those of the parameter penalties, the weighted sum of these, and each of them."""
        if not any(method.config.weight for method in self.having("parameter_penalty").values()):
            return gradients, jnp.float32(0), self.parameter_penalties(memory, trained, reference)

        def total(params: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
            values = self.parameter_penalties(memory, params, reference)
            weighted = [self.by_name[name].config.weight * value for name, value in values.items()]
            return jnp.stack(weighted).sum(), values

        (added, values), pull = jax.value_and_grad(total, has_aux=True)(trained)
        return jax.tree.map(lambda own, more: own + more.astype(own.dtype), gradients, pull), added, values

    def gradients(self, memory: Tree, gradients: Tree, old_gradients: Tree | None) -> Tree:
        """Gradients as the methods change them."""
        for name, method in self.having("gradients").items():
            gradients = method.gradients(_of(memory, name), gradients, old_gradients)
        return gradients

    def updates(self, memory: Tree, updates: Tree, params: Tree) -> Tree:
        """Updates as the methods change them."""
        for name, method in self.having("updates").items():
            updates = method.updates(_of(memory, name), updates, params)
        return updates

    def weights(self, memory: Tree, params: Tree, reference: Tree | None, step: jax.Array) -> Tree:
        """Parameters as the methods change them; `step` counts the steps that are complete."""
        for name, method in self.having("weights").items():
            params = method.weights(_of(memory, name), params, reference, step)
        return params

    @property
    def watching(self) -> bool:
        """Whether a method looks at the step that was taken."""
        return bool(self.having("observe") or self.having("measure"))

    def measure(
        self, memory: Tree, gradients: Tree, old_gradients: Tree | None, taken: Tree, params: Tree
    ) -> dict[str, jax.Array]:
        """What the methods measure of a step, by `method/NAME/KEY`."""
        found = {}
        for name, method in self.having("measure").items():
            scalars = method.measure(_of(memory, name), gradients, old_gradients, taken, params)
            found.update({f"method/{name}/{key}": value for key, value in scalars.items()})
        return found

    def observe(self, memory: Tree, gradients: Tree, taken: Tree, params: Tree) -> Tree:
        """The memories after a step."""
        seen = {
            name: method.observe(_of(memory, name), gradients, taken, params)
            for name, method in self.having("observe").items()
        }
        return {**memory, **seen} if seen else memory

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The memories on entering a stage."""
        made = {
            name: _arrays(method.remember(_of(memory, name), state, data))
            for name, method in self.having("remember").items()
        }
        return {**(memory or {}), **made} if made else memory


def initial_memory(methods: Mapping[str, Method], params: Tree) -> Tree:
    """The memories of all listed methods before the first step, None where none has one."""
    made = {name: _arrays(method.init(params)) for name, method in methods.items() if method.has("init")}
    return made or None


def _arrays(memory: Tree) -> Tree:
    """A memory of arrays alone: plain numbers in it become arrays of a fixed type, as they are in checkpoints."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), memory)


def _of(memory: Tree, name: str) -> Tree:
    return None if memory is None else memory.get(name)


def _function(hook: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A hook as a plain function: a bound method is hashed with its config, which may hold lists."""
    return lambda *arguments: hook(*arguments)


def _without_gradient(function: Any) -> Any:
    def weigh(memory: Tree, logp: jax.Array, reference_logp: jax.Array | None, targets: jax.Array) -> jax.Array:
        factor: jax.Array = jax.lax.stop_gradient(function(memory, logp, reference_logp, targets))
        return factor

    return weigh
