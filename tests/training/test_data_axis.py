"""The axis `data` of the mesh: gradients of each shard are summed by themselves and meet once a step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training import killing


def said(*parts: str) -> str:
    """What the program prints for some of its parts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("data_program.py")), *parts],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_gradients_are_summed_over_data_once_a_step_in_their_shards() -> None:
    assert "once a step" in said("exchanged")


@pytest.mark.slow
def test_every_mesh_gives_the_gradients_of_one_device_with_penalties_on_tokens_and_on_parameters() -> None:
    assert said("equal").count("equal") == 4


def run_with_kernels(folder: Path, devices: int, *until: str) -> subprocess.CompletedProcess[str]:
    """A run whose attention is the TPU's kernel, step by step; its last line is its folder."""
    env = killing.environment(folder.parent / "cache", 8)
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    program = Path(__file__).with_name("kernel_run.py")
    return subprocess.run(
        [sys.executable, str(program), str(folder), str(devices), *until],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_with_kernels_inside_that_is_killed_goes_on_to_the_same_bits(devices: int, tmp_path: Path) -> None:
    whole = run_with_kernels(tmp_path / "whole", devices)
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = run_with_kernels(tmp_path / "killed", devices, "3")  # in the middle of the anchored stage
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = run_with_kernels(tmp_path / "killed", devices)
    assert again.returncode == 0, again.stderr[-3000:]
    first, second = (Path(done.stdout.split()[-1]) for done in (whole, again))
    assert len(killing.losses(first)) == 4
    killing.assert_identical(first, second)
