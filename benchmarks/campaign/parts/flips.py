"""Flipped bits in every file of a checkpoint and of a run's folder.

In one process and mostly without training: a checkpoint is read as a resume reads it, records are compared as a resume
compares them. For the other files the command of the finished run is given again. A flip must be noticed, or what is
read must be what it was, to the last bit.
"""

import contextlib
import functools
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "one flipped bit in a file of a checkpoint or a run; noticed, or what is read is identical"
WHOLE = 12  # of so many flips one is of a file that only the whole command looks at
REWRITTEN = ("config.yaml", "results.json", "report.html")  # by every command, whatever they hold


def tries(seed: int) -> Iterator[Try]:
    """Flips, each of a file and a bit that its number chooses."""
    number = 0
    while True:
        chance = random.Random(f"{seed} {number}")
        act = flip_run if number % WHOLE == WHOLE - 1 else flip_records if number % WHOLE == 0 else flip_checkpoint
        yield Try(f"{act.__name__} {seed} {number}", functools.partial(act, chance))
        number += 1


@dataclass
class Finished:
    """A finished run, and what is read from it."""

    folder: Path
    trainer: Any
    info: Any
    target: Any
    arrays: list[bytes]


@functools.cache
def finished() -> Finished:
    """The run whose files are damaged, and what its newest checkpoint holds."""
    tiny.environment()
    out = scratch() / "flips"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = tiny.command("anchored", out)
    if code:
        raise RuntimeError(f"the run failed:\n{said.getvalue()[-2000:]}")
    from holdfast.cli.configs import read_config
    from holdfast.execution import ExecutionSpec
    from holdfast.execution.checkpoints import list_checkpoints
    from holdfast.training.initial import restore_target
    from holdfast.training.run import make_trainer

    trainer = make_trainer(read_config(tiny.config_file("anchored"), []).resolved(), ExecutionSpec("run", root=out))
    folder = tiny.run_dir(out)
    info = list_checkpoints(folder / "checkpoints")[-1]
    target = restore_target(trainer.state, "all")
    return Finished(folder, trainer, info, target, _read(info, target))


def _read(info: Any, target: Any) -> list[bytes]:
    import jax
    import numpy as np

    from holdfast.training.weights import read_arrays

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(read_arrays(info, target, whole=True))]


@contextlib.contextmanager
def flipped(path: Path, chance: random.Random) -> Iterator[int]:
    """A file with one bit flipped, as it was afterwards; yields which bit."""
    good = path.read_bytes()
    bit = chance.randrange(len(good) * 8)
    data = bytearray(good)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))
    try:
        yield bit
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(good)


def _kind(path: Path, folder: Path) -> str:
    """A file's name without what differs between runs."""
    parts = [part if len(part) < 32 else "DATA" for part in path.relative_to(folder).parts]
    return "/".join("N" if part.isdigit() else part for part in parts)


def flip_checkpoint(chance: random.Random) -> Outcome:
    """A bit of one of the newest checkpoint's files."""
    from holdfast.execution.checkpoints import list_checkpoints, unusable_checkpoints

    run = finished()
    files = sorted(path for path in run.info.path.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = [path.stat().st_size for path in files]
    # Half of the flips anywhere in the bytes, half in any file, however small it is.
    path = chance.choices(files, sizes)[0] if chance.random() < 0.5 else chance.choice(files)
    what = _kind(path, run.info.path)
    with flipped(path, chance) as bit:
        if run.info.path.name in unusable_checkpoints(run.info.path.parent):
            return Outcome(what, "noticed")
        info = list_checkpoints(run.info.path.parent)[-1]
        try:
            arrays = _read(info, run.target)
        except Exception:  # a resume sets it aside, whatever is raised
            return Outcome(what, "noticed")
    if info.manifest == run.info.manifest and arrays == run.arrays:
        return Outcome(what, "identical")
    return Outcome(what, f"bit {bit} was read as if it were good", held=False)


def flip_records(chance: random.Random) -> Outcome:
    """A bit of the records."""
    from holdfast.tracking.jsonl import digests
    from holdfast.training.restore import records_troubles

    run = finished()
    path, length = run.folder / "metrics.jsonl", run.info.manifest["metrics_length"]
    with flipped(path, chance) as bit:
        if records_troubles(run.folder, [run.info]) != [None]:
            return Outcome(path.name, "noticed")
        same = digests(path, [length])[length] == run.info.manifest["metrics_digest"]
    return Outcome(path.name, "identical") if same else Outcome(path.name, f"bit {bit} was not noticed", held=False)


def flip_run(chance: random.Random) -> Outcome:
    """A bit of another file of the run; then the same command again."""
    run = finished()
    files = sorted(path for path in run.folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if "checkpoints" not in path.parts and path.name not in ("metrics.jsonl", "lock")]
    path = chance.choice(files)
    what, good = _kind(path, run.folder), path.read_bytes()
    said = io.StringIO()
    with flipped(path, chance) as bit:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = tiny.command("anchored", run.folder.parents[2])
        now = path.read_bytes() if path.exists() else b""
    if code not in (0, 1, 2) or "Traceback" in said.getvalue():
        return Outcome(what, f"bit {bit}: exit code {code}: {' '.join(said.getvalue().split())[-100:]}", held=False)
    if path.name in said.getvalue():
        return Outcome(what, "noticed")
    if now == good or (path.name in REWRITTEN and _same_content(now, good, path.name)):
        return Outcome(what, "written again, identical")
    return Outcome(what, f"bit {bit} was not noticed", held=False)


def _same_content(now: bytes, good: bytes, name: str) -> bool:
    if name == "results.json":
        return bool(json.loads(now) == json.loads(good))
    return name == "report.html"  # it holds when it was made
