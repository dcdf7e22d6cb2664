"""The state of many runs at a glance, from the ends of their files."""

import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.execution.files import is_locked
from holdfast.tracking.jsonl import FILE_NAME

TAIL = 1 << 17
RECENT = 20  # train records that the speed is taken from
SKIPPED = {"checkpoints", "evaluations", "figures", "tokenizer", "tensorboard", "wandb", "__pycache__"}
DEEPEST = 8

# The C parser is some ten times faster, which a list of hundreds of runs needs.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Status:
    """What the board shows of a run."""

    path: str
    state: str
    step: int
    total_steps: int
    stage: str
    loss: float | None
    eta_seconds: float | None
    tokens_per_second: float | None
    evaluation: str
    updated: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def alive(run_dir: Path) -> bool:
    """Whether a process works on a run.

    The lock is tried only where its holder seems to live: trying it would refuse a run that starts at that moment.
    """
    try:
        holder = (run_dir / "lock").read_text()
    except OSError:
        return False
    found = re.fullmatch(r"pid (\d+) on (.*)", holder.strip())
    if found is None:
        return False
    if found[2] == os.uname().nodename and not _exists(int(found[1])):
        return False
    try:
        return is_locked(run_dir)
    except OSError:  # a folder that may only be read
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def find_run_dirs(root: Path) -> Iterator[Path]:
    """All runs below a folder; links are not followed, and nothing is looked for inside a run."""
    for folder, names, files in os.walk(root):
        path = Path(folder)
        if "config.yaml" in files and (FILE_NAME in files or "lock" in files):
            names.clear()
            yield path
            continue
        deep = len(path.relative_to(root).parts) >= DEEPEST
        names[:] = [] if deep else sorted(name for name in names if name not in SKIPPED and not name.startswith("."))


def statuses(root: Path) -> list[Status]:
    """The state of every run below a folder, by path."""
    return [status(path, str(path.relative_to(root)) or ".") for path in sorted(find_run_dirs(root))]


def status(run_dir: Path, name: str) -> Status:
    """The state of one run; what has not changed since it was last read is not read again."""
    metrics, config, results = run_dir / FILE_NAME, run_dir / "config.yaml", run_dir / "results.json"
    last = _last(str(metrics), *_stamp(metrics))
    total, stages = _plan(str(config), *_stamp(config))
    working = alive(run_dir)
    done = _finished(str(results), *_stamp(results)) or (last.final and not working)
    stage = stages[last.stage] if 0 <= last.stage < len(stages) else ""
    left = max(total - last.step, 0)
    return Status(
        path=name,
        state="finished" if done else "running" if working else "unfinished",
        step=last.step,
        total_steps=total,
        stage=stage or (str(last.stage) if last.stage >= 0 else ""),
        loss=last.loss,
        eta_seconds=left * last.seconds_per_step if last.seconds_per_step and not done else None,
        tokens_per_second=last.tokens_per_second,
        evaluation=last.evaluation,
        updated=metrics.stat().st_mtime if metrics.exists() else 0.0,
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@dataclass(frozen=True)
class _Last:
    step: int = 0
    stage: int = -1
    loss: float | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    evaluation: str = ""
    final: bool = False


@functools.lru_cache(maxsize=4096)
def _last(path: str, _changed: int, size: int) -> _Last:
    """The end of a metrics file, read backwards no further than a fixed length."""
    if not size:
        return _Last()
    with Path(path).open("rb") as file:
        file.seek(max(0, size - TAIL))
        data = file.read(TAIL)
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    records = list(_newest(lines if size <= TAIL else lines[1:]))
    train = [record for record in records if record.get("kind") == "train"][:RECENT]
    steps, tokens = (train[0][unit] - train[-1][unit] if train else 0 for unit in ("step", "tokens"))
    seconds = sum(sum((record.get("seconds") or {}).values()) for record in train[:-1])
    return _Last(
        step=max((record.get("step", 0) for record in records), default=0),
        stage=train[0].get("stage", -1) if train else -1,
        loss=train[0].get("loss") if train else None,
        seconds_per_step=seconds / steps if steps and seconds else None,
        tokens_per_second=tokens / seconds if seconds else None,
        evaluation=_told([record for record in records if record.get("kind") == "evaluation"]),
        final=any("final" in record.get("tags", ()) for record in records if record.get("kind") == "checkpoint"),
    )


def _newest(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Records from the newest back, until a speed and an evaluation are known."""
    wanted = {"train": RECENT, "evaluation": 1}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        yield record
        kind = record.get("kind")
        if kind in wanted:
            wanted[kind] -= 1
            if max(wanted.values()) <= 0:
                return


def _told(evaluations: list[dict[str, Any]]) -> str:
    """The newest evaluation in a line: the accuracy of each task, else its bits per byte or NLL."""
    if not evaluations:
        return ""
    parts = []
    for task, scores in (evaluations[0].get("scores") or {}).items():
        for measure, unit in (("accuracy", ""), ("bits_per_byte", " bpb"), ("nll", " nll")):
            if scores.get(measure) is not None:
                parts.append(f"{task} {scores[measure]:.3g}{unit}")
                break
    return ", ".join(parts)


@functools.lru_cache(maxsize=4096)
def _plan(path: str, _changed: int, size: int) -> tuple[int, tuple[str, ...]]:
    """Steps and stage names of a config, without checking it."""
    config = _quick_config(Path(path)) if size else {}
    training, architecture = config.get("training") or {}, config.get("architecture") or {}
    stages = config.get("stages") or []
    tokens = [stage.get("tokens", 0) for stage in stages] if stages else training.get("tokens", 0)
    tokens = tokens if isinstance(tokens, list) else [tokens]
    mixtures = training.get("dataset") or []
    names = [str(stage.get("name") or _first(stage.get("data"))) for stage in stages]
    if not names:
        names = [_first(mixture) if isinstance(mixture, list) else "" for mixture in mixtures]
    unit = (training.get("batch_size") or 0) * (architecture.get("block_size") or 0)
    try:
        return (sum(tokens) // unit if unit else 0), tuple(names)
    except TypeError:
        return 0, tuple(names)


def _quick_config(path: Path) -> dict[str, Any]:
    """A run's options; without the comments of our own files, which are half of the reading."""
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if not line.lstrip().startswith(b"# ")]
        tree = yaml.load(b"\n".join(lines), Loader=LOADER)
    except (OSError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _first(mixture: Any) -> str:
    return str(mixture[0].get("name", "")) if mixture and isinstance(mixture[0], dict) else ""


@functools.lru_cache(maxsize=4096)
def _finished(path: str, _changed: int, size: int) -> bool:
    """Whether results say that the run is over."""
    if not size:
        return False
    try:
        return b'"finished": true' in Path(path).read_bytes()
    except OSError:
        return False
