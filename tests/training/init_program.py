"""Run by test_sharded_init.py on eight virtual devices: initial values of every mesh, and what each device holds."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.execution import Topology, TopologyConfig
from holdfast.models.config import ModelSpec
from holdfast.models.decoder import Decoder
from holdfast.training import BaseTrainer

SPEC = ModelSpec(4, 128, 8, 8, 16, 512, vocab_size=1024, block_size=64)
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2))


def initial(sizes: tuple[int, int, int]) -> tuple[object, int]:
    """Parameters on a mesh, and the bytes that its first device holds of them."""
    count = int(np.prod(sizes))
    topology = Topology.build(TopologyConfig(*sizes), jax.devices()[:count])
    model, tokens = Decoder(SPEC), jnp.zeros((1, 1), jnp.int32)
    variables, shardings = BaseTrainer.sharded_init(model, jax.random.key(0), tokens, mesh=topology.mesh)
    for leaf, sharding in zip(jax.tree.leaves(variables), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(variables))
    return jax.device_get(variables), held


def main() -> None:
    expected, whole = initial(MESHES[0])
    for sizes in MESHES[1:]:
        values, held = initial(sizes)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(values), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), sizes
        share = sizes[1] * sizes[2]
        # Scales and biases are small and on every device.
        assert held <= whole / share + 0.05 * whole, (sizes, held, whole)
    print("equal")


if __name__ == "__main__":
    sys.exit(main())
