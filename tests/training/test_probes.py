"""Probes: what they say is right, and the run is the same to the bit with and without them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.training.probes import update_norms
from training import killing, tiny

JOB = "continual/train/abcd_kl"
QUIET = ("training.evaluate=false", "training.validation=false")
PROBES = ("logging.probes=[update_norms,hidden_drift]", "logging.probe_interval=4", "logging.report_interval=3")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path_factory.mktemp("probed"), *QUIET, *PROBES)
    trainer.run()
    return trainer


def test_a_run_with_probes_is_the_same_to_the_bit(probed: Any, tmp_path: Path) -> None:
    plain = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *QUIET)
    plain.run()
    for one, two in zip(jax.tree.leaves(plain.state.arrays()), jax.tree.leaves(probed.state.arrays()), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    losses = killing.losses(plain.spec.run_dir)
    for step, loss in killing.losses(probed.spec.run_dir).items():
        assert loss == losses[step]


def test_they_are_recorded_at_their_own_steps(probed: Any) -> None:
    found = {record["step"]: record for record in killing.train_records(probed.spec.run_dir)}
    assert sorted(found) == [3, 4, 6, 8, 9, 12, 15, 16]
    for step, record in found.items():
        assert ("update_norm/layers/0" in record) == (step % 4 == 0)
    assert {name for name in found[4] if name.startswith("update_norm/")} >= {
        "update_norm/embed",
        "update_norm/layers/1",
    }
    assert "hidden_drift" not in found[8], "no reference yet"
    assert 0 < found[12]["hidden_drift"] < found[16]["hidden_drift"] < 2


def test_update_norms_are_those_of_the_updates(tmp_path: Path) -> None:
    """Plain gradient descent: an update is the learning rate times the gradient."""
    trainer = tiny.trainer(
        "gpt/train/pretrain",
        tiny.PRETRAIN,
        tmp_path,
        *QUIET,
        "logging.probes=[update_norms]",
        "optimization.optimizer=sgd",
        "optimization.weight_decay=0",
        "optimization.clip_norm=0",
    )
    trainer.run()
    first = killing.train_records(trainer.spec.run_dir)[0]
    whole = np.sqrt(sum(value**2 for name, value in first.items() if name.startswith("update_norm/")))
    assert whole == pytest.approx(first["learning_rate"] * first["grad_norm"], rel=1e-4)


def test_layers_that_are_not_stacked_have_a_norm_each() -> None:
    """As in the family `hybrid`, whose parameters have no axis of layers."""
    updates = {
        "embed": {"embedding": jnp.full((5, 2), 2.0)},
        "layers": {"layer_0": {"up": {"kernel": jnp.ones((2, 8))}}, "layer_1": {"norm": {"scale": jnp.full(4, 3.0)}}},
    }
    found = update_norms(None, None, None, updates)  # type: ignore[arg-type]  # it looks at updates alone
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"update_norm/embed": 40**0.5, "update_norm/layers/0": 4.0, "update_norm/layers/1": 6.0}
    )
