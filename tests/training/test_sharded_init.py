"""Parameters are made on the devices that hold them, with the same values on every mesh."""

import os
import subprocess
import sys
from pathlib import Path


def test_every_mesh_has_the_same_initial_values_and_no_device_holds_them_all() -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("init_program.py")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
