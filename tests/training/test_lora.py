"""Runs that train adapters, or leave parameters as they are: state, files, resuming, branches, bases, penalties."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast import registry
from holdfast.analysis.export import export_run
from holdfast.analysis.interpolation import Interpolator
from holdfast.errors import UserError
from holdfast.execution.checkpoints import find_checkpoint, list_checkpoints
from holdfast.models.parameters import is_adapter, leaves_of
from holdfast.models.pretrained import load_params
from holdfast.training.initial import NoRows
from holdfast.training.run import write_run_files
from holdfast.training.runs import open_run
from holdfast.training.state import stage_state, without_adapters
from holdfast.training.step import accumulated, micro_loss, train_step
from training import killing, tiny

pytestmark = pytest.mark.slow  # whole runs with adapters; tests/models/test_lora.py checks their arithmetic

CONTINUAL, PRETRAIN = "continual/train/abcd_kl", "gpt/train/pretrain"
LORA = ("optimization.lora.rank=2", "optimization.lora.targets=[q,v,down]", "optimization.lr=0.01")
QUIET = ("training.evaluate=false", "training.validation=false")


def continual(folder: Path, *overrides: str, name: str = "run") -> Any:
    return tiny.trainer(CONTINUAL, tiny.CONTINUAL, folder, *LORA, *overrides, name=name)


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def assert_equal(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first), jax.device_get(second))


def logits(trainer: Any, params: Any) -> Any:
    return trainer.resolved.model.module.apply({"params": params}, trainer.batch().x[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run of adapters with a penalty whose reference is taken at the second stage."""
    trainer = continual(tmp_path_factory.mktemp("whole"))
    trainer.run()
    return trainer


def test_only_adapters_move_and_only_they_have_state(whole: Any) -> None:
    fresh = tiny.trainer(CONTINUAL, tiny.CONTINUAL, whole.spec.root, name="fresh")
    assert_equal(without_adapters(whole.state.params), fresh.state.params)
    moved = {path: leaf for path, leaf in leaves_of(whole.state.params).items() if path.endswith("lora_out")}
    assert len(moved) == 3
    assert all(np.abs(leaf).max() > 0 for leaf in moved.values())
    trained = [leaf for path, leaf in leaves_of(whole.state.params).items() if path.endswith(("lora_in", "lora_out"))]
    # Two moments each, and Adam's count.
    assert num_bytes(whole.state.opt_state) == 2 * num_bytes(trained) + 4
    assert num_bytes(whole.state.opt_state) < num_bytes(fresh.state.opt_state) / 10


def test_checkpoints_hold_adapters_and_the_bases_fingerprint(whole: Any) -> None:
    info = find_checkpoint(whole.checkpoint_dir, "final")
    assert info.manifest["base"] == {
        "fingerprint": whole.state.base.fingerprint,
        "from": None,
        "step": 0,
        "reference": "adapters",
    }
    held = whole.state.arrays()
    assert all(is_adapter(path) for path in leaves_of(held["params"]))
    # Adapters, two moments of each, their snapshot and the manifest leave no room for the base.
    assert info.num_bytes < num_bytes(without_adapters(whole.state.params))
    assert find_checkpoint(whole.checkpoint_dir, "boundary_1").manifest["base"]["reference"] is None


def test_the_reference_is_a_snapshot_of_the_adapters_alone(whole: Any) -> None:
    boundary = continual(whole.spec.root, name="looking")
    boundary.state = boundary.restorer.load(boundary.state, find_checkpoint(whole.checkpoint_dir, "boundary_1"))
    assert {is_adapter(path) for path in leaves_of(whole.state.reference)} == {True}
    assert_equal(whole.state.reference_params(), boundary.state.params)
    penalties = [record["penalty"] for record in killing.train_records(whole.spec.run_dir)]
    assert penalties[8] == pytest.approx(0, abs=1e-6)
    assert penalties[-1] > 1e-5


def test_a_reference_from_the_first_step_is_the_base_without_a_copy(tmp_path: Path) -> None:
    trainer = continual(tmp_path, "stages.0.beta=0.5", "stages.0.update_reference=true", "stages.1.beta=0", *QUIET)
    trainer.state = stage_state(trainer.state, trainer.resolved, 0, NoRows(trainer.resolved))
    assert trainer.state.reference == {}
    assert_equal(trainer.state.reference_params(), without_adapters(trainer.state.params))
    stepping, batch = jax.jit(train_step, static_argnums=3), trainer.batch()
    state, _, first = stepping(trainer.state, batch, jax.random.key(0), trainer.batch_shape[0])
    assert float(first["penalty"]) == pytest.approx(0, abs=1e-6)
    _, _, second = stepping(state, batch, jax.random.key(0), trainer.batch_shape[0])
    assert float(second["penalty"]) > 0


def test_a_stopped_run_goes_on_to_the_same_end(whole: Any, tmp_path: Path) -> None:
    """From a checkpoint inside the stage whose reference is a snapshot of the adapters."""
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(whole.spec.run_dir, run_dir)
    for step in (16, 8):
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    resumed = continual(tmp_path, *QUIET)
    resumed.run()
    assert_equal(resumed.state.arrays(), whole.state.arrays())
    assert killing.losses(run_dir) == killing.losses(whole.spec.run_dir)


