"""Parameters are made on the devices that hold them, with the same values on every mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, devices: int) -> "subprocess.CompletedProcess[str]":
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, Path(__file__).with_name(program)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_mesh_has_the_same_initial_values_and_no_device_holds_them_all() -> None:
    done = run("init_program.py", 8)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.slow
def test_parameters_optimizer_state_and_reference_shrink_by_the_sizes_of_their_axes() -> None:
    done = run("shards_program.py", 4)
    assert done.stdout.strip() == "shrinks", done.stderr[-2000:]
