"""Running `holdfast` in processes that are killed, for tests of exact resuming."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

COMMAND = [sys.executable, "-m", "holdfast"]


def environment(cache: Path, devices: int = 1) -> dict[str, str]:
    """The environment of a child: a cache of its own, and that many virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "HOLDFAST_CACHE": str(cache), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def start(config: Path, out: Path, env: dict[str, str], *extra: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    command = [*COMMAND, "run", str(config), "--out", str(out), "--name", "run", *extra]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(config: Path, out: Path, env: dict[str, str], *extra: str) -> Path:
    """Run to the end; returns the run's folder."""
    process = start(config, out, env, *extra)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    return out / "general" / "default" / "run"


def last_step(run_dir: Path) -> int:
    """The newest step in the records, 0 where there are none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def wait_for(process: subprocess.Popen[Any], run_dir: Path, step: int) -> None:
    """Wait until a run has recorded a step, or has ended; without taking a core from it."""
    while process.poll() is None and last_step(run_dir) < step:
        time.sleep(0.005)


def kill_at_random(config: Path, out: Path, env: dict[str, str], times: int, seed: int, total_steps: int) -> int:
    """Start a run and kill it, again and again, at random instants; returns how often it was killed."""
    chance = random.Random(seed)
    run_dir, killed = out / "general" / "default" / "run", 0
    for attempt in range(times):
        process = start(config, out, env)
        # Past the point where the one before was killed, so that the whole run is covered; then at any instant.
        goal = last_step(run_dir) + chance.randint(1, max(1, total_steps // times))
        while process.poll() is None and last_step(run_dir) < min(goal, total_steps - 1) and attempt:
            time.sleep(0.01)
        if attempt == 0:
            time.sleep(chance.uniform(0.5, 6.0))
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    return killed


def records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run, in order."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of all training steps, in order."""
    return [record for record in records(run_dir) if record["kind"] == "train"]


def losses(run_dir: Path) -> dict[int, float]:
    """Training loss of every recorded step, each once."""
    steps = train_records(run_dir)
    found = {record["step"]: record["loss"] for record in steps}
    assert len(found) == len(steps), "a step was recorded twice"
    return found


def final_arrays(run_dir: Path, *_: object) -> dict[str, "np.ndarray"]:
    """Every array of the newest checkpoint, read without the devices that wrote it."""
    newest = max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
    state = run_dir / "checkpoints" / str(newest) / "state"
    reader = ocp.PyTreeCheckpointer()
    shapes = reader.metadata(state.resolve()).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    flat, _ = jax.tree_util.tree_flatten_with_path(reader.restore(state.resolve(), restore_args=as_numpy))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def assert_identical(first: Path, second: Path, *_: object) -> None:
    """Losses, final parameters and scores of two runs are equal to the last bit."""
    assert losses(first) == losses(second)
    one, two = final_arrays(first), final_arrays(second)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    if (first / "results.json").exists():
        results = [json.loads((path / "results.json").read_text()) for path in (first, second)]
        assert results[0]["matrix"] == results[1]["matrix"]
    assert kept_sums(first) == kept_sums(second)


def kept_sums(run_dir: Path) -> dict[str, bytes]:
    """The sums of every evaluation, by step."""
    return {path.parent.name: path.read_bytes() for path in (run_dir / "evaluations").glob("*/sums.json")}
