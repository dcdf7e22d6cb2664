"""Tiny runs for the campaign: every path of the program in a few seconds, and how two of them are compared."""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.campaign.framework import scratch

COMMON = """
training: {batch_size: 4, validation_steps: 4%s}
architecture: {block_size: 16, preset: tiny, n_layers: 1, n_embd: 8, n_head: 2}
optimization: {kl: {estimator: forward%s}, lr: 0.003}
data: {workers: %d, sources: {lists: %s, sums: %s}}
logging: {report_interval: 1, checkpoint_interval: 2, validation_interval: 3}
eval: {evaluations: [%s], limit: 4, batch_size: 4}
"""
# A small file is read in no time: what is tried is what a run does with its data.
SOURCE = "{path: FOLDER/%s.jsonl, prompt: '{question}', choices: ['{right}', '{wrong}'], validation_fraction: 0.25}"
# Two stages with a fade, an anchor, validation and evaluation; and three stages of which later ones replay the model.
CONFIGS = {
    "plain": """
job: gpt/train/pretrain
training: {batch_size: 4, validation_steps: 4, tokens: 320, dataset: [{name: lists, style: PACKED}]}
architecture: {block_size: 16, preset: tiny, n_layers: 1, n_embd: 8, n_head: 2}
data: {workers: 0, sources: {lists: %s}}
logging: {report_interval: 1, checkpoint_interval: 1, validation_interval: 2}
eval: {evaluations: []}
"""
    % (SOURCE % "lists"),
    "anchored": """
job: continual/train/abcd_kl
stages:
- {tokens: 192, data: [{name: lists, style: PADDED}]}
- {tokens: 192, data: [{name: sums, style: PADDED}], beta: 0.5, update_reference: true, overlap: 0.5}
"""
    + COMMON % ("", "", 0, SOURCE % "lists", SOURCE % "sums", "lists"),
    "self-replay": """
job: continual/train/abcd_kl
stages:
- {tokens: 128, data: [{name: lists, style: PACKED}]}
- {tokens: 192, data: [{name: sums, style: PADDED}], beta: 0.5, update_reference: true}
"""
    + COMMON
    % (
        ", evaluate: false, replay: {source: self, rate: 0.25, rows: 8}",
        ", on: old",
        1,
        SOURCE % "lists",
        SOURCE % "sums",
        "",
    ),
}


def environment() -> None:
    """What JAX and Holdfast read when they are imported; call it first."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HOLDFAST_CACHE"] = str(scratch() / "cache")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(scratch() / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"


def config_file(kind: str) -> Path:
    """The config of a kind of run."""
    path = scratch() / f"{kind}.yaml"
    if not path.exists():
        for name in ("lists", "sums"):
            rows = [
                {"question": f"{name} {n} ->", "right": f" {n * n}", "wrong": f" {n}", "label": 0} for n in range(90)
            ]
            (scratch() / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path.write_text(CONFIGS[kind].replace("FOLDER", str(scratch())))
    return path


def run_dir(out: Path) -> Path:
    """The folder of the run below an output folder."""
    return out / "general" / "default" / "run"


def arguments(kind: str, out: Path, *overrides: str) -> list[str]:
    """`holdfast run` of a kind of run, without the command itself."""
    return ["run", str(config_file(kind)), *overrides, "--out", str(out), "--name", "run", "--quiet"]


def command(kind: str, out: Path, *overrides: str) -> int:
    """`holdfast run` in this process; returns the exit code."""
    from holdfast.cli.app import main

    sys.argv = ["holdfast", *arguments(kind, out, *overrides)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def import_all() -> None:
    """Import what a run needs, without starting JAX: forked children begin after that."""
    import orbax.checkpoint
    import tensorstore

    import holdfast.cli.app
    import holdfast.report
    import holdfast.training
    import holdfast.training.loop
    import holdfast.training.run

    assert orbax.checkpoint
    assert tensorstore
    assert holdfast.training.loop


def import_what_a_run_imports(names: list[str]) -> None:
    """Import what a run was seen to import on its way, so that no child does it again."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def forked(act: Callable[[], int], log: Path) -> int:
    """Do something in a forked process; returns its exit code, below zero the signal that ended it."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = act()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def killed(code: int) -> bool:
    """Whether an exit code is that of a process that was killed."""
    return code == -signal.SIGKILL


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that two runs of the same options must have in common, to the last bit."""
    from holdfast.execution.checkpoints import list_checkpoints
    from holdfast.tracking.jsonl import read_lines

    records, bad = read_lines(folder / "metrics.jsonl")
    for record in records:
        for name in ("seconds", "memory"):
            record.pop(name, None)
    final = list_checkpoints(folder / "checkpoints")[-1]
    sums = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("evaluations/*/sums.json"))}
    results = folder / "results.json"
    return {
        "records": records,
        "bad lines": bad,
        "step": final.step,
        "arrays": final.manifest["checksums"],
        "points": final.manifest["points"],
        "sums": sums,
        "matrix": json.loads(results.read_text())["matrix"] if results.exists() else None,
        "replay": {path.parent.name: path.read_bytes() for path in folder.glob("replay/*/tokens.bin")},
    }


def difference(folder: Path, whole: dict[str, Any]) -> str | None:
    """What of a run is not as in an undisturbed one; None where everything is."""
    found = outcome(folder)
    for name, value in whole.items():
        if found[name] != value:
            return f"other {name}"
    left = [path for path in folder.rglob(".*") if path.is_file() or "partial" in path.name]
    left += [path for path in (folder / "checkpoints").iterdir() if "orbax-checkpoint-tmp" in path.name]
    return f"left behind: {left[0].name}" if left else None
