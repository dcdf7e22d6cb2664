"""Sharpness-aware minimisation: the gradient of a step is the one at θ + ρ g/‖g‖, on the same rows and key."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holdfast.errors import UserError
from holdfast.models.parameters import leaves_of
from holdfast.training.step import loss_and_gradients, uphill
from training import tiny

SMALL = ("architecture.n_layers=1", "architecture.dropout=0.1", "training.per_device_batch_size=4")


def test_the_step_follows_the_gradient_uphill(tmp_path: Path) -> None:
    trainer = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, tmp_path, *SMALL, "optimization.sam.rho=0.2")
    state, batch, key = trainer.state, trainer.batch("train", 0), jax.random.key(7)
    assert batch.x.shape[0] == 2, "two micro-batches"
    gradients = jax.jit(lambda state: loss_and_gradients(state, batch, key))
    plain = state.replace(objective=dataclasses.replace(state.objective, sam=0.0))
    here, found = gradients(plain), gradients(state)
    length = 0.2 / np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(here.total)))
    moved = jax.tree.map(lambda own, g: own + jnp.float32(length) * g, state.params, here.total)
    there = gradients(plain.replace(params=moved))
    np.testing.assert_allclose(found.loss, here.loss, rtol=1e-6, err_msg="recorded is the loss of the model itself")
    pairs = {"total": (found.total, there.total), "rows": (found.rows, here.total)}
    for name, (got, wanted) in pairs.items():
        for path, leaf in leaves_of(got).items():
            np.testing.assert_allclose(leaf, leaves_of(wanted)[path], rtol=1e-3, atol=1e-6, err_msg=f"{name} {path}")
    apart = optax.global_norm(jax.tree.map(jnp.subtract, found.total, here.total))
    assert apart > 0.01 * optax.global_norm(here.total)
    still = jax.tree.map(jnp.zeros_like, state.params)
    for one, two in zip(jax.tree.leaves(uphill(state, still).params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(one, two, err_msg="where the loss is flat nothing is divided by zero")


def test_a_radius_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="optimization/sam/rho"):
        tiny.resolved("gpt/train/pretrain", tiny.PRETRAIN, "optimization.sam.rho=-1")
