"""The state of many runs at a glance, from the ends of their files."""

import functools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.execution.files import is_locked, open_regular, read_regular
from holdfast.report.records import count, parse, parse_yaml, text
from holdfast.tracking.jsonl import FILE_NAME
from holdfast.types import Json

TAIL = 1 << 17
RECENT = 20  # train records that the speed is taken from
SKIPPED = {"checkpoints", "evaluations", "figures", "tokenizer", "tensorboard", "wandb", "__pycache__"}
DEEPEST = 8


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
    problem: str = ""

    def to_dict(self) -> Json:
        """As JSON holds it."""
        return asdict(self)


def alive(run_dir: Path) -> bool:
    """Whether a process works on a run.

    The lock is tried only where its holder seems to live: trying it would refuse a run that starts at that moment.
    """
    try:
        with open_regular(run_dir / "lock") as file:
            holder = file.read(1024).decode(errors="replace")
    except OSError:
        return False
    found = re.fullmatch(r"pid (\d{1,18}) on (.*)", holder.strip())
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
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def find_run_dirs(root: Path) -> Iterator[Path]:
    """All runs below a folder, in order; links are not followed, and nothing is looked for inside a run."""
    yield from _find(str(root), 0)


def _find(folder: str, depth: int) -> Iterator[Path]:
    """As above; scandir alone, since a board looks again every other second."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:  # gone, or not for this user
        return
    files = {name for name, is_dir in found if not is_dir}
    if "config.yaml" in files and (FILE_NAME in files or "lock" in files):
        yield Path(folder)
    elif depth < DEEPEST:
        for name, is_dir in found:
            if is_dir and name not in SKIPPED and not name.startswith("."):
                yield from _find(os.path.join(folder, name), depth + 1)  # noqa: PTH118 (a thousand times a second)


def statuses(root: Path) -> list[Status]:
    """The state of every run below a folder, by path; one that cannot be read says so and hides no other."""
    found = []
    for path in find_run_dirs(root):
        name = text(path.relative_to(root).as_posix())
        try:
            found.append(status(path, name))
        except Exception as error:
            problem = f"{type(error).__name__}: {text(error)[:200]}"
            found.append(Status(name, "unreadable", 0, 0, "", None, None, None, "", 0.0, problem))
    return found


def status(run_dir: Path, name: str) -> Status:
    """The state of one run; what has not changed since it was last read is not read again."""
    metrics, config, results = run_dir / FILE_NAME, run_dir / "config.yaml", run_dir / "results.json"
    stamp, working = _stamp(metrics), alive(run_dir)
    last = _last(str(metrics), *stamp, RECENT if working else 1)
    total, stages = _plan(str(config), *_stamp(config))
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
        updated=stamp[0] / 1e9,
        problem=last.problem,
    )


def _stamp(path: Path) -> tuple[int, int]:
    """When a file changed and its size; of what is no regular file nothing."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return 0, 0
    return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else (0, 0)


@dataclass(frozen=True)
class _Last:
    step: int = 0
    stage: int = -1
    loss: float | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    evaluation: str = ""
    final: bool = False
    problem: str = ""


@functools.lru_cache(maxsize=4096)
def _last(path: str, _changed: int, size: int, recent: int) -> _Last:
    """The end of a metrics file, read backwards no further than a fixed length.

    Args:
        recent: train records that a speed is taken from; one tells none.
    """
    if not size:
        return _Last()
    with open_regular(Path(path)) as file:
        file.seek(max(0, size - TAIL))
        data = file.read(TAIL)
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    records, bad = _newest(lines if size <= TAIL else lines[1:], recent)
    train = [record for record in records if record["kind"] == "train"][:recent]
    steps, tokens = (train[0][unit] - train[-1][unit] if train else 0 for unit in ("step", "tokens"))
    seconds = sum(spent or 0.0 for record in train[:-1] for spent in record.get("seconds", {}).values())
    newest = train[0] if train else {}
    return _Last(
        step=max((record["step"] for record in records), default=0),
        stage=-1 if newest.get("stage") is None else newest["stage"],
        loss=newest.get("loss"),
        seconds_per_step=seconds / steps if steps > 0 and seconds > 0 else None,
        tokens_per_second=tokens / seconds if tokens > 0 and seconds > 0 else None,
        evaluation=_told([record for record in records if record["kind"] == "evaluation"]),
        final=any("final" in record.get("tags", ()) for record in records if record["kind"] == "checkpoint"),
        problem=f"metrics.jsonl: {bad} of the last lines no record" if bad else "",
    )


