"""Run by test_sharding.py on four virtual devices: every mesh gives the values of one device."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast import registry
from holdfast.models import BATCH_AXES, RULES, ArchitectureConfig, Decoder, check_divisible, resolve, unembedding
from holdfast.objectives.token_loss import Penalised, token_loss

R, T, V = 8, 16, 64
OPTIONS = {"n_layers": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 4, "n_ff": 64, "scan_layers": True}


def loss(decoder, params, reference, x, y):
    """Cross-entropy and forward KL in chunks of a quarter of the tokens."""
    spec = decoder.spec
    hidden, old = (decoder.apply({"params": p}, x, method="hidden") for p in (params, reference))
    return token_loss(
        hidden,
        unembedding(params, spec),
        y,
        jnp.full(y.shape, 1 / y.size),
        penalties=(Penalised(registry.penalties.get("forward"), 0.5),),
        reference_hidden=old,
        reference_unembedding_DV=unembedding(reference, spec),
        chunk_tokens=R * T // 4,
    )


def results(preset, sizes):
    """Initial parameters, loss and gradients on a mesh of the sizes; and the compiled program's text."""
    decoder = Decoder(resolve(ArchitectureConfig(preset=preset, **OPTIONS), block_size=T, vocab_size=V))
    check_divisible(decoder.spec, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    x, y = (jax.device_put(np.random.default_rng(seed).integers(0, V, (R, T)), rows) for seed in (0, 1))

    def initialise(key):
        return decoder.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    specs = nn.get_partition_spec(jax.eval_shape(initialise, jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    with jax.set_mesh(mesh):
        make = jax.jit(lambda key: nn.unbox(initialise(key)), out_shardings=shardings)
        params, reference = make(jax.random.key(0)), make(jax.random.key(1))
        step = jax.jit(
            jax.value_and_grad(lambda p, r, x, y: loss(decoder, p, r, x, y), has_aux=True),
            out_shardings=(None, shardings),
        )
        compiled = step.lower(params, reference, x, y).compile()
        (total, aux), gradients = compiled(params, reference, x, y)
    return jax.device_get((params, total, aux, gradients)), compiled.as_text()


def main():
    for preset, meshes in (("gpt2", [(2, 2, 1)]), ("llama-160m", [(1, 2, 2)])):
        expected, _ = results(preset, (1, 1, 1))
        for sizes in meshes:
            got, text = results(preset, sizes)
            jax.tree.map(np.testing.assert_array_equal, got[0], expected[0])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4), got[1:], expected[1:])
            gathered = re.findall(r"= f32\[([0-9,]+)\][^=]* all-gather", text)
            # Rows stay where they are: nothing with all tokens, or with a whole chunk's logits, is collected.
            limit = max(OPTIONS["n_ff"], V) * OPTIONS["n_embd"] * OPTIONS["n_layers"]
            assert all(np.prod([int(n) for n in shape.split(",")]) <= limit for shape in gathered), gathered
            print(preset, sizes, float(got[1]), gathered)


if __name__ == "__main__":
    sys.exit(main())
