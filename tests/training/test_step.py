"""The train step: accumulation, skipped updates, keys, and what a penalty does to it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.data.batches import Batch
from holdfast.training.step import _micro_loss, accumulated, next_beta, token_weights, train_step
from training import tiny

STEP = jax.jit(train_step, static_argnums=3)


@jax.jit
def gradient_of(state: Any, batch: Batch) -> Any:
    return accumulated(_micro_loss, state, batch, jax.random.key(0))


def reshaped(batch: Batch, num_micro: int) -> Batch:
    return Batch(*(None if a is None else np.asarray(a).reshape(num_micro, -1, a.shape[-1]) for a in batch))


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("num_micro", [2, 4, 8])
def test_micro_batches_give_the_gradient_of_the_whole_batch(pretrain: Any, num_micro: int) -> None:
    batch = pretrain.batch()
    lengths = np.asarray(batch.padding_mask).sum(-1)
    assert len(np.unique(lengths)) > 2, "rows of unequal lengths make the test worth something"
    (whole_loss, _), whole = gradient_of(pretrain.state, reshaped(batch, 1))
    (loss, _), parts = gradient_of(pretrain.state, reshaped(batch, num_micro))
    assert float(loss) == pytest.approx(float(whole_loss), abs=1e-6)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_micro_batches_give_the_same_parameters_after_20_steps(pretrain: Any) -> None:
    finals = []
    for num_micro in (1, 2, 4):
        state = pretrain.state
        for index in range(20):
            state, _, _ = STEP(state, reshaped(pretrain.batches[index], num_micro), jax.random.key(0), num_micro)
        finals.append(state.params)
    for other in finals[1:]:
        for a, b in zip(jax.tree.leaves(finals[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_weights_sum_to_one_over_the_whole_batch(pretrain: Any) -> None:
    batch = reshaped(pretrain.batch(), 4)
    loss_weights, _ = token_weights(pretrain.state, batch)
    assert float(loss_weights.sum()) == pytest.approx(1)
    assert (np.asarray(loss_weights) > 0).sum() == ((batch.y >= 0) & (batch.padding_mask > 0)).sum()


def test_a_step_that_is_not_finite_is_skipped_and_counted(pretrain: Any) -> None:
    state = pretrain.state.replace(
        params=jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), pretrain.state.params)
    )
    stepped, loss, meta = STEP(state, reshaped(pretrain.batch(), 1), jax.random.key(0), 1)
    assert not np.isfinite(float(loss))
    assert int(stepped.step) == int(state.step) + 1
    assert (int(meta["skipped"]), int(meta["skipped_in_a_row"])) == (1, 1)
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(stepped.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_good_step_ends_the_row_of_skipped_ones(pretrain: Any) -> None:
    state = pretrain.state.replace(skipped=jnp.int32(3), skipped_in_a_row=jnp.int32(3))
    stepped, _, meta = STEP(state, reshaped(pretrain.batch(), 1), jax.random.key(0), 1)
    assert (int(stepped.skipped), int(meta["skipped_in_a_row"])) == (3, 0)


def test_val_step_returns_sum_and_count(pretrain: Any) -> None:
    batch = reshaped(pretrain.batch("val"), 2)
    loss_sum, count, meta = jax.jit(pretrain.val_step)(pretrain.state, batch)
    assert float(count) == ((batch.y >= 0) & (batch.padding_mask > 0)).sum()
    assert 4 < float(loss_sum) / float(count) < 7
    assert float(meta.tokens) <= float(count)


def test_steps_take_the_specs_three_arrays(pretrain: Any) -> None:
    batch = reshaped(pretrain.batch(), 2)
    loss_sum, count, _ = jax.jit(pretrain.val_step)(pretrain.state, tuple(batch[:3]))
    _, loss, _ = jax.jit(pretrain.train_step, static_argnums=3)(pretrain.state, tuple(batch[:3]), jax.random.key(0), 2)
    assert float(loss) == pytest.approx(float(loss_sum) / float(count), rel=1e-5)


def test_the_batch_of_a_step_is_the_same_twice(pretrain: Any) -> None:
    for slice_name in ("train", "val"):
        first, second = pretrain.batch(slice_name), pretrain.batch(slice_name)
        assert all((a == b).all() for a, b in zip(first, second, strict=True) if a is not None)


def penalised(folder: Path, estimator: str, *overrides: str) -> Any:
    return tiny.trainer(
        "continual/train/abcd_kl", tiny.CONTINUAL, folder, f"optimization.kl.estimator={estimator}", *overrides
    )


def stepped_in_stage_1(trainer: Any, beta: float, reference: Any = None) -> tuple[Any, Any]:
    """Gradient of the loss of a penalised stage, and its meta."""
    state = trainer.state.replace(
        objective=trainer.objective_at(1),
        reference=trainer.state.params if reference is None else reference,
        beta=jnp.float32(beta),
    )
    (_, parts), gradient = gradient_of(state, reshaped(trainer.batches[12], 2))
    return gradient, parts


def other_params(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)


def test_nll_difference_has_the_gradient_of_plain_training_times_one_plus_beta(tmp_path: Path) -> None:
    trainer = penalised(tmp_path, "nll_difference")
    plain, _ = stepped_in_stage_1(trainer, 0.0)
    for reference in (trainer.state.params, other_params(trainer.state.params)):
        scaled, parts = stepped_in_stage_1(trainer, 0.5, reference)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(scaled), strict=True):
            np.testing.assert_allclose(1.5 * np.asarray(a), b, atol=2e-6)
    assert abs(float(parts["penalty"])) > 1e-4


@pytest.mark.parametrize("estimator", ["forward", "reverse"])
def test_exact_penalties_vanish_at_the_reference_and_depend_on_it(estimator: str, tmp_path: Path) -> None:
    trainer = penalised(tmp_path, estimator)
    plain, _ = stepped_in_stage_1(trainer, 0.0)
    same, parts = stepped_in_stage_1(trainer, 0.5)
    assert abs(float(parts["penalty"])) < 1e-6
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved, parts = stepped_in_stage_1(trainer, 0.5, other_params(trainer.state.params))
    assert float(parts["penalty"]) > 1e-4
    assert (
        max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(moved), strict=True))
        > 1e-4
    )


def test_the_l2_penalty_pulls_towards_the_reference_whatever_the_micro_batches(tmp_path: Path) -> None:
    trainer = penalised(tmp_path, "l2_reference")
    reference = other_params(trainer.state.params)
    plain, _ = stepped_in_stage_1(trainer, 0.0, reference)
    pulled, parts = stepped_in_stage_1(trainer, 1.0, reference)
    leaves = zip(*(jax.tree.leaves(t) for t in (plain, pulled, trainer.state.params, reference)), strict=True)
    for before, after, params, anchor in leaves:
        np.testing.assert_allclose(after - before, params - anchor, atol=1e-6)
    assert float(parts["penalty"]) > 0


def test_a_kl_budget_raises_beta_above_the_target_and_lowers_it_below(tmp_path: Path) -> None:
    trainer = penalised(tmp_path, "forward", "optimization.kl.target=0.1")
    state = trainer.state.replace(objective=trainer.objective_at(1), beta=jnp.float32(0.5))
    assert float(next_beta(state, jnp.float32(0.2), jnp.bool_(True))) > 0.5
    assert float(next_beta(state, jnp.float32(0.05), jnp.bool_(True))) < 0.5
    assert float(next_beta(state, jnp.float32(0.1), jnp.bool_(True))) == 0.5
    assert float(next_beta(state, jnp.float32(jnp.nan), jnp.bool_(False))) == 0.5
