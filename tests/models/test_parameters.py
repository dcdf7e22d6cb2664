"""Names of parameters, patterns over them, and what the options leave to be trained, without a device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from holdfast.errors import ConfigError
from holdfast.models.config import ArchitectureConfig, ModelSpec, parameter_shapes, resolve
from holdfast.models.decoder import Decoder
from holdfast.models.family import decoder
from holdfast.models.parameters import (
    Trainable,
    leaves_of,
    nearest,
    split_range,
    trainable_for,
    trainable_of,
    tree_of,
)
from holdfast.optim.config import LoraConfig

MODEL = decoder(ModelSpec(4, 16, 2, 2, 8, 64, vocab_size=32, block_size=8))  # no gate


@pytest.mark.parametrize("preset", ["tiny", "gpt2", "pythia-160m", "smollm2-135m", "llama-160m", "qwen2-0.5b"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_names_and_shapes_are_the_decoders(preset: str, qk_norm: bool) -> None:
    spec = resolve(ArchitectureConfig(preset=preset, n_layers=3, qk_norm=qk_norm), block_size=16, vocab_size=64)
    made = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves = traverse_util.flatten_dict(nn.meta.unbox(made), sep="/")
    assert parameter_shapes(spec) == {path: leaf.shape for path, leaf in leaves.items()}


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
    found, chosen = split_range(pattern, 4)
    assert (found, list(chosen)) == (glob, layers)


def test_the_nearest_name_is_named() -> None:
    known = ["embed/embedding", "layers/attention/q/kernel", "layers/mlp/up/kernel"]
    assert nearest("layers/atention/q", known) == "layers/attention/q"
    assert nearest("embd*", known) == "embed"


def trainable(*freeze: str, **lora: Any) -> Trainable:
    found = trainable_for(list(freeze), LoraConfig(**lora), MODEL)
    assert found is not None
    return found


def test_without_options_everything_is_trained() -> None:
    assert trainable_for([], LoraConfig(), MODEL) is None
    assert trainable_of({}, MODEL) is None


def test_patterns_freeze_whole_parameters_and_layers_of_them() -> None:
    rows = dict(trainable("embed*", "layers/0-1/mlp", "layers/3/mlp/down/kernel").rows)
    assert "embed/embedding" not in rows
    assert rows["layers/mlp/up/kernel"] == (2, 3)
    assert rows["layers/mlp/down/kernel"] == (2,)
    assert rows["layers/mlp_norm/scale"] is None
    assert rows["layers/attention/q/kernel"] is None
    assert "layers/mlp/up/kernel" not in dict(trainable("layers/0-3/mlp/up").rows)


def test_parts_are_cut_out_and_put_back() -> None:
    import jax.numpy as jnp

    chosen = trainable("embed", "layers/1-2/*")
    leaves = {
        "embed/embedding": jnp.ones((2, 3)),
        "positions/embedding": jnp.ones((2, 3)),
        "final_norm/scale": jnp.ones(3),
    }
    for name, rows in chosen.rows:
        if rows is not None:
            leaves[name] = jnp.arange(4.0)[:, None]
    part = leaves_of(chosen.part(tree_of(leaves)))
    assert "embed/embedding" not in part
    np.testing.assert_array_equal(part["layers/mlp/up/kernel"], [[0], [3]])
    moved = {name: leaf + 10 for name, leaf in part.items()}
    back = leaves_of(chosen.completed(tree_of(leaves), tree_of(moved)))
    np.testing.assert_array_equal(back["layers/mlp/up/kernel"], [[10], [1], [2], [13]])
    np.testing.assert_array_equal(back["embed/embedding"], leaves["embed/embedding"])
    np.testing.assert_array_equal(back["final_norm/scale"], leaves["final_norm/scale"] + 10)


def test_adapters_go_to_the_named_projections() -> None:
    assert trainable(rank=2, targets=["q", "o"]).lora.modules == ("layers/attention/q", "layers/attention/out")
    assert trainable(rank=2, targets=["layers/mlp/*"]).lora.modules == ("layers/mlp/up", "layers/mlp/down")
    assert len(trainable(rank=2).lora.modules) == 6
    found = trainable(rank=2, alpha=8.0, targets=["up"])
    assert found.lora.scale == 4
    assert found.num_trained(MODEL) == 4 * 2 * (16 + 64)
    assert dict(trainable("layers/0-1/*", rank=2, targets=["up"]).rows) == {
        "layers/mlp/up/lora_in": (2, 3),
        "layers/mlp/up/lora_out": (2, 3),
    }


@pytest.mark.parametrize(
    ("freeze", "lora", "message"),
    [
        (["embd"], {}, r"optimization/freeze/0: got 'embd', .*the nearest name is embed"),
        (["embed", "layers/2-7/*"], {}, r"optimization/freeze/1: got 'layers/2-7/\*', expected layers from 0 to 3"),
        (["layers/3-2/*"], {}, "expected layers from 0 to 3"),
        (["layers/1/atention"], {}, "the nearest name is layers/attention"),
        (["*"], {}, "something left to train"),
        (["layers"], {"rank": 4}, "something left to train"),
        ([], {"rank": 4, "targets": ["q", "gate"]}, r"targets/1: got 'gate', expected one of q, k, v, o, up, down"),
        ([], {"rank": 4, "targets": ["embed*"]}, "optimization/lora/targets/0: got 'embed\\*', expected one of q, k"),
    ],
)
def test_what_cannot_be_meant_is_refused(freeze: list[str], lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainable(*freeze, **lora)
