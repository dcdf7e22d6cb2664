"""`holdfast selftest` passes here, and does not where a kernel is broken on purpose."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from holdfast.analysis import selftest
from holdfast.analysis.chip_plan import chip_plan
from holdfast.cli.app import app
from holdfast.config import merge, read_yaml
from holdfast.execution.chips import CHIPS
from holdfast.models.attention import chunked_attention
from holdfast.models.kernels import KERNELS, Rules
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]


def scaled(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel that is a little wrong everywhere."""
    return chunked_attention(q, k, v, ids, rules=rules) * 1.001


def mixing(q: Any, k: Any, v: Any, _ids: Any, rules: Rules) -> jax.Array:
    """A kernel that takes packed examples for one text."""
    return chunked_attention(q, k, v, rules=rules)


def doubling(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel whose gradient is wrong for keys alone."""
    return chunked_attention(q, 2 * k - jax.lax.stop_gradient(k), v, ids, rules=rules)


def early(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel that sees the next token."""
    return chunked_attention(q, jnp.roll(k, -1, axis=1), jnp.roll(v, -1, axis=1), ids, rules=rules)


def crossed(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel that gives two query heads each other's keys."""
    order = jnp.asarray([0, 2, 1, 3])
    return chunked_attention(q[:, :, order], k, v, ids, rules=rules)[:, :, order]


def endless(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel whose values are right and whose gradient for values is no number."""
    return chunked_attention(q, k, v + jnp.sqrt(0 * v), ids, rules=rules)


def unbounded(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel that forgets the bound of scores."""
    return chunked_attention(q, k, v, ids, rules=rules._replace(softcap=None))


def wider(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel whose window is one token too wide."""
    window = None if rules.window is None else rules.window + 1
    return chunked_attention(q, k, v, ids, rules=rules._replace(window=window))


def unscaled(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel that knows no factor of scores but the usual one."""
    return chunked_attention(q, k, v, ids, rules=rules._replace(scale=None))


def seeping(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
    """A kernel whose gradient on values goes a little to everybody, less than rounding takes."""
    everybody = 1e-8 * v.sum()
    return chunked_attention(q, k, v, ids, rules=rules) + (everybody - jax.lax.stop_gradient(everybody))


def test_a_gradient_that_seeps_into_other_examples_is_found_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "splash", seeping)
    [check] = only("splash")
    assert check.passed is False
    assert check.found == "a gradient goes to the future or to another packed example"


def only(name: str) -> Iterator[selftest.Check]:
    """One kernel's check, as `checks` makes it."""
    yield selftest._checked(f"kernel {name}", lambda: selftest.kernel(name))


@pytest.mark.parametrize("broken", [scaled, mixing, doubling, early, crossed, endless, unbounded, wider, unscaled])
def test_a_kernel_that_is_broken_on_purpose_is_found(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "splash", broken)
    monkeypatch.setattr(selftest, "checks", lambda: only("splash"))
    done = CliRunner().invoke(app, ["selftest", "--json"])
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert not said["passed"]
    assert "off the plain formula" in said["checks"][0]["found"]


def test_a_kernel_that_is_right_passes_and_one_that_breaks_off_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(q: Any, k: Any, v: Any, ids: Any, rules: Rules) -> jax.Array:
        return chunked_attention(q, k, v, ids, rules=rules)

    monkeypatch.setitem(KERNELS, "splash", plain)
    monkeypatch.setattr(selftest, "checks", lambda: only("splash"))
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == 0, done.output
    assert "all is well" in done.output

    def refused(*_: Any) -> jax.Array:
        raise ValueError("no such unit\nmore about it")

    monkeypatch.setitem(KERNELS, "splash", refused)
    [check] = only("splash")
    assert (check.passed, check.found) == (False, "ValueError: no such unit")


ON_THE_FIRST_ALONE = """
import jax
from holdfast.analysis import selftest
from holdfast.models.attention import chunked_attention
from holdfast.models.kernels import KERNELS
KERNELS["splash"] = lambda q, k, v, ids, rules: chunked_attention(
    q * (1 + 0.1 * jax.lax.axis_index("AXIS")), k, v, ids, rules=rules)
print(selftest.kernel("splash"))
"""


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_kernel_is_checked_with_the_rows_and_heads_of_every_device(axis: str) -> None:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ON_THE_FIRST_ALONE.replace("AXIS", axis)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "WrongError" in done.stderr, done.stdout + done.stderr[-2000:]
    assert "off the plain formula" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_all_checks_pass_on_virtual_devices(devices: int, tmp_path: Path) -> None:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "holdfast", "selftest", "--json"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["machine"]["devices"] == devices
    among_several = None if devices == 1 else True  # one device has nothing to send, and nothing to be compared with
    assert {check["name"]: check["passed"] for check in said["checks"]} == {
        "kernel splash": True,
        "kernel triton": True,
        "collectives": among_several,
        "short run": True,
        "the same run again": True,
        "checkpoint and back": True,
        "mesh against one device": among_several,
        "throughput": True,
    }
    if devices > 1:
        assert f"step by step on {devices} devices" in said["checks"][0]["found"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(("where", "attention"), [("gpu", "Triton kernel with segments"), ("tpu", None)])
def test_the_examples_are_configs_that_fit_and_commands_that_exist(where: str, attention: str | None) -> None:
    folder = ROOT / "examples" / where
    values = read_yaml(folder / "first.yaml")
    job = str(values.pop("job"))
    run = resolve(job, merge(config_classes(job), values, ["training.per_device_batch_size=4"]))
    assert run.packed
    if attention is not None:
        planned = chip_plan(run, CHIPS["h100"], (8,))
        assert planned["attention"] == attention
        assert all(step["fits"] for step in planned["steps"])
    known = {str(command.name) for command in app.registered_commands} | {str(g.name) for g in app.registered_groups}
    for script in folder.glob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
        named = set(re.findall(r"^[^#\n]*\bholdfast ([a-z]+)", script.read_text(), re.MULTILINE))
        assert named and named <= known, script  # noqa: PT018
