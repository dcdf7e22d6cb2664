"""The example plug-in: online EWC in one file, from outside: formula, neutral setting, exact resume, meshes, LoRA."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.execution.checkpoints import list_checkpoints
from holdfast.models.parameters import leaves_of
from holdfast.training.data import BoundaryRows
from holdfast.training.initial import NoRows
from holdfast.training.state import stage_state
from training import killing, tiny

PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"
sys.path.append(str(PLUGINS))
import online_ewc  # noqa: E402, F401  # registers the method

JOB = "continual/train/abcd"
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32 * 6, "data": [{"name": "lists", "style": "PACKED"}]},
        {"tokens": 8 * 32 * 6, "data": [{"name": "arithmetic", "style": "PADDED"}], "overlap": 0.4},
        {"tokens": 8 * 32 * 4, "data": [{"name": "lists", "style": "PACKED"}]},
    ],
    "optimization": {"lr": 0.003},
    "logging": {"report_interval": 1, "checkpoint_interval": 4, "validation_interval": 100},
}
EWC = ("training.methods=[online_ewc]", "methods.online_ewc.rows=12", "methods.online_ewc.weight=1000")
QUIET = ("training.evaluate=false", "training.validation=false")


def trainer(folder: Path, *overrides: str, **more: Any) -> Any:
    return tiny.trainer(JOB, VALUES, folder, *QUIET, *overrides, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = trainer(tmp_path_factory.mktemp("ewc"), *EWC)
    made.run()
    return made


def test_it_holds_and_is_recorded(whole: Any, tmp_path: Path) -> None:
    plain = trainer(tmp_path)
    plain.run()
    held, free = killing.train_records(whole.spec.run_dir), killing.train_records(plain.spec.run_dir)
    assert [record["loss"] for record in held[:6]] == [record["loss"] for record in free[:6]], "off in stage 0"
    assert "methods" not in held[5]
    assert held[6]["methods"]["online_ewc"] == pytest.approx(0, abs=1e-12), "nothing has moved yet"
    assert held[9]["methods"]["online_ewc"] > 0
    assert held[9]["loss"] == pytest.approx(held[9]["ce"] + 1000 * held[9]["methods"]["online_ewc"], rel=1e-4)


@pytest.mark.slow
def test_the_fisher_is_the_mean_of_squared_gradients_of_rows(tmp_path: Path) -> None:
    made = trainer(tmp_path, *EWC)
    run, rows = made.resolved, made.batch("train", 4)
    data = BoundaryRows(
        run.curriculum, 6, lambda step: made.batch("train", step), lambda batch: batch, lambda: None, min
    )
    entered = stage_state(made.state, run, 6, data)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), data.old(12))

    def row_log_likelihood(params: Any, index: int) -> Any:
        x, y, mask = flat.x[index], flat.y[index], flat.padding_mask[index]
        extra = {} if flat.segment_ids is None else {"segment_ids": flat.segment_ids[index][None]}
        extra |= {} if flat.positions is None else {"positions": flat.positions[index][None]}
        logp = jax.nn.log_softmax(run.model.module.apply({"params": params}, x[None], **extra)[0])
        return jnp.where((mask > 0) & (y >= 0), logp[jnp.arange(len(y)), jnp.maximum(y, 0)], 0).sum()

    gradient = jax.jit(jax.grad(row_log_likelihood), static_argnums=1)
    squares = [jax.tree.map(np.square, gradient(made.state.params, index)) for index in range(len(flat.x))]
    tokens = (flat.padding_mask > 0).sum()
    wanted = leaves_of(jax.tree.map(lambda *leaves: sum(leaves) / tokens, *squares))
    for path, found in leaves_of(entered.memory["online_ewc"]["fisher"]).items():
        np.testing.assert_allclose(found, wanted[path], rtol=2e-3, atol=1e-9, err_msg=path)
    assert rows.x.shape == made.batch("train", 5).x.shape


def test_stage_state_also_works_on_shapes(tmp_path: Path) -> None:
    made = trainer(tmp_path, *EWC)
    shapes = jax.eval_shape(lambda state: stage_state(state, made.resolved, 6, NoRows(made.resolved)), made.state)
    real = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made.state.params)
    assert jax.tree.map(lambda leaf: leaf.shape, shapes.memory["online_ewc"]["fisher"]) == jax.tree.map(
        lambda pair: pair[0], real, is_leaf=lambda node: isinstance(node, tuple)
    )


@pytest.mark.slow
def test_without_weight_it_is_plain_training_to_the_bit(tmp_path: Path) -> None:
    runs = [trainer(tmp_path, name="plain"), trainer(tmp_path, *EWC, "methods.online_ewc.weight=0", name="neutral")]
    for made in runs:
        made.run()
    for one, two in zip(*(jax.tree.leaves(made.state.params) for made in runs), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.mark.parametrize("step", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 8))])
def test_a_stopped_run_goes_on_to_the_same_end(step: int, whole: Any, tmp_path: Path) -> None:
    """In the first stage, at the boundary where the memory is made, and inside the stage that is held."""
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(whole.spec.run_dir, run_dir)
    kept = [info for info in list_checkpoints(run_dir / "checkpoints") if info.step <= step]
    for info in list_checkpoints(run_dir / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)
    assert kept
    resumed = trainer(tmp_path, *EWC)
    resumed.run()
    assert killing.losses(run_dir) == killing.losses(whole.spec.run_dir)
    for one, two in zip(jax.tree.leaves(resumed.state.arrays()), jax.tree.leaves(whole.state.arrays()), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_a_branch_switches_it_on(tmp_path: Path) -> None:
    plain = trainer(tmp_path, name="plain")
    plain.run()
    branch = trainer(tmp_path, *EWC, name="branch", parent=f"{plain.spec.run_dir}@boundary_1")
    branch.run()
    assert killing.train_records(branch.spec.run_dir)[-1]["methods"]["online_ewc"] > 0


@pytest.mark.slow
def test_adapters_are_held_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, *EWC, "optimization.lora.rank=2")
    made.run()
    assert all(path.endswith(("lora_in", "lora_out")) for path in leaves_of(made.state.memory["online_ewc"]["fisher"]))
    assert killing.train_records(made.spec.run_dir)[-1]["methods"]["online_ewc"] > 0


@pytest.mark.slow
def test_on_four_devices_it_is_killed_and_goes_on(tmp_path: Path) -> None:
    import yaml

    config = tmp_path / "ewc.yaml"
    options = {"training": {**VALUES["training"], "methods": ["online_ewc"]}}
    options["methods"] = {"online_ewc": {"rows": 12, "weight": 1000}}
    config.write_text(yaml.safe_dump({"job": JOB, **VALUES, **options}))
    env = killing.environment(tmp_path / "cache", devices=4) | {"PYTHONPATH": f"{PLUGINS}:{_sources()}"}
    mesh = ("topology.data=2", "topology.fsdp=2")

    def run(out: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "holdfast",
            "--plugin",
            "online_ewc",
            "run",
            str(config),
            "--out",
            out,
            "--name",
            "run",
        ]
        return subprocess.Popen([*command, *mesh], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    whole = run(str(tmp_path / "whole"))
    assert whole.wait() == 0, whole.stderr.read() if whole.stderr else ""
    stopped, run_dir = run(str(tmp_path / "stopped")), tmp_path / "stopped" / "general" / "default" / "run"
    killing.wait_for(stopped, run_dir, 9)
    stopped.kill()
    stopped.wait()
    again = run(str(tmp_path / "stopped"))
    assert again.wait() == 0
    killing.assert_identical(tmp_path / "whole" / "general" / "default" / "run", run_dir)


def _sources() -> str:
    import holdfast

    return str(Path(holdfast.__file__).parents[1])
