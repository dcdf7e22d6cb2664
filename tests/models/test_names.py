"""Names and shapes of parameters without a device, and patterns over them."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import traverse_util

from holdfast.models import names
from holdfast.models.config import ArchitectureConfig, resolve
from holdfast.models.decoder import Decoder


@pytest.mark.parametrize("preset", ["tiny", "gpt2", "pythia-160m", "smollm2-135m", "llama-160m", "qwen2-0.5b"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_names_and_shapes_are_the_decoders(preset: str, qk_norm: bool) -> None:
    spec = resolve(ArchitectureConfig(preset=preset, n_layers=3, qk_norm=qk_norm), block_size=16, vocab_size=64)
    made = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves = traverse_util.flatten_dict(nn.meta.unbox(made), sep="/")
    assert names.parameter_shapes(spec) == {path: leaf.shape for path, leaf in leaves.items()}


@pytest.mark.parametrize(
    ("pattern", "glob", "layers"),
    [
        ("layers/2", "layers/*", [2]),
        ("layers/0-1/mlp", "layers/mlp", [0, 1]),
        ("layers/1-/attention/q/*", "layers/attention/q/*", [1, 2, 3]),
        ("layers/attention*", "layers/attention*", [0, 1, 2, 3]),
        ("embed", "embed", [0, 1, 2, 3]),
    ],
)
def test_a_pattern_may_name_layers(pattern: str, glob: str, layers: list[int]) -> None:
    found, chosen = names.split_range(pattern, 4)
    assert (found, list(chosen)) == (glob, layers)


def test_the_nearest_name_is_named() -> None:
    known = ["embed/embedding", "layers/attention/q/kernel", "layers/mlp/up/kernel"]
    assert names.nearest("layers/atention/q", known) == "layers/attention/q"
    assert names.nearest("embd*", known) == "embed"
