"""The families `moe` and `hybrid`: what the decoder promises, they promise too."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.errors import ConfigError
from holdfast.models import recurrent
from holdfast.models.family import Model
from holdfast.models.parameters import leaves_of
from models.own_families import MODELS, model_of
from training import tiny

Given = tuple[Model, Any, jax.Array]
JOB = "gpt/train/pretrain"
PACKED = {
    "training": {
        "batch_size": 8,
        "tokens": 8 * 32 * 6,
        "dataset": [{"name": "lists", "style": "PACKED"}],
        "per_device_batch_size": 4,
        "validation": False,
        "evaluate": False,
    },
    "logging": {"report_interval": 1, "checkpoint_interval": 3},
    "eval": {"evaluations": []},
}


@pytest.fixture(scope="module", params=list(MODELS))
def given(request: pytest.FixtureRequest) -> Given:
    """A model, parameters far from 0 so that mistakes show, and tokens."""
    model = model_of(request.param)
    made = nn.meta.unbox(model.module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    params = jax.tree.map(lambda leaf: leaf * 4, made)
    return model, params, jax.random.randint(jax.random.key(1), (3, 24), 0, 320)


def test_reading_from_a_cache_gives_the_states_of_the_whole_row(given: Given) -> None:
    model, params, tokens = given
    whole = jax.jit(lambda p, x: model.hidden(p, x)[0])(params, tokens)
    read = jax.jit(model.read)
    # Prompts of different lengths, padded on the right; then one token at a time.
    lengths = np.asarray([9, 5, 12])
    prompt = np.where(np.arange(12) < lengths[:, None], tokens[:, :12], 7)
    states, cache = read(params, jnp.asarray(prompt), model.init_cache(3, 24), jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(states[row, :length], whole[row, :length], atol=2e-4, rtol=1e-4)
    for step in range(12):
        following = np.take_along_axis(np.asarray(tokens), (lengths + step)[:, None], axis=1)
        states, cache = read(params, jnp.asarray(following), cache)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(states[row, 0], whole[row, length + step], atol=2e-4, rtol=1e-4)


def test_no_token_sees_a_later_one_or_another_text(given: Given) -> None:
    model, params, tokens = given
    segments = jnp.asarray([[1] * 11 + [2] * 13] * 3)
    states = jax.jit(lambda p, x: model.hidden(p, x, segment_ids=segments)[0])
    found = states(params, tokens)
    later = states(params, tokens.at[:, 17:].set((tokens[:, 17:] + 5) % 320))
    assert np.array_equal(found[0, :17], later[0, :17]), "the future does not reach back, to the bit"
    np.testing.assert_allclose(found[:, :17], later[:, :17], atol=1e-5)
    assert not np.array_equal(found[:, 18], later[:, 18])
    other = states(params, tokens.at[:, :11].set((tokens[:, :11] + 5) % 320))
    np.testing.assert_allclose(found[:, 11:], other[:, 11:], atol=1e-5)
    # By derivatives: none at all.
    embedded = {**params, "embed": {"embedding": params["embed"]["embedding"]}}

    def probed(table: jax.Array, at: int) -> jax.Array:
        return model.hidden(
            {**embedded, "embed": {"embedding": table}}, jnp.arange(24)[None], segment_ids=segments[:1]
        )[0][0, at].sum()

    influence = np.abs(jax.jit(jax.grad(probed), static_argnums=1)(params["embed"]["embedding"], 16)).sum(-1)
    assert (influence[17:] == 0).all()
    assert (influence[:11] == 0).all(), "nothing of the text before"
    assert (influence[11:17] > 0).all()


@pytest.mark.slow
def test_a_packed_text_has_the_states_that_it_has_alone(given: Given) -> None:
    model, params, tokens = given
    segments, positions = jnp.asarray([[1] * 11 + [2] * 13] * 3), jnp.asarray([[*range(11), *range(13)]] * 3)
    packed, _ = model.hidden(params, tokens, segment_ids=segments, positions=positions)
    alone = [model.hidden(params, part)[0] for part in (tokens[:, :11], tokens[:, 11:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-4)


def test_counts_are_those_of_the_parameters(given: Given) -> None:
    model, params, _ = given
    assert {path: leaf.shape for path, leaf in leaves_of(params).items()} == {
        path: parameter.shape for path, parameter in model.parameters().items()
    }
    assert model.options.num_parameters() == model.num_parameters()
    assert model.options.active_parameters() <= model.num_parameters()


@pytest.mark.parametrize("name", list(MODELS))
def test_a_mesh_that_does_not_fit_names_the_option(name: str) -> None:
    wrong = {"moe": ({"fsdp": 8}, "n_experts = 4"), "hybrid": ({"tensor": 3}, "architecture/")}
    sizes, message = wrong[name.split("-")[0]]
    with pytest.raises(ConfigError, match=message):
        model_of(name).check_mesh(sizes)


@pytest.mark.slow
def test_states_in_chunks_are_the_plain_recurrence() -> None:
    keys = jax.random.split(jax.random.key(2), 5)
    q, k, v = (jax.random.normal(key, (2, 13, 3, 4)) for key in keys[:3])
    fade = -jax.random.uniform(keys[3], (2, 13, 3), maxval=2.0)
    begins = jnp.zeros((2, 13), bool).at[0, 6].set(True).at[1, jnp.asarray([2, 3])].set(True)
    state = start = jax.random.normal(keys[4], (2, 3, 4, 4))
    expected = []
    for t in range(13):
        kept = jnp.where(begins[:, t], 0.0, 1.0)[:, None] * jnp.exp(fade[:, t])
        state = kept[..., None, None] * state + jnp.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        expected.append(jnp.einsum("bhkv,bhk->bhv", state, q[:, t]))
    for chunk in (1, 5, 64):
        y, last = recurrent.scanned(q, k, v, fade, begins, start, chunk)
        np.testing.assert_allclose(y, jnp.stack(expected, 1), atol=1e-4)
        np.testing.assert_allclose(last, state, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe-bias", "hybrid"])
def test_a_killed_run_goes_on_to_the_same_bits_and_adapters_train_alone(name: str, tmp_path: Path) -> None:
    family, options, own = MODELS[name]
    values = {**PACKED, "architecture": {"block_size": 32, "family": family, **options, family: own}}
    whole = tiny.trainer(JOB, values, tmp_path / "whole")
    before = whole.state.params["layers"]["mlp"]["bias"] if family == "moe" else None
    before = None if before is None else np.asarray(before)
    whole.run()
    records = tiny.records(whole.spec.run_dir, "train")
    assert records[-1]["ce"] < records[0]["ce"]
    if before is not None:
        assert records[0]["balance"] > 0
        assert not np.array_equal(before, whole.state.params["layers"]["mlp"]["bias"]), "the bias evens loads"
    tiny.copy_until(whole, tmp_path / "killed", 3)
    killed = tiny.trainer(JOB, values, tmp_path / "killed")
    killed.run()
    tiny.same_state(whole, killed)

    targets = "[q, up, router]" if family == "moe" else "[q, step, out]"
    targets = f"optimization.lora={{rank: 2, targets: {targets}}}"
    adapters = tiny.trainer(JOB, values, tmp_path / "adapters", targets, "training.tokens=768")
    before = {path: np.asarray(leaf) for path, leaf in leaves_of(adapters.state.params).items()}
    adapters.run()
    after = leaves_of(adapters.state.params)
    moved = {path for path in before if not np.array_equal(before[path], np.asarray(after[path]))}
    assert moved == {path for path in before if path.endswith(("lora_in", "lora_out"))}
    shapes = {"moe": ("layers/mlp/up", (2, 4, 32, 2)), "hybrid": ("layers/layer_0/state/step", (32, 2))}
    module, shape = shapes[family]
    assert before[f"{module}/lora_in"].shape == shape


@pytest.mark.slow
def test_every_mesh_gives_the_values_of_one_device() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("families_program.py"))],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == 2