def test_a_run_is_opened_and_exported_merged(whole: Any, tmp_path: Path) -> None:
    opened = open_run(whole.spec.run_dir).trainer("final")
    assert_equal(opened.state.params, whole.state.params)
    export_run(f"{whole.spec.run_dir}@final", tmp_path / "out")
    params = load_params(tmp_path / "out", whole.resolved.model.options, whole.topology.mesh)
    np.testing.assert_allclose(logits(whole, params), logits(whole, whole.state.params), atol=1e-5)
    assert np.abs(logits(whole, params) - logits(whole, without_adapters(whole.state.params))).max() > 1e-3


def test_other_weights_under_the_adapters_are_refused(whole: Any, tmp_path: Path) -> None:
    base = tiny.trainer(PRETRAIN, tiny.PRETRAIN, tmp_path, name="base")
    write_run_files(base.resolved, base.spec.run_dir)
    base.save(Path("mine"))
    folder = tmp_path / "folder"
    export_run(f"{base.spec.run_dir}@mine", folder)
    values = {**tiny.CONTINUAL, "architecture": {"block_size": 32, "from": str(folder)}}
    values["stages"] = [{**stage, "tokens": 8 * 32 * 2} for stage in tiny.CONTINUAL["stages"]]

    def trainer() -> Any:
        return tiny.trainer(CONTINUAL, values, tmp_path, *LORA, *QUIET)

    trainer().run()
    assert open_run(tmp_path / "general" / "default" / "run").trainer().state.base is not None
    base.state = base.state.replace(params=jax.tree.map(lambda leaf: leaf * 1.5, base.state.params))
    for file in folder.iterdir():
        file.unlink()
    base.state = base.state.replace(step=base.state.step + 1)
    base.save(Path("other"))
    export_run(f"{base.spec.run_dir}@other", folder)
    with pytest.raises(UserError, match=r"were trained on other weights than .*folder has now"):
        trainer().run()
    assert list_checkpoints(tmp_path / "general" / "default" / "run" / "checkpoints"), "nothing was set aside"
    with pytest.raises(UserError, match="were trained on other weights"):
        export_run(str(tmp_path / "general" / "default" / "run"), tmp_path / "never")


def test_a_branch_may_put_adapters_on_its_parent(tmp_path: Path) -> None:
    parent = tiny.trainer(CONTINUAL, tiny.CONTINUAL, tmp_path, *QUIET, name="parent")
    parent.run()
    source = f"{parent.spec.run_dir}@boundary_1"
    values = {**tiny.CONTINUAL, "optimization": {**tiny.CONTINUAL["optimization"], "lora": {"rank": 2}}}
    child = tiny.trainer(CONTINUAL, values, tmp_path, *QUIET, name="child", parent=source)
    child.run()
    assert killing.losses(child.spec.run_dir).keys() == killing.losses(parent.spec.run_dir).keys()
    info = find_checkpoint(child.checkpoint_dir, "final")
    assert info.manifest["base"]["from"] == "../parent@8"
    assert info.manifest["base"]["step"] == 8
    assert info.manifest["base"]["reference"] == "base"
    boundary = parent.restorer.weights(find_checkpoint(parent.checkpoint_dir, "boundary_1"))
    assert_equal(without_adapters(child.state.params), boundary)
    assert_equal(child.state.reference_params(), boundary)
    assert_equal(open_run(child.spec.run_dir).trainer("final").state.params, child.state.params)
    between = Interpolator(source, f"{child.spec.run_dir}@final", tasks=["lists"])
    between.save(1.0, tmp_path / "average", "1")
    average = open_run(tmp_path / "average").trainer()
    np.testing.assert_allclose(logits(child, average.state.params), logits(child, child.state.params), atol=1e-5)
    grandchild = tiny.trainer(PRETRAIN, tiny.PRETRAIN, tmp_path, *QUIET, *LORA, name="grandchild")
    origin = find_checkpoint(child.checkpoint_dir, "final")
    grandchild.state = grandchild.restorer.begun_from(grandchild.state, origin)
    np.testing.assert_allclose(logits(child, grandchild.state.params), logits(child, child.state.params), atol=1e-5)
    assert grandchild.state.base.source == "../child@16"


def test_a_penalty_on_parameters_sees_the_sum(whole: Any, tmp_path: Path) -> None:
    """The distance of merged weights, to a reference that is the base itself."""
    state = whole.state.replace(reference={}, beta=jax.numpy.float32(1))
    penalty = registry.penalties.get("l2_reference")
    state = state.replace(objective=dataclasses.replace(state.objective, penalty=penalty))
    (_, parts), gradients = accumulated(micro_loss, state, whole.batch(), jax.random.key(0))
    new = whole.restorer.weights(find_checkpoint(whole.checkpoint_dir, "final"))
    squares = jax.tree.map(lambda a, b: 0.5 * float(((a - b) ** 2).sum()), new, without_adapters(state.params))
    assert 0 < float(parts["penalty"]) == pytest.approx(sum(jax.tree.leaves(squares)), rel=1e-4)
    assert all(path.endswith(("lora_in", "lora_out")) for path in leaves_of(gradients))


