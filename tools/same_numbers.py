"""Show that a refactor changed no number: the same runs by two checkouts, compared to the last bit.

python tools/same_numbers.py BEFORE [AFTER] [--devices 1 4] [--arms full lora] [--out DIR]

BEFORE and AFTER are checkouts (`git worktree add ../before COMMIT`); AFTER is this one unless named. Each arm has five
stages with fades, exact KL with a budget, replay, packed and padded rows. Compared are the records of every step
(losses, learning rates, rows), the score matrix and every array of the final checkpoint. A run that BEFORE leaves
half finished is then resumed by AFTER and must come to the same end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve().parents[1]
STEP_TOKENS = 16 * 64
NOT_NUMBERS = ("seconds", "memory", "time", "timestamp", "cores")  # of a record: they differ from run to run


def stage(name: str, style: str, steps: int, **more: Any) -> dict[str, Any]:
    """One stage of the curriculum."""
    return {"name": name, "tokens": steps * STEP_TOKENS, "data": [{"name": name, "style": style}], **more}


ANCHORED = {"beta": 0.5, "update_reference": True, "overlap": 0.4}
BASE: dict[str, Any] = {
    "job": "continual/train/abcd_kl",
    "stages": [
        stage("pydocs", "PMD", 12),
        stage("pycode", "PMD", 10, **ANCHORED),
        stage("arithmetic", "PACKED", 10, **ANCHORED, optimizer="reset"),
        stage("lists", "PADDED", 10, beta=0.2, overlap=0.3, lr=0.5),
        stage("pydocs", "PMD", 8),
    ],
    "training": {"batch_size": 16, "validation_steps": 16, "replay": {"rate": 0.2}, "per_device_batch_size": 2},
    "optimization": {"lr": 0.003, "kl": {"estimator": "forward", "target": 0.05}},
    "architecture": {"preset": "tiny", "n_layers": 2, "n_embd": 64, "n_head": 4, "block_size": 64},
    "eval": {"evaluations": ["arithmetic", "lists"], "limit": 16},
    "logging": {"report_interval": 1, "validation_interval": 10, "checkpoint_interval": 10},
}
ARMS: dict[str, dict[str, Any]] = {
    "full": {},
    "old": {"optimization": {"kl": {"estimator": "reverse", "on": "old"}}, "training": {"ema": 0.9}},
    "lora": {"optimization": {"lora": {"rank": 4}, "freeze": []}},
    "plain": {"optimization": {"kl": {"estimator": "l2_reference", "target": None}}},
}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Nested options with others in their place."""
    inner = {key: merged(base[key], value) for key, value in more.items() if isinstance(base.get(key), dict)}
    return {**base, **more, **inner}


def environment(tree: Path, cache: Path, devices: int) -> dict[str, str]:
    """The environment of a run by a checkout."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "HOLDFAST_CACHE": str(cache),
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
    }


def start(tree: Path, config: Path, out: Path, devices: int, cache: Path) -> subprocess.Popen[bytes]:
    """A run of a configuration by a checkout."""
    command = [sys.executable, "-m", "holdfast", "run", str(config), "--out", str(out), "--name", "run"]
    if devices > 1:
        command += ["topology.fsdp=2"]
    env = environment(tree, cache, devices)
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=out.parent)


def finish(tree: Path, config: Path, out: Path, devices: int, cache: Path) -> Path:
    """Run to the end; returns the run's folder."""
    process = start(tree, config, out, devices, cache)
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{tree}: the run ended with {process.returncode}\n{errors.decode()[-3000:]}")
    return out / "general" / "default" / "run"


def leave_half(tree: Path, config: Path, out: Path, devices: int, cache: Path, step: int) -> None:
    """Start a run and kill it after a step."""
    process = start(tree, config, out, devices, cache)
    metrics = out / "general" / "default" / "run" / "metrics.jsonl"
    while process.poll() is None and f'"step": {step},' not in (metrics.read_text() if metrics.exists() else ""):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The numbers of every record."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield {key: value for key, value in json.loads(line).items() if key not in NOT_NUMBERS}


def arrays(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint."""
    import jax
    import orbax.checkpoint as ocp

    newest = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    reader = ocp.PyTreeCheckpointer()
    place = (run / "checkpoints" / str(newest) / "state").absolute()
    shapes = reader.metadata(place).item_metadata.tree
    tree = reader.restore(place, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes))
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two runs; keys that one of them lacks are named, numbers compared exactly."""
    found = []
    one, two = list(records(first)), list(records(second))
    if [(r["kind"], r["step"]) for r in one] != [(r["kind"], r["step"]) for r in two]:
        found.append("other records")
    for a, b in zip(one, two, strict=False):
        found += [f"{a['kind']} {a['step']}: {key}: {a[key]} / {b[key]}" for key in {*a} & {*b} if a[key] != b[key]]
    results = [json.loads((run / "results.json").read_text()) for run in (first, second)]
    found += [f"results.json: {key}" for key in ("matrix", "metrics") if results[0][key] != results[1][key]]
    before, after = arrays(first), arrays(second)
    found += [f"array {name}: in one of them alone" for name in {*before} ^ {*after}]
    found += [f"array {name}" for name in {*before} & {*after} if before[name].tobytes() != after[name].tobytes()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=HERE)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, default=None, help="where the runs go and finished ones are taken from")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp())).absolute()
    before, after = arguments.before.absolute(), arguments.after.absolute()
    different = 0
    for arm in arguments.arms:
        for devices in arguments.devices:
            place = out / f"{arm}-{devices}"
            place.mkdir(parents=True, exist_ok=True)
            config = place / "config.yaml"
            config.write_text(yaml.safe_dump(merged(BASE, ARMS[arm])))
            cache = out / "cache"
            old = finish(before, config, place / "before", devices, cache)
            new = finish(after, config, place / "after", devices, cache)
            leave_half(before, config, place / "half", devices, cache, step=27)
            resumed = finish(after, config, place / "half", devices, cache)
            for name, run in (("the same run", new), ("resumed from half of it", resumed)):
                found = differences(old, run)
                different += len(found)
                verdict = "bit-identical" if not found else f"{len(found)} differences"
                print(f"{arm}, {devices} device{'s' * (devices > 1)}, {name}: {verdict}", flush=True)
                for line in found[:10]:
                    print(f"    {line}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
