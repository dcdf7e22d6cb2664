"""What a penalty costs in memory: the compiler's figures of a plain step and of one with exact KL.

python -m benchmarks.memory
"""

import jax

from holdfast.config import merge
from holdfast.execution import Topology
from holdfast.training.compile import abstract_arguments, needed_bytes, trace_train
from holdfast.training.config import config_classes
from holdfast.training.initial import abstract_stage, initial_state
from holdfast.training.resolve import resolve
from holdfast.training.step import train_step

JOB = "continual/train/abcd_kl"
ROWS, BLOCK = 8, 256
STAGE = {"tokens": ROWS * BLOCK, "data": [{"name": "pydocs", "style": "PMD"}]}
OPTIONS = {
    "stages": [STAGE, {**STAGE, "beta": 1.0, "update_reference": True}],
    "training": {"batch_size": ROWS},
    "optimization": {"kl": {"estimator": "forward"}},
    "architecture": {"n_layers": 6, "n_embd": 384, "n_head": 6, "block_size": BLOCK, "bias": True},
    "eval": {"evaluations": []},
}


def main() -> None:
    run, topology = resolve(JOB, merge(config_classes(JOB), OPTIONS)), Topology.build()
    state = initial_state(run, topology.mesh)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    needed = {}
    for stage, name in enumerate(("plain", "exact KL")):
        arguments = abstract_arguments(run, topology, ROWS, abstract_stage(state, run, stage))
        needed[name] = needed_bytes(trace_train(train_step, topology.mesh, *arguments).lower().compile())
        print(f"{name}: {needed[name] / 2**20:.0f} MiB")
    extra = needed["exact KL"] - needed["plain"]
    print(f"parameters: {parameters / 2**20:.0f} MiB; extra: {extra / 2**20:.0f} MiB")
    print(f"beyond one copy of the parameters: {(extra - parameters) / needed['plain']:+.1%} of the plain step")


if __name__ == "__main__":
    main()
