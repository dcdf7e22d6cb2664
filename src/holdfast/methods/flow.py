"""Weights of whole rows by how easy the snapshot finds them: easy rows ask for little that is not there."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods.method import BatchWeights, Method, StageData, State
from holdfast.methods.weighing import WeighingConfig, counted_tokens, segment_means
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch


@dataclass(frozen=True)
class FlowConfig(WeighingConfig):
    """Options of FLOW."""

    temperature: Optional[float] = field(
        "methods/flow/temperature",
        default=None,
        help="of the weights, in nats a token; null = the median loss of new rows under the snapshot",
        gt=0,
        le=1e30,
    )
    rows: Optional[int] = field(
        "methods/flow/rows",
        default=None,
        help="rows that the median is taken over; null = each once that the stage draws between its fades",
        ge=1,
        le=10**9,
    )
    stages: Optional[List[int]] = field(
        "methods/flow/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )
    needs_reference = True
    needs_old_mask = True
    weighs_by = "reference"


@registry.methods.register("flow", config=FlowConfig, help="each row's loss times exp(-its loss by the snapshot / t)")
@dataclass(frozen=True)
class Flow(Method):
    """FLOW (arXiv 2502.02797). The memory is the temperature; an example of a packed row is a row of its own here."""

    config: FlowConfig

    def init(self, params: Tree) -> Tree:
        """An infinite temperature, at which all rows weigh 1, until a stage is entered."""
        import jax.numpy as jnp

        return {"temperature": jnp.float32(self.config.temperature or jnp.inf)}

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The median over new rows of their mean loss under the snapshot that the stage will have."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.experimental import multihost_utils

        if self.config.temperature is not None:
            return memory

        def means(state: State, batch: "Batch") -> "tuple[jax.Array, jax.Array]":
            snapshot = state.params if data.renews_reference else state.reference_params()

            def one(micro: "Batch") -> "tuple[jax.Array, jax.Array]":
                new = counted_tokens(micro) & (micro.old_mask == 0)
                mean, first, _ = segment_means(state.token_losses(snapshot, micro), new, micro.segment_ids)
                return mean, first

            found: tuple[jax.Array, jax.Array] = jax.lax.map(one, batch)
            return found

        found, compiled = [], jax.jit(means)
        for batch in data.new_batches(self.config.rows):
            mean, there = multihost_utils.process_allgather(compiled(state, batch), tiled=True)
            found.append(np.asarray(mean)[np.asarray(there)])
        values = np.concatenate(found) if found else np.zeros(0)
        return {"temperature": jnp.float32(np.median(values) if len(values) else jnp.inf)}

    def batch_weights(self, memory: Tree, nll: "jax.Array", batch: "Batch") -> BatchWeights:
        """exp(−mean loss of the row under the snapshot / τ)."""
        import jax
        import jax.numpy as jnp

        def one(nll: "jax.Array", micro: "Batch") -> "jax.Array":
            return segment_means(nll, counted_tokens(micro), micro.segment_ids)[2]

        return BatchWeights(jnp.exp(-jax.vmap(one)(nll, batch) / jnp.maximum(memory["temperature"], 1e-6)))
