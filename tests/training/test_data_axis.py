"""The axis `data` of the mesh: gradients of each shard are summed by themselves and meet once a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


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


@pytest.mark.slow
def test_a_run_with_kernels_inside_goes_on_to_the_same_bits() -> None:
    assert said("resumed").count("resumed") == 2