@pytest.mark.parametrize("extra", [(), pytest.param(("optimization.optimizer=muon",), marks=pytest.mark.slow)])
def test_frozen_parameters_stay_bit_by_bit(tmp_path: Path, extra: tuple[str, ...]) -> None:
    freeze = "optimization.freeze=[embed*,layers/0/*,final_norm]"
    trainer = tiny.trainer(PRETRAIN, tiny.PRETRAIN, tmp_path, freeze, *extra, *QUIET)
    before = jax.device_get(trainer.state.params)
    counted = trainer.resolved.trainable.num_trained(trainer.resolved.model)
    assert sum(leaf.size for leaf in jax.tree.leaves(trainer.resolved.trainable.part(trainer.state.params))) == counted
    if not extra:
        assert num_bytes(trainer.state.opt_state) == 2 * 4 * counted + 4
    trainer.run()
    for (path, old), new in zip(leaves_of(before).items(), leaves_of(trainer.state.params).values(), strict=True):
        if path.startswith("layers/"):
            np.testing.assert_array_equal(old[0], new[0], err_msg=path)
            assert np.abs(old[1] - new[1]).max() > 0, path
        else:
            np.testing.assert_array_equal(old, new, err_msg=path)
    again = tiny.trainer(PRETRAIN, tiny.PRETRAIN, tmp_path, freeze, *extra, *QUIET)
    again.state = again.restorer.load(again.state, list_checkpoints(again.checkpoint_dir)[-1])
    assert_equal(again.state.arrays(), trainer.state.arrays())


def test_the_plan_counts_adapters(tmp_path: Path) -> None:
    from holdfast.analysis.plan import plan_run

    full = plan_run(tiny.resolved(CONTINUAL, tiny.CONTINUAL))
    small = plan_run(tiny.resolved(CONTINUAL, tiny.CONTINUAL, *LORA))
    trainer = continual(tmp_path)
    memory = small["estimated_memory"]
    assert memory["optimizer"] == num_bytes(trainer.state.opt_state)
    assert memory["parameters"] == num_bytes(trainer.state.params)
    assert memory["gradients"] * 2 + 4 == memory["optimizer"]
    assert memory["reference"] < full["estimated_memory"]["reference"] / 10
    assert small["trained_parameters"] == trainer.resolved.trainable.num_trained(trainer.resolved.model)
    json.dumps(small)


CONFIG = """
job: continual/train/abcd_kl
stages:
- {tokens: 10240, data: [{name: lists, style: PADDED}], beta: 0.2, update_reference: true}
- {tokens: 10240, data: [{name: arithmetic, style: PADDED}], beta: 0.2, update_reference: true, overlap: 0.8}
- {tokens: 10240, data: [{name: lists, style: PADDED}], lr: 0.5, optimizer: reset}
training: {batch_size: 8, per_device_batch_size: 2, validation_steps: 8}
optimization: {lr: 0.01, kl: {estimator: forward}, lora: {rank: 4, alpha: 8, targets: [q, v, up, down]}}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 64, n_head: 4, dropout: 0.1}
logging: {report_interval: 1, checkpoint_interval: 7, validation_interval: 40}
eval: {evaluations: [arithmetic], limit: 8}
"""


@pytest.mark.slow
def test_kills_at_random_instants_change_nothing(tmp_path: Path) -> None:
    """The reference is the base, then a snapshot of the adapters, then gone; the optimizer is reset."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    env = killing.environment(tmp_path / "cache")
    whole = killing.finish(config, tmp_path / "whole", env)
    killed = killing.kill_at_random(config, tmp_path / "killed", env, times=3, seed=7, total_steps=120)
    assert killed >= 2
    resumed = killing.finish(config, tmp_path / "killed", env)
    assert len(killing.losses(whole)) == 120
    killing.assert_identical(whole, resumed)
    held = killing.final_arrays(whole)
    assert all("lora" in name for name in held if "'params'" in name)


@pytest.mark.slow
def test_adapters_are_sharded_like_their_kernels(tmp_path: Path) -> None:
    """Two devices that share parameters, then one: the same base, and losses that agree up to rounding."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    one, two = (killing.environment(tmp_path / "cache", devices) for devices in (1, 2))
    first = killing.finish(config, tmp_path / "one", one, "architecture.dropout=0")
    second = killing.finish(config, tmp_path / "two", two, "architecture.dropout=0", "topology.fsdp=2")
    bases = [find_checkpoint(path / "checkpoints", "final").manifest["base"] for path in (first, second)]
    assert bases[0] == bases[1]
    losses = [killing.losses(path) for path in (first, second)]
    assert losses[0].keys() == losses[1].keys()
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 2e-3
    again = killing.finish(config, tmp_path / "two", one, "architecture.dropout=0")
    assert again == second