def _newest(lines: list[bytes], recent: int) -> tuple[list[Json], int]:
    """Records from the newest back, until a speed and an evaluation are known; and how many lines were none."""
    wanted, found, bad = {"train": recent, "evaluation": 1}, [], 0
    for line in reversed(lines):
        record = parse(line) if line.strip() else None
        if record is None:
            bad += bool(line.strip())
            continue
        found.append(record)
        kind = record["kind"]
        if kind in wanted:
            wanted[kind] -= 1
            if max(wanted.values()) <= 0:
                break
    return found, bad


def _told(evaluations: list[Json]) -> str:
    """The newest evaluation in a line: the accuracy of each task, else its bits per byte or NLL."""
    if not evaluations:
        return ""
    parts = []
    for task, scores in evaluations[0].get("scores", {}).items():
        for measure, unit in (("accuracy", ""), ("bits_per_byte", " bpb"), ("nll", " nll")):
            if scores.get(measure) is not None:
                parts.append(f"{task} {scores[measure]:.3g}{unit}")
                break
    return ", ".join(parts)


@functools.lru_cache(maxsize=4096)
def _plan(path: str, _changed: int, size: int) -> tuple[int, tuple[str, ...]]:
    """Steps and stage names of a config, without checking it."""
    try:
        return _planned(_plan_lines(read_regular(Path(path)))) if size else (0, ())
    except OSError:
        return 0, ()


# What a plan needs of a config: reading all of it would take five times as long, and a list of a thousand runs that.
_SECTIONS = re.compile(rb"^(?:training|architecture|stages):.*(?:\n(?:[ #-].*|$))*", re.MULTILINE)
_NEEDED: dict[bytes, tuple[bytes, ...]] = {
    b"training:": (b"batch_size:", b"tokens:", b"dataset:"),
    b"architecture:": (b"block_size:",),
}


def _plan_lines(data: bytes) -> bytes:
    """The lines of a YAML config that hold stages, tokens and batch sizes.

    >>> _plan_lines(b"job: a\\ntraining:\\n  seed: 1\\n  tokens:\\n  - 8\\ndata: {}\\n")
    b'training:\\n  tokens:\\n  - 8'
    """
    kept: list[bytes] = []
    for found in _SECTIONS.finditer(data):
        head, *lines = (line for line in found[0].split(b"\n") if line and not line.lstrip().startswith(b"#"))
        wanted = _NEEDED.get(head.rstrip())
        kept.append(head)
        if wanted is None:
            kept += lines
            continue
        inside, option = None, False
        for line in lines:
            indent = len(line) - len(line.lstrip())
            inside = indent if inside is None else inside
            if indent == inside and not line.startswith(b"- ", indent):
                option = line.startswith(wanted, indent)
            if option:
                kept.append(line)
    return b"\n".join(kept)


@functools.lru_cache(maxsize=4096)
def _planned(lines: bytes) -> tuple[int, tuple[str, ...]]:
    """Steps and stage names; runs of one curriculum are read once."""
    config = parse_yaml(lines)
    if not isinstance(config, dict):
        return 0, ()
    training, architecture = (_section(config.get(name)) for name in ("training", "architecture"))
    stages = [_section(stage) for stage in config["stages"]] if isinstance(config.get("stages"), list) else []
    tokens = [stage.get("tokens", 0) for stage in stages] if stages else training.get("tokens", 0)
    mixtures = training.get("dataset")
    names = [text(stage.get("name") or _first(stage.get("data"))) for stage in stages]
    if not names:
        names = [_first(mixture) for mixture in mixtures] if isinstance(mixtures, list) else []
    sizes = [count(training.get("batch_size")), count(architecture.get("block_size"))]
    unit = (sizes[0] or 0) * (sizes[1] or 0)
    seen = sum(count(number) or 0 for number in (tokens if isinstance(tokens, list) else [tokens]))
    return (seen // unit if unit else 0), tuple(names)


def _section(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _first(mixture: Any) -> str:
    first = mixture[0] if isinstance(mixture, list) and mixture else None
    return text(first.get("name", "")) if isinstance(first, dict) else ""


@functools.lru_cache(maxsize=4096)
def _finished(path: str, _changed: int, size: int) -> bool:
    """Whether results say that the run is over; they say so at their end, where nothing else is large."""
    try:
        with open_regular(Path(path)) as file:
            file.seek(max(0, size - TAIL))
            data = file.read(TAIL)
        yes, no = (data.rfind(b'"finished": ' + word) for word in (b"true", b"false"))
        return yes > no if max(yes, no) >= 0 or size <= TAIL else b'"finished": true' in read_regular(Path(path))
    except OSError:
        return False
