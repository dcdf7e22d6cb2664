"""What the backward pass computes again: gradients are the same whatever is saved, and what is saved differs."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.cli.app import main
from holdfast.models import derived
from holdfast.models.config import ArchitectureConfig, ModelSpec
from holdfast.models.family import Model, decoder, resolve_model
from holdfast.models.hybrid import HybridConfig
from holdfast.models.moe import MoeConfig

POLICIES = ("none", "full", "dots", "save_attention")
OWN: dict[str, Any] = {"decoder": None, "moe": MoeConfig(n_experts=4), "hybrid": HybridConfig(layers="sa")}


def model(family: str, remat: Any, **options: Any) -> Model:
    """A small model of a family."""
    sizes = {"n_layers": 2, "n_embd": 16, "n_head": 2, "n_ff": 32, **options}
    architecture = ArchitectureConfig(family=family, remat=remat, **sizes)
    return resolve_model(family, architecture, OWN[family], block_size=32, vocab_size=40)


def gradients(model: Model) -> Any:
    """Of a loss on its hidden states, compiled; parameters do not depend on the policy."""
    rows = jax.random.randint(jax.random.key(1), (2, 32), 0, 40)
    params = model.module.init(jax.random.key(0), rows[:, :1])["params"]
    plain = jax.tree.map(lambda leaf: leaf.value, params, is_leaf=lambda leaf: hasattr(leaf, "names"))

    def loss(params: Any) -> jax.Array:
        found: jax.Array = jnp.square(model.hidden(params, rows)[0]).mean()
        return found

    return jax.jit(jax.value_and_grad(loss))(plain)


@pytest.mark.parametrize(
    "family", ["decoder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("moe", "hybrid"))]
)
def test_gradients_do_not_depend_on_what_is_saved(family: str) -> None:
    plain = gradients(model(family, None))
    for policy in POLICIES[1:]:
        found = gradients(model(family, policy))
        # What is computed again is fused otherwise, so that the last bit of a sum may differ.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, found)


@pytest.mark.parametrize("family", OWN)
def test_each_policy_saves_what_it_says(family: str) -> None:
    kept = {policy: derived.activation_bytes(model(family, policy)) for policy in POLICIES}
    assert kept["full"] < kept["save_attention"] < kept["dots"] < kept["none"]
    # The results of attention's heads, in float32, of the layers that attend.
    attending = 1 if family == "hybrid" else 2
    assert kept["save_attention"] - kept["full"] == attending * 16 * 4


@pytest.mark.parametrize("scan_layers", [True, False])
def test_true_and_false_are_full_and_none(scan_layers: bool) -> None:
    for spelling, policy in ((True, "full"), (False, "none"), (None, "none")):
        told, named = model("decoder", spelling, scan_layers=scan_layers), model("decoder", policy)
        assert told.options.remat_policy == named.options.remat_policy == policy
        assert derived.activation_bytes(told) == derived.activation_bytes(named)
    # A model is described as ever where the old words are used.
    assert model("decoder", True).described()["remat"] is True
    assert model("decoder", None).described()["remat"] is False


def test_estimates_know_what_is_saved() -> None:
    spec = ModelSpec(24, 256, 4, 2, 64, 1024, vocab_size=512, block_size=128, activation="silu_gated")
    each = [decoder(dataclasses.replace(spec, remat=policy)) for policy in ("full", "save_attention", "dots", "none")]
    for estimate in (
        [one.kind.activation_bytes(one) for one in each],
        [one.kind.working_memory(one, 1, 1)["activations"] for one in each],
    ):
        assert estimate == sorted(set(estimate))
    assert [one.kind.rematerialises(one.options) for one in each] == [True, True, True, False]


def test_another_policy_is_a_mistake_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("job: continual/train/abcd_kl\narchitecture: {remat: dot}\n")
    monkeypatch.setattr(sys, "argv", ["holdfast", "plan", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "architecture/remat" in error
    assert "one of none, full, dots, save_attention, true, false" in error
    assert "did you mean 'dots'" in error
