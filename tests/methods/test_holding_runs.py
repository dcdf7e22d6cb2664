"""Methods that hold weights in whole runs: refused where senseless, switched on in a branch, exact after a stop."""

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from holdfast.errors import UserError
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.models.parameters import leaves_of
from training import killing, tiny

JOB = "continual/train/abcd"
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32 * 4, "data": [{"name": "lists", "style": "PACKED"}]},
        {"tokens": 8 * 32 * 6, "data": [{"name": "arithmetic", "style": "PADDED"}]},
        {"tokens": 8 * 32 * 4, "data": [{"name": "lists", "style": "PADDED"}]},
    ],
    "optimization": {"lr": 0.003},
    "training": {**tiny.CONTINUAL["training"], "replay": {"rate": 0.25}},
    "logging": {"report_interval": 1, "checkpoint_interval": 3, "validation_interval": 100, "rolling_checkpoints": 9},
}
ALL = ("ewc", "si", "agem", "sfa", "ssu", "osf")
OPTIONS = {
    "ewc": {"rows": 8, "weight": 100.0},
    "si": {"weight": 10.0},
    "sfa": {"period": 0.5, "beta": 0.25},
    "ssu": {"rows": 8, "stages": [1]},
    "osf": {"stages": [2]},
}
QUIET = ("training.evaluate=false", "training.validation=false")


def values(**changed: Any) -> dict[str, Any]:
    """The options of a run with all methods."""
    training = {**VALUES["training"], "methods": list(ALL)}
    return {**VALUES, "training": training, "methods": {**OPTIONS, **changed}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("plain"), *QUIET)
    made.run()
    return made


