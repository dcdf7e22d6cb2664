"""Run by test_own_families.py on four virtual devices: every mesh gives the values of one device."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from own_families import MODELS, model_of

from holdfast.models import BATCH_AXES
from holdfast.models.derived import boxed_params, param_shardings

R, T, V = 8, 16, 64
SIZES = (1, 2, 2)  # fsdp splits experts and widths, tensor heads and what is inside the parts
NAMES = ("moe-bias", "hybrid")
assert set(NAMES) <= set(MODELS)


def results(name, model, params, sizes):
    """Loss with its auxiliary losses, and gradients, on a mesh of the sizes."""
    model.check_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    x = jax.device_put(np.random.default_rng(0).integers(0, V, (R, T)), rows)
    shardings = param_shardings(boxed_params(model), mesh)

    def loss(params, x):
        hidden, losses = model.hidden(params, x, segment_ids=(jnp.arange(T) // 10)[None] + 0 * x)
        logits = hidden @ model.unembedding(params)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(x, -1, 1)[..., None], -1).mean()
        return nll + sum(weight * value for value, weight in losses.values())

    with jax.set_mesh(mesh):
        params = jax.device_put(params, shardings)
        found = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))(params, x)
    if np.prod(sizes) > 1 and name.startswith("moe"):
        kernel = params["layers"]["mlp"]["up"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec(None, "fsdp", None, "tensor"), kernel.sharding
    return jax.device_get(found)


def main():
    for name in NAMES:
        model = model_of(name, block_size=T, vocab_size=V)
        made = nn.unbox(model.module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
        params = jax.tree.map(lambda leaf: 5 * np.asarray(leaf), made)
        expected, got = (results(name, model, params, sizes) for sizes in ((1, 1, 1), SIZES))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), got, expected)
        print(name, SIZES, float(got[0]), float(expected[0]))


if __name__ == "__main__":
    sys.exit(main())
