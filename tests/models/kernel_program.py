"""Run by test_kernels.py on eight virtual devices: with kernels inside, every mesh gives the values of one device."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.models import BATCH_AXES, RULES, ArchitectureConfig, Decoder, resolve, unembedding
from holdfast.models.kernels import emulating
from holdfast.objectives.token_loss import token_loss

R, T, V = 8, 128, 256  # words enough for the devices of a group to share them out
OPTIONS = {"n_layers": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 2, "n_ff": 64, "scan_layers": True, "remat": True}


def results(platform: str, sizes: tuple[int, int, int]) -> Any:
    """Loss and gradients of a packed batch on a mesh of the sizes."""
    decoder = Decoder(resolve(ArchitectureConfig(preset="llama-160m", **OPTIONS), block_size=T, vocab_size=V))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    x, y = (jax.device_put(np.random.default_rng(seed).integers(0, V, (R, T)), rows) for seed in (0, 1))
    ids = jax.device_put(np.broadcast_to(np.arange(T) // 50, (R, T)).astype(np.int32), rows)

    def initialise(key: jax.Array) -> Any:
        return decoder.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(params: Any) -> jax.Array:
        hidden = decoder.apply({"params": params}, x, segment_ids=ids, method="hidden")
        return token_loss(hidden, unembedding(params, decoder.spec), y, jnp.full(y.shape, 1 / y.size))[0]

    specs = nn.get_partition_spec(jax.eval_shape(initialise, jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    with jax.set_mesh(mesh), emulating(platform):
        params = jax.jit(lambda key: nn.unbox(initialise(key)), out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
        text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
        assert ("pallas_call" in text) == (platform == "tpu"), platform
        return jax.device_get(step(params))


def main() -> None:
    plain = results("cpu", (1, 1, 1))
    for sizes in ((1, 1, 1), (2, 2, 2)):
        got = results("tpu", sizes)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, plain)
        print(sizes, "equal", float(got[0]))


if __name__ == "__main__":
    sys.exit(main())
