"""An exponential average of the trained parameters: its value, its scores, its way out, exact resuming."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.analysis.export import export_run
from holdfast.cli.app import app
from holdfast.errors import UserError
from holdfast.execution.checkpoints import find_checkpoint
from holdfast.models.parameters import leaves_of
from holdfast.models.pretrained import load_params
from holdfast.report.page import render
from holdfast.report.run_files import open_run as read_run
from holdfast.training.runs import open_run
from holdfast.training.state import objective_at
from holdfast.training.step import train_step
from training import killing, tiny

pytestmark = pytest.mark.slow  # whole runs with an average

JOB = "continual/train/abcd_kl"
OPTIONS = ("training.ema=0.75", "eval.evaluations=[]", "training.validation=false", "logging.checkpoint_interval=5")
STEP = jax.jit(train_step, static_argnums=3)


def continual(folder: Path, *overrides: str) -> Any:
    return tiny.trainer(JOB, tiny.CONTINUAL, folder, *OPTIONS, *overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with an average, of adapters, so that both ways of putting it back are seen."""
    lora = ("optimization.lora.rank=2", "optimization.lora.targets=[q,down]", "optimization.lr=0.01")
    trainer = continual(tmp_path_factory.mktemp("whole"), *lora)
    trainer.run()
    return trainer


@pytest.mark.parametrize("freeze", ["[]", "[embed*,layers/0/*]"])
def test_the_average_is_the_one_computed_by_hand(tmp_path: Path, freeze: str) -> None:
    trainer = continual(tmp_path, f"optimization.freeze={freeze}", "training.evaluate=false")
    state, batch = trainer.state, trainer.batch()
    trained = objective_at(trainer.resolved, 0).trained
    mean = jax.device_get(trained(state.params))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.ema), mean)
    for _ in range(3):
        state, _, _ = STEP(state, batch, jax.random.key(0), trainer.batch_shape[0])
        mean = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * np.asarray(new), mean, trained(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.ema), mean)
    full = leaves_of(state.ema_params())
    assert full.keys() == leaves_of(state.params).keys()
    if freeze != "[]":
        np.testing.assert_array_equal(full["embed/embedding"], state.params["embed"]["embedding"])
    broken = state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params))
    skipped, _, meta = STEP(broken, batch, jax.random.key(0), trainer.batch_shape[0])
    assert int(meta["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(skipped.ema), jax.device_get(state.ema))


def test_its_scores_stand_beside_those_of_the_weights(whole: Any) -> None:
    results = json.loads((whole.spec.run_dir / "results.json").read_text())
    assert results["ema"]["decay"] == 0.75
    own, averaged = results["matrix"]["nll"], results["ema"]["matrix"]["nll"]
    assert own[0] == averaged[0], "before training they are the same"
    assert own[2] != averaged[2]
    assert results["ema"]["metrics"]["nll"]["average"] == pytest.approx(-np.mean(averaged[2]))
    page = render(read_run(whole.spec.run_dir))
    assert "Averaged weights (EMA, decay 0.75)" in page
    assert page.index('data-matrix="matrix_nll"') < page.index('data-matrix="ema_matrix_nll"')
    assert repr(averaged[2][0]) in page
    said = CliRunner().invoke(app, ["eval", str(whole.spec.run_dir), "--tasks", "lists", "--ema", "--json"])
    assert json.loads(said.stdout)["lists"]["measures"]["nll"] == pytest.approx(averaged[2][0], abs=1e-5)


def test_it_can_be_exported(whole: Any, tmp_path: Path) -> None:
    name = f"{whole.spec.run_dir}@final"
    export_run(name, tmp_path / "out", ema=True)
    exported = load_params(tmp_path / "out", whole.resolved.model.options, whole.topology.mesh)
    loaded = whole.restorer.weights(find_checkpoint(whole.checkpoint_dir, "final"), "ema")
    jax.tree.map(np.testing.assert_array_equal, exported, loaded)
    apart = whole.state.ema_params()
    kernel = apart["layers"]["mlp"]["down"]
    merged = kernel["kernel"] + 8.0 * np.einsum("lir,lro->lio", kernel["lora_in"], kernel["lora_out"])
    np.testing.assert_allclose(exported["layers"]["mlp"]["down"]["kernel"], merged, atol=1e-5)
    assert np.abs(whole.state.params["layers"]["mlp"]["down"]["lora_out"] - kernel["lora_out"]).max() > 0


def test_a_run_without_one_says_so(tmp_path: Path) -> None:
    trainer = tiny.trainer("gpt/train/pretrain", tiny.PRETRAIN, tmp_path)
    trainer.save(Path("mine"))
    info = find_checkpoint(trainer.checkpoint_dir, "mine")
    with pytest.raises(UserError, match="made without training/ema"):
        trainer.restorer.weights(info, "ema")


def test_a_stopped_run_goes_on_to_the_same_average(whole: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(whole.spec.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "16")
    assert find_checkpoint(run_dir / "checkpoints", "latest").step == 15
    assert open_run(run_dir).trainer().state.ema is not None
    from holdfast.training.run import make_trainer

    resumed = make_trainer(whole.resolved, type(whole.spec).local(tmp_path, name="run"))
    resumed.run()
    one, two = jax.device_get(whole.state.arrays()), jax.device_get(resumed.state.arrays())
    assert "ema" in one
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert killing.losses(run_dir) == killing.losses(whole.spec.run_dir)
