"""What a penalty costs in memory: the compiler's figures of a plain step and of one with exact KL.

python -m benchmarks.memory
"""

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.data.batches import Batch
from holdfast.execution import Topology
from holdfast.models.config import ModelSpec
from holdfast.optim import OptimConfig, build_optimizer
from holdfast.training.build import initial_state
from holdfast.training.microbatch import needed_bytes
from holdfast.training.state import KLDivergenceTrainState, Objective
from holdfast.training.step import train_step


def main() -> None:
    spec = ModelSpec(
        6, 384, 6, 6, 64, 1536, vocab_size=512, block_size=256, bias=True, qkv_bias=True, scan_layers=False
    )
    objective = Objective(spec, build_optimizer("adamw", OptimConfig()), lambda _: jnp.float32(3e-4))
    plain = initial_state(KLDivergenceTrainState, objective, 0, Topology.build().mesh)
    anchored = plain.replace(objective=objective.penalised(("forward",), None), reference=plain.params)
    x = np.zeros((1, 8, 256), np.int32)
    mask = np.ones(x.shape, np.int8)
    step = jax.jit(train_step, static_argnums=3, donate_argnums=0)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.params))
    needed = {}
    for name, state in (("plain", plain), ("exact KL", anchored)):
        batch = Batch(x, x, mask, penalty_mask=mask)
        needed[name] = needed_bytes(step.lower(state, batch, jax.random.key(0), 1).compile())
        print(f"{name}: {needed[name] / 2**20:.0f} MiB")
    extra = needed["exact KL"] - needed["plain"]
    print(f"parameters: {parameters / 2**20:.0f} MiB; extra: {extra / 2**20:.0f} MiB")
    print(f"beyond one copy of the parameters: {(extra - parameters) / needed['plain']:+.1%} of the plain step")


if __name__ == "__main__":
    main()
