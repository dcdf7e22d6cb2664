"""Rows spread over a mesh, parameters sharded: the same numbers as on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_device() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(TESTS),
    }
    program = TESTS / "evaluation" / "mesh_program.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    one, mesh = json.loads(done.stdout.splitlines()[-1])
    for first, second in zip(one["scores"], mesh["scores"], strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)
    assert one["said"] == mesh["said"]
    assert one["packed"]["accuracy"] is None
    for name in ("nll", "bits_per_byte", "kl_forward", "kl_reverse"):
        np.testing.assert_allclose(one["packed"][name], mesh["packed"][name], rtol=1e-5)
