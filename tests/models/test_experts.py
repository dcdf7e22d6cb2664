"""Mixtures of experts against their plain formula; loads that are evened; what a config may ask for."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast import registry
from holdfast.errors import ConfigError, UserError
from holdfast.models import ArchitectureConfig, experts
from holdfast.models.family import chosen_family, resolve_model
from holdfast.models.hybrid import HybridConfig
from holdfast.models.kernels import lowering_for
from holdfast.models.moe import MoeConfig, MoeSpec
from holdfast.models.pretrained import family_for, mixtral
from training import tiny

E, D, F = 4, 8, 12
SPEC = MoeSpec(1, D, 2, 2, 4, F, 64, 16, activation="silu_gated", norm="rms", n_experts=E)

SPEC_GATED = dataclasses.replace(SPEC, positions="rotary", norm_eps=1e-5)


def kernels() -> experts.Kernels:
    keys = jax.random.split(jax.random.key(0), 5)
    up, gate = (jax.random.normal(key, (E, D, F)) for key in keys[:2])
    down, inward, outward = (
        jax.random.normal(key, shape) for key, shape in zip(keys[2:], ((E, F, D), (E, D, 2), (E, 2, F)), strict=True)
    )
    return experts.Kernels(experts.Kernel(up, inward, outward), experts.Kernel(gate), experts.Kernel(down))


def plain(x: jax.Array, choice: jax.Array, weights: jax.Array, given: experts.Kernels) -> jax.Array:
    """Every expert for every token; the chosen ones count."""
    assert given.gate is not None
    up = given.up.kernel + given.up.inward @ given.up.outward
    inner = jax.nn.silu(jnp.einsum("nd,edf->nef", x, given.gate.kernel)) * jnp.einsum("nd,edf->nef", x, up)
    said = jnp.einsum("nef,efd->ned", inner, given.down.kernel)
    share = jnp.zeros((x.shape[0], E)).at[jnp.arange(x.shape[0])[:, None], choice].add(weights)
    return jnp.einsum("ned,ne->nd", said, share)


@pytest.mark.parametrize("loads", ["even", "one"])
def test_sorted_blocks_are_the_plain_formula_with_its_gradients(loads: str) -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    x, weights = jax.random.normal(keys[0], (21, D)), jax.random.uniform(keys[1], (21, 2))
    choice = jnp.argsort(jax.random.uniform(keys[2], (21, E)), axis=1)[:, :2]
    if loads == "one":  # all tokens go to the same experts: none is dropped
        choice = jnp.tile(jnp.asarray([[3, 1]]), (21, 1))

    def ours(x, weights, given):
        return experts.mixed(x, choice, weights, given, "silu_gated")[0]

    both = [
        jax.jit(jax.value_and_grad(lambda *args, f=f: jnp.sin(f(*args)).sum(), argnums=(0, 1, 2)))(
            x, weights, kernels()
        )
        for f in (ours, lambda x, weights, given: plain(x, choice, weights, given))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=2e-4), *both)
    with lowering_for("tpu"):  # where blocks are those of ragged_dot
        elsewhere = ours(x, weights, kernels())
    np.testing.assert_allclose(elsewhere, plain(x, choice, weights, kernels()), atol=1e-3, rtol=1e-4)


def test_slots_hold_every_assignment_once_in_blocks_of_one_expert() -> None:
    choice = jax.random.randint(jax.random.key(0), (37, 2), 0, E)
    slots = experts.slots_for(choice, E, 8)
    held = np.asarray(slots.assignment)
    np.testing.assert_array_equal(held[np.asarray(slots.slot).reshape(-1)], np.arange(74))
    assert (held == 74).sum() == held.size - 74
    for block, expert in enumerate(np.asarray(slots.expert_of_block)):
        assignments = [one for one in held[block * 8 : block * 8 + 8] if one < 74]
        assert {int(np.asarray(choice).reshape(-1)[one]) for one in assignments} <= {int(expert)}
        assert assignments == sorted(assignments)


def test_the_bias_moves_against_the_load_and_weights_do_not_see_it() -> None:
    spec = MoeSpec(**{**SPEC.__dict__, "balance": "bias"})
    module, x = experts.Experts(spec), jax.random.normal(jax.random.key(2), (2, 16, D))
    params = nn.meta.unbox(module.init(jax.random.key(3), x))["params"]

    def loss(params):
        y, measured = module.apply({"params": params}, x)
        return measured["router_bias"], y

    (value, y), slope = jax.value_and_grad(loss, has_aux=True)(params)
    assert value == 0
    choice = jax.lax.top_k(x @ params["router"]["kernel"], 2)[1]
    loads = np.bincount(np.asarray(choice).reshape(-1), minlength=E)
    np.testing.assert_array_equal(np.asarray(slope["bias"]), np.sign(loads - loads.mean()))
    # A bias that leaves the choice as it is changes nothing.
    shifted = {**params, "bias": params["bias"] + 0.5}
    np.testing.assert_array_equal(module.apply({"params": shifted}, x)[0], y)


def test_the_loss_of_the_loads_is_one_where_they_are_even() -> None:
    scores = jnp.full((1, 8, E), 1 / E)
    even = jnp.asarray([[[0, 1], [2, 3]] * 4])
    assert experts._measured(SPEC, scores, scores, even)["balance"] == 1
    uneven = jax.nn.softmax(jnp.asarray([5.0, 0, 0, 0])) * jnp.ones((1, 8, 1))
    assert experts._measured(SPEC, uneven, uneven, 0 * even)["balance"] > 3


def test_a_preset_names_its_family() -> None:
    model = tiny.resolved("gpt/train/pretrain", {"architecture": {"preset": "tiny-moe", "n_layers": 2}}).model
    assert (model.family, model.options.n_experts, model.options.n_layers) == ("moe", 8, 2)
    assert model.options.n_ff * model.options.top_k == 384
    dense = resolve_model("decoder", ArchitectureConfig(n_layers=2, n_ff=384), None, block_size=512, vocab_size=320)
    assert model.options.active_parameters() == dense.num_parameters() + 2 * 128 * 8, "and the router"
    assert model.flops_per_token() == dense.flops_per_token() + 3 * 2 * 2 * 128 * 8


def test_mixtures_are_exported_as_those_that_have_what_they_have() -> None:
    assert family_for(SPEC_GATED).model_type == "mixtral"
    assert family_for(dataclasses.replace(SPEC_GATED, normalise=False, qk_norm=True)).model_type == "qwen3_moe"
    for changes, option in (({"n_shared": 1}, "n_shared"), ({"balance": "bias"}, "balance")):
        with pytest.raises(UserError, match=f"architecture/{option}"):
            family_for(dataclasses.replace(SPEC_GATED, **changes))
    with pytest.raises(UserError, match="known for mixtral, qwen3_moe"):
        family_for(SPEC_GATED, "llama")
    hybrid = resolve_model("hybrid", ArchitectureConfig(), HybridConfig(), block_size=32, vocab_size=320).options
    with pytest.raises(UserError, match="a model of the family hybrid has no form"):
        family_for(hybrid)


def test_a_folder_of_experts_is_of_their_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **mixtral.config(SPEC_GATED)}))
    source = ArchitectureConfig(source=str(tmp_path))
    assert chosen_family(source, "decoder") == "moe"
    assert chosen_family(source, "own") == "own", "a trainer's own family refuses it"
    sizes = {"block_size": 16, "vocab_size": 64}
    spec = resolve_model("moe", source, MoeConfig(z_loss=0.5, balance="none"), **sizes).options
    assert (spec.n_experts, spec.z_loss, spec.balance) == (E, 0.5, "none")
    with pytest.raises(ConfigError, match=r"architecture/from.*of the family moe"):
        resolve_model("decoder", source, None, **sizes)
    with pytest.raises(ConfigError, match="architecture/moe/n_experts: got 3, expected 4"):
        resolve_model("moe", source, MoeConfig(n_experts=3), **sizes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "tiny-moe", "family": "decoder"}, "architecture/preset.*of the family moe"),
        ({"preset": "tiny-moe", "moe": {"top_k": 9}}, "architecture/moe/top_k: got 9, expected at most"),
        ({"preset": "tiny-moe", "bias": True}, "architecture/bias.*experts have no biases"),
        ({"family": "moe", "preset": "wrong-moe"}, "architecture/preset.*not speed"),
        ({"preset": "tiny-moe", "moe": {"balance": "luck"}}, "architecture/moe/balance"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiny-moe" in registry.models
    monkeypatch.setattr(registry.models, "_entries", dict(registry.models._entries))
    registry.models.register("wrong-moe")({"n_layers": 1, "n_embd": 8, "n_head": 1, "family": "moe", "moe/speed": 3})
    with pytest.raises(ConfigError, match=message):
        tiny.resolved("gpt/train/pretrain", {"architecture": values})


def test_options_without_a_preset_are_those_of_eight_experts() -> None:
    model = resolve_model("moe", ArchitectureConfig(), MoeConfig(), block_size=32, vocab_size=320)
    assert (model.options.n_experts, model.options.top_k, model.options.n_shared) == (8, 2, 0)
