"""Adapters beside kernels: nothing at first, the same merged or not, and a fingerprint of what they stand on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.execution import Topology, TopologyConfig
from holdfast.models.config import ModelSpec
from holdfast.models.decoder import Decoder, init_cache
from holdfast.models.family import decoder
from holdfast.models.lora import fingerprint, fresh_adapters, merged
from holdfast.models.parameters import leaves_of, trainable_for, tree_of
from holdfast.optim.config import LoraConfig
from holdfast.training.initial import initial_params

MESH = Topology.build(TopologyConfig(), jax.devices()[:1]).mesh
SPECS = {
    "gated": ModelSpec(2, 32, 4, 2, 8, 64, 48, 16, activation="silu_gated", norm="rms", positions="rotary"),
    "biased": ModelSpec(2, 32, 4, 4, 8, 64, 48, 16, bias=True, qkv_bias=True, scan_layers=True, remat=True),
}
TOKENS = jax.random.randint(jax.random.key(1), (2, 16), 0, 48)


@functools.cache
def base_of(spec: ModelSpec) -> dict[str, Any]:
    return leaves_of(initial_params(decoder(spec), 0, MESH))


@functools.cache
def adapted(spec: ModelSpec, *targets: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base and fresh adapters on it, by path."""
    base = base_of(spec)
    found = trainable_for([], LoraConfig(rank=4, targets=list(targets)), decoder(spec))
    assert found is not None
    assert found.lora is not None
    return base, fresh_adapters(base, found.lora.shapes(decoder(spec)), found.lora.scale, seed=0)


def moved(adapters: dict[str, Any]) -> dict[str, Any]:
    """Adapters as training could leave them."""
    keys = jax.random.split(jax.random.key(5), len(adapters))
    return {
        path: leaf if path.endswith("scale") else leaf + 0.05 * jax.random.normal(key, leaf.shape)
        for key, (path, leaf) in zip(keys, adapters.items(), strict=True)
    }


def logits(spec: ModelSpec, leaves: dict[str, Any]) -> Any:
    return jax.jit(lambda params: Decoder(spec).apply({"params": params}, TOKENS))(tree_of(leaves))


@pytest.mark.parametrize("name", SPECS)
def test_fresh_adapters_change_no_bit(name: str) -> None:
    base, adapters = adapted(SPECS[name])
    assert any(np.abs(leaf).max() > 0.1 for path, leaf in adapters.items() if path.endswith("lora_in"))
    np.testing.assert_array_equal(logits(SPECS[name], base), logits(SPECS[name], {**base, **adapters}))


@pytest.mark.parametrize("name", SPECS)
def test_merged_says_what_unmerged_says(name: str) -> None:
    spec = SPECS[name]
    base, adapters = adapted(spec)
    both = {**base, **moved(adapters)}
    apart, together = logits(spec, both), logits(spec, merged(both))
    assert np.abs(apart - logits(spec, base)).max() > 1e-3
    np.testing.assert_allclose(apart, together, atol=1e-5)
    cache = init_cache(spec, 2)
    decoded, _ = Decoder(spec).apply({"params": tree_of(both)}, TOKENS, cache, method="decode")
    np.testing.assert_allclose(decoded, together[:, -1], atol=1e-5)


def test_a_target_more_leaves_the_others_as_they_are() -> None:
    _, few = adapted(SPECS["gated"], "q")
    _, more = adapted(SPECS["gated"], "q", "k")
    np.testing.assert_array_equal(few["layers/attention/q/lora_in"], more["layers/attention/q/lora_in"])
    assert np.abs(more["layers/attention/k/lora_in"] - more["layers/attention/q/lora_in"]).max() > 0


def test_a_fingerprint_sees_one_bit_and_an_exchange_of_places() -> None:
    sharding = NamedSharding(MESH, PartitionSpec())
    array = jax.device_put(jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4), sharding)

    def of(leaf: jax.Array) -> str:
        return fingerprint({"a/b": jax.device_put(leaf, sharding)})

    known = of(array)
    assert of(array + 0) == known
    assert of(array.at[1, 2, 3].set(np.nextafter(np.float32(23), np.float32(24)))) != known
    assert of(array[::-1]) != known
    assert of(array.at[0, 0, 1].set(2).at[0, 0, 2].set(1)) != known
    assert of(array.reshape(3, 2, 4)) != known
    assert of(array.astype(jnp.bfloat16)) != known
