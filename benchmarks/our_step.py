"""Our own compiled step on the shape of the benchmark, in a process that answers rounds as `torch_gpt.py` does."""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.data.batches import Batch
from holdfast.execution import Topology
from holdfast.models.config import ModelSpec
from holdfast.optim import OptimConfig, build_optimizer
from holdfast.training.build import initial_state
from holdfast.training.state import KLDivergenceTrainState, Objective, copied
from holdfast.training.step import train_step


def main() -> None:
    shape = json.loads(sys.argv[1])
    width, heads = shape["width"], shape["heads"]
    spec = ModelSpec(
        shape["layers"],
        width,
        heads,
        heads,
        width // heads,
        4 * width,
        vocab_size=shape["vocabulary"],
        block_size=shape["length"],
        bias=True,
        qkv_bias=True,
        scan_layers=shape["layers"] > 12,
    )
    objective = Objective(spec, build_optimizer("adamw", OptimConfig()), lambda step: jnp.float32(3e-4))  # noqa: ARG005
    state = initial_state(KLDivergenceTrainState, objective, 0, Topology.build().mesh)
    if shape.get("penalty"):
        state = state.replace(
            objective=objective.penalised((shape["penalty"],), None),
            reference=copied(state.params),
            beta=jnp.float32(0.1),
        )
    rows, length = shape["rows"], shape["length"]
    tokens = np.random.default_rng(0).integers(0, shape["vocabulary"], (1, rows, length + 1), dtype=np.int32)
    ones = np.ones((1, rows, length), np.int8)
    seen = ones if shape.get("penalty") else None
    batch = Batch(tokens[..., :-1], tokens[..., 1:], ones, penalty_mask=seen)
    step = jax.jit(train_step, static_argnums=3, donate_argnums=0)
    key = jax.random.key(0)
    state, first, _ = step(state, batch, key, 1)
    state, _, _ = step(state, batch, key, 1)
    jax.block_until_ready(state)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(json.dumps({"parameters": count, "first_loss": float(first)}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(shape["steps"]):
            state, loss, _ = step(state, batch, key, 1)
        jax.block_until_ready(loss)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"tokens_per_s": shape["steps"] * rows * length / seconds, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