@pytest.fixture(scope="module")
def branch(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A branch of the plain run at the end of its first stage that switches all methods on."""
    parent = f"{plain.spec.run_dir}@boundary_1"
    made = tiny.trainer(JOB, values(), tmp_path_factory.mktemp("branch"), *QUIET, parent=parent)
    made.run()
    return made


def weights(run_dir: Path, step: int, made: Any) -> dict[str, Any]:
    """The parameters of a checkpoint by path."""
    info = next(info for info in list_checkpoints(run_dir / "checkpoints") if info.step == step)
    return {path: np.asarray(leaf) for path, leaf in leaves_of(made.restorer.weights(info)).items()}


@pytest.mark.slow
def test_a_branch_of_a_plain_run_switches_all_on(branch: Any, plain: Any) -> None:
    held, free = killing.train_records(branch.spec.run_dir), killing.train_records(plain.spec.run_dir)
    assert [record["loss"] for record in held[:4]] == [record["loss"] for record in free[:4]]
    assert "methods" not in held[3]
    first, last = held[4]["methods"], held[-1]["methods"]
    assert {*first} == {*last} == {"ewc", "si", "agem/projected", "agem/opposed", "si/damped"}
    assert first["si"] == 0, "the parent did not observe: nothing is held before the next boundary"
    assert last["si"] != 0
    assert last["ewc"] > 0
    assert all(record["methods"]["agem/opposed"] in (0, 1, None) for record in held[4:])
    assert any(record["methods"]["agem/opposed"] is not None for record in held[4:])
    assert 0 <= last["si/damped"] <= 1


@pytest.mark.slow
def test_a_branch_says_that_si_starts_with_nothing(plain: Any, tmp_path: Path) -> None:
    told: list[str] = []
    parent = f"{plain.spec.run_dir}@boundary_1"
    made = tiny.trainer(JOB, values(), tmp_path, *QUIET, parent=parent)
    tiny.resume(made, told.append)
    assert any(line.startswith("si: the parent did not observe") and "Ω = 0" in line for line in told)


@pytest.mark.slow
def test_what_ssu_freezes_and_osf_holds_does_not_move_in_a_run(branch: Any, plain: Any) -> None:
    """Beside ewc, si, agem and sfa, with decay, entered with the moments of the stage before."""
    start, middle = (weights(run.spec.run_dir, step, branch) for run, step in ((plain, 4), (branch, 10)))
    frozen = leaves_of(branch.state.memory["ssu"])
    held = 0
    for path, mask in frozen.items():
        still = np.broadcast_to(np.asarray(mask), start[path].shape)
        assert start[path][still].tobytes() == middle[path][still].tobytes(), path
        held += still.sum()
    assert held > 0
    end = weights(branch.spec.run_dir, 14, branch)
    left = leaves_of(branch.state.memory["osf"]["left"])
    for path, u in left.items():
        moved = end[path].astype(np.float64) - middle[path]
        assert np.abs(moved).max() > 1e-5
        assert np.abs(np.einsum("lir,lio->lro", np.asarray(u, np.float64), moved)).max() < 1e-6


def test_sampled_targets_are_drawn_from_the_model_and_moments_are_those_of_what_is_trained(tmp_path: Path) -> None:
    made = tiny.trainer(JOB, VALUES, tmp_path, *QUIET, "optimization.freeze=[layers/0,layers/1/mlp/up]")
    moments = jax.eval_shape(made.state.input_moments, made.batch("train", 0))
    kernels = {path: leaf for path, leaf in leaves_of(made.state.trained()).items() if path.endswith("/kernel")}
    assert "layers/mlp/up/kernel" not in kernels
    assert {path: leaf.shape for path, leaf in moments.items()} == {
        path: leaf.shape[:-1] for path, leaf in kernels.items() if path.startswith("layers")
    }
    state = made.state.replace(params=jax.tree.map(lambda leaf: 8 * leaf, made.state.params))
    micro = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), made.batch("train", 0))
    many = jax.tree.map(lambda leaf: jnp.tile(leaf, (16, 1)), micro)
    drawn = jax.jit(state.sampled)(many, jax.random.key(1))
    np.testing.assert_array_equal(drawn.y >= 0, many.y >= 0)
    np.testing.assert_array_equal(drawn.x, many.x)
    counted = np.asarray((many.y >= 0) & (many.padding_mask > 0))
    model = state.objective.model

    @jax.jit
    def looked_at(rows: Any, drawn: Any) -> Any:
        extra = {"segment_ids": rows.segment_ids, "positions": rows.positions}
        logits = model.module.apply({"params": state.params}, rows.x, **extra)
        return jax.nn.log_softmax(logits), state.log_likelihoods(state.trained(), drawn)

    logp, likelihoods = looked_at(many, drawn)
    logp = np.asarray(logp, np.float64)[counted]
    surprise = -np.asarray(likelihoods, np.float64)[counted]
    entropy = -(np.exp(logp) * logp).sum(-1)
    assert abs((surprise - entropy).mean()) < 5 * (surprise - entropy).std() / np.sqrt(len(entropy))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("agem", ("training.replay=null",), r"training/methods/0: got 'agem', expected old rows in stage 1"),
        ("agem", ("methods.agem.stages=[0]",), "expected old rows in stage 0"),
        ("ewc", ("methods.ewc.stages=[0]",), "no stage ends before the first"),
        ("ssu", ("methods.ssu.stages=[0,1]",), "no stage ends before the first"),
        ("ssu", ("optimization.lora.rank=2",), "got 'ssu', expected no adapters beside it"),
        ("osf", ("optimization.lora.rank=2",), "got 'osf', expected no adapters beside it"),
        ("sfa", ("optimization.lora.rank=2",), "got 'sfa', expected no adapters beside it"),
        ("ssu,osf", (), "got 'ssu', expected no osf beside it in stage 1"),
        ("si", ("training.z_loss=0.1",), r"training/z_loss: got 0.1, expected 0 beside si"),
        ("si", ("methods.si.stages=[1]",), r"methods/si/stages: got \[1\], expected at least two stages"),
        ("si", ("methods.si.stages=[0,2]",), r"methods/si/stages: got \[0, 2\], expected stages in a row"),
        ("si", ("methods.si.stages=[1,2]",), None),
        ("si", ("keep.arithmetic=1",), "training/replay/objective: got 'both', expected ce"),
        ("si", ("keep.arithmetic=1", "training.replay={rate: 0.25, objective: ce}"), None),
        ("ssu", ("methods.ssu.ratio=1.5",), "methods/ssu/ratio"),
        ("sfa", ("methods.sfa.period=0",), "methods/sfa/period"),
        ("ewc,si,agem,sfa,ssu", (), None),
        ("osf,sfa", ("methods.osf.stages=[0]", "methods.sfa.stages=[0,1]"), None),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(
    name: str, overrides: tuple[str, ...], message: str | None
) -> None:
    every = (f"training.methods=[{name}]", *overrides)
    if message is None:
        tiny.resolved(JOB, VALUES, *every)
        return
    with pytest.raises(UserError, match=message):
        tiny.resolved(JOB, VALUES, *every)


def test_si_is_refused_beside_a_penalty_on_tokens() -> None:
    kl = {**VALUES, "stages": [VALUES["stages"][0], {**VALUES["stages"][1], "beta": 0.5, "update_reference": True}]}
    job = "continual/train/abcd_kl"
    with pytest.raises(UserError, match=r"got 'si', expected no penalty on tokens in stage 1, .*beta 0.5"):
        tiny.resolved(job, kl, "training.methods=[si]")
    with pytest.raises(UserError, match="training/replay/objective: got 'kl', expected ce or both beside agem"):
        tiny.resolved(job, kl, "training.methods=[agem]", "training.replay={rate: 0.25, objective: kl}")


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 9, 10, 12])
def test_a_stopped_run_goes_on_to_the_same_end(step: int, branch: Any, plain: Any, tmp_path: Path) -> None:
    """At both boundaries where memories are made, and inside both stages that are held."""
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(branch.spec.run_dir, run_dir)
    for info in list_checkpoints(run_dir / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)
    parent = f"{plain.spec.run_dir}@boundary_1"
    resumed = tiny.trainer(JOB, values(), tmp_path, *QUIET, parent=parent)
    resumed.run()
    assert killing.losses(run_dir) == killing.losses(branch.spec.run_dir)
    for one, two in zip(jax.tree.leaves(resumed.state.arrays()), jax.tree.leaves(branch.state.arrays()), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end_on_four_devices(tmp_path: Path) -> None:
    config = tmp_path / "all.yaml"
    config.write_text(yaml.safe_dump({"job": JOB, **values()}))
    env = killing.environment(tmp_path / "cache", devices=4)
    env["PYTHONPATH"] = str(Path(sys.modules["holdfast"].__file__ or "").parents[1])
    extra = ("topology.data=2", "topology.fsdp=2", *QUIET, "optimization.sam.rho=0.05")
    whole = killing.finish(config, tmp_path / "whole", env, *extra)
    run_dir = tmp_path / "stopped" / "general" / "default" / "run"
    for goal in (4, 8):
        process = killing.start(config, tmp_path / "stopped", env, *extra)
        killing.wait_for(process, run_dir, goal)
        process.kill()
        process.communicate()
    killing.finish(config, tmp_path / "stopped", env, *extra)
    killing.assert_identical(whole, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "neutral"),
    [("ewc", "weight=0"), ("si", "weight=0"), ("ssu", "ratio=0"), ("osf", "rank=0"), ("sfa", "beta=0")],
)
def test_at_its_neutral_setting_a_run_is_plain_to_the_bit(name: str, neutral: str, plain: Any, tmp_path: Path) -> None:
    made = tiny.trainer(JOB, VALUES, tmp_path, *QUIET, f"training.methods=[{name}]", f"methods.{name}.{neutral}")
    made.run()
    for one, two in zip(jax.tree.leaves(made.state.params), jax.tree.leaves(plain.state.params), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
