"""Options that save memory change where and how arrays are held, not what a run is: exact, and exactly resumed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from holdfast.errors import ConfigError
from holdfast.execution import memory
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.training import loop
from training import tiny
from training.killing import losses

HOST, HALF = "optimization.kl.reference_memory=host", "optimization.kl.reference_dtype=bfloat16"
MOMENTS = ("optimization.adamw.moment_dtype=bfloat16", "optimization.adamw.second_moment_dtype=bfloat16")
QUIET = ("training.evaluate=false", "training.validation=false", "logging.checkpoint_interval=1")
# Two steps in each stage.
SHORT = tuple(f"stages.{stage}.tokens={8 * 32 * 2}" for stage in (0, 1))
ALL = (HOST, HALF, *MOMENTS, "architecture.remat=save_attention")


def finished(folder: Path, *overrides: str) -> Any:
    """A run of both stages."""
    trainer = tiny.continual(folder, *QUIET, *overrides)
    trainer.run()
    return trainer


def crashed(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, *overrides: str) -> None:
    """A run that ended after a step."""
    after = loop.TrainLoop.after

    def crashing(self: loop.TrainLoop, done: int) -> None:
        after(self, done)
        if done == step:
            self.store.wait()
            raise RuntimeError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainLoop, "after", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            tiny.continual(folder, *QUIET, *overrides).run()


def held(tree: Any) -> set[tuple[str, str]]:
    """Memory and type of the arrays of a tree."""
    return {(leaf.sharding.memory_kind, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)}


@pytest.mark.slow
def test_a_reference_on_the_host_gives_the_same_run_to_the_bit(tmp_path: Path) -> None:
    device, host = finished(tmp_path / "device"), finished(tmp_path / "host", HOST)
    assert held(device.state.reference) == {("device", "float32")}
    assert held(host.state.reference) == {("pinned_host", "float32")}
    assert losses(device.spec.run_dir) == losses(host.spec.run_dir)
    tiny.same_state(device, host)


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run with all of the options."""
    return finished(tmp_path_factory.mktemp("saving"), *ALL)


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 8, 12])
def test_runs_with_all_of_them_resume_exactly(
    step: int, saving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 8 is the boundary, where the reference is taken."""
    crashed(tmp_path, monkeypatch, step, *ALL)
    resumed = finished(tmp_path, *ALL)
    assert held(resumed.state.reference) == {("pinned_host", "bfloat16")}
    assert {kind for _, kind in held(resumed.state.opt_state)} == {"bfloat16", "int32"}
    assert losses(resumed.spec.run_dir) == losses(saving.spec.run_dir)
    tiny.same_state(resumed, saving)


@pytest.mark.slow
def test_a_run_goes_on_with_its_reference_elsewhere_and_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished(tmp_path / "whole")
    crashed(tmp_path / "moved", monkeypatch, 12)
    moved = finished(tmp_path / "moved", HOST)
    assert held(moved.state.reference) == {("pinned_host", "float32")}
    tiny.same_state(moved, whole)


def test_a_reference_in_bfloat16_is_the_rounded_snapshot(tmp_path: Path) -> None:
    trainer = tiny.continual(tmp_path, *QUIET, HOST, HALF)
    state = trainer.state.snapshot(0)
    jax.tree.map(
        lambda kept, own: (kept == own.astype(jnp.bfloat16)).all() or pytest.fail("not rounded once"),
        jax.device_get(state.reference),
        jax.device_get(state.params),
    )
    brought = state.reference_params()
    assert held(brought) == {("device", "float32")}
    assert held(state.reference_weights()) == {("pinned_host", "bfloat16")}


@pytest.mark.slow
def test_the_reference_of_a_checkpoint_is_read_as_the_parameters_are(saving: Any) -> None:
    info = list_checkpoints(saving.spec.run_dir / "checkpoints")[-1]
    assert held(saving.restorer.weights(info, "reference")) == {("device", "float32")}


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("architecture.tie_embeddings=false", "training.per_device_batch_size=4"), marks=pytest.mark.slow),
        pytest.param(("architecture.family=moe",), marks=pytest.mark.slow),
    ],
)
def test_parameters_in_bfloat16_train_and_resume_exactly(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("architecture.param_dtype=bfloat16", *SHORT, *options)
    whole = finished(tmp_path / "whole", *given)
    assert {kind for _, kind in held(whole.state.params) | held(whole.state.reference)} == {"bfloat16"}
    found = losses(whole.spec.run_dir)
    assert found[max(found)] < found[1]
    crashed(tmp_path / "again", monkeypatch, 2, *given)
    tiny.same_state(finished(tmp_path / "again", *given), whole)


def test_a_backend_without_memory_on_the_host_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HOST", "some_other_kind")
    with pytest.raises(ConfigError, match=r"reference_memory.*no memory of the kind.*device"):
        tiny.continual(tmp_path, HOST)


@pytest.mark.slow
def test_four_devices_hold_and_train_the_same(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    program = Path(__file__).with_name("memory_program.py")
    done = subprocess.run(
        [sys.executable, program, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("the same"), done.stderr[-2000:] + done.stdout[-1000:]
