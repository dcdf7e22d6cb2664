"""Checkpoints of a run: Orbax folders named by step, each with a manifest that says what it is.

A checkpoint is written asynchronously under a temporary name and renamed when it is complete. Its names
(`boundary_1`, `best_0`, `final`) are tags in its manifest, so there is no pointer that could be ahead of the data.
The manifest holds a checksum of every array and one of itself, so that what was damaged on the disk is not trained on.
What only lists or names checkpoints needs no JAX.
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import RunError, UserError
from holdfast.execution import processes
from holdfast.execution.faults import fault_point
from holdfast.execution.files import write_atomically
from holdfast.execution.storage import Patience, disk_reason, gave_up, unreachable
from holdfast.types import Json, JsonView

T = TypeVar("T")

STATE, MANIFEST = "state", "manifest"
LATEST = "latest"  # what the newest checkpoint is called
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's name for what is not complete; left over, it is removed
_KEPT = re.compile(r"boundary_\d+|final")
CHECKSUMS, SEAL = "checksums", "seal"  # of the arrays, and of the manifest itself; earlier versions had neither
# What the parts of a manifest are; one with "format" is of a run and has all of the first group.
_RUN_PARTS: dict[str, type] = {
    "step": int, "tokens": int, "stage": int, "format": int, "metrics_length": int, "per_device_batch_size": int,
    "tags": list, "past": list, "points": list, "config": dict, "model": dict, "best": dict, "mesh": dict,
    "tokenizer": str, "plan": str,
}  # fmt: skip
_PARTS = {**_RUN_PARTS, "semantics": int, "cores": int, "processes": int, "row_order": int, "memory": list,
          "base": dict, "sampled": dict, "metrics_digest": str, "files": dict, CHECKSUMS: dict}  # fmt: skip


class DamagedCheckpointError(RunError):
    """A checkpoint whose arrays are not what was saved, or cannot be read."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint."""

    step: int
    path: Path
    manifest: Json

    @property
    def tags(self) -> list[str]:
        """Names of this checkpoint besides its step."""
        return list(self.manifest.get("tags", []))

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """All committed checkpoints whose manifest can be read, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdigit():
            manifest = _read_manifest(path)
            if manifest is not None:
                found.append(CheckpointInfo(int(path.name), path, manifest))
    return sorted(found, key=lambda info: info.step)


def _read_manifest(path: Path) -> Json | None:
    return _manifest_or_reason(path)[0]


def _manifest_or_reason(path: Path) -> tuple[Json | None, str]:
    """The manifest of a checkpoint; or None, and why it cannot be used."""
    file = path / MANIFEST / "metadata"
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        if unreachable(error) is not None:  # the checkpoint may be good
            raise
        return None, f"{file} is missing or damaged"
    if not isinstance(manifest, dict):
        return None, f"{file} is missing or damaged"
    problem = manifest_problem(manifest, int(path.name))
    return (manifest, "") if problem is None else (None, f"{file} is damaged: {problem}")


def manifest_problem(manifest: JsonView, step: int) -> str | None:
    """What is wrong with the manifest of a step, None if nothing is; what an earlier version did not write may lack.

    >>> manifest_problem({"step": 8, "tags": "final"}, 8)
    "'tags' is of type str, not list"
    """
    if (SEAL in manifest or CHECKSUMS in manifest) and manifest.get(SEAL) != seal_of(manifest):
        return "its content is not what was written"
    for name, kind in _PARTS.items():
        if name in manifest and type(manifest[name]) is not kind:
            return f"{name!r} is of type {type(manifest[name]).__name__}, not {kind.__name__}"
    missing = [name for name in _RUN_PARTS if name not in manifest]
    if "format" in manifest and missing:
        return f"it has no {missing[0]!r}"
    if manifest.get("step", step) != step:
        return f"it is of step {manifest['step']}"
    if not all(isinstance(tag, str) for tag in manifest.get("tags", ())):
        return "'tags' holds what is no name"
    return None


def seal_of(manifest: JsonView) -> str:
    """The digest of a manifest's content as JSON holds it, without its seal."""
    content = json.loads(json.dumps({name: value for name, value in manifest.items() if name != SEAL}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: JsonView) -> None:
    """Replace the manifest of a checkpoint as a whole, with a new seal."""
    write_atomically(path / MANIFEST / "metadata", json.dumps({**manifest, SEAL: seal_of(manifest)}))


def unusable_checkpoints(folder: Path) -> dict[str, str]:
    """Checkpoints that do not count, by their folder's name, each with why: not finished, or damaged."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        step, mark, rest = path.name.partition(TEMPORARY)
        if mark and step.isdigit() and "removed" not in rest:
            found[path.name] = "it was not finished"
        elif path.name.isdigit():
            manifest, reason = _manifest_or_reason(path)
            if manifest is None:
                found[path.name] = reason
    return found


def find_checkpoint(folder: Path, name: str) -> CheckpointInfo:
    """The checkpoint of a name: `latest`, a step, or a tag such as `boundary_1`, `best_0`, `final`.

    Several may carry the tag of a best one; the newest is the best.
    """
    infos = list_checkpoints(folder)
    if not infos:
        raise UserError(f"{folder}: there is no checkpoint; `holdfast run` makes them")
    if name == LATEST:
        _check_newest(folder, infos[-1].step)
    wanted = [info for info in infos if name == str(info.step) or name in info.tags]
    if name == LATEST:
        return infos[-1]
    if name == "best":
        wanted = [info for info in infos if any(tag.startswith("best_") for tag in info.tags)]
    if not wanted:
        names = sorted({tag for info in infos for tag in info.tags}) + [str(info.step) for info in infos]
        raise UserError(f"{folder.parent}: no checkpoint {name!r}; there are latest, {', '.join(names)}")
    return wanted[-1]


def _check_newest(folder: Path, newest: int) -> None:
    """Refuse to take an older checkpoint for the newest one because that is damaged."""
    for name, reason in unusable_checkpoints(folder).items():
        if name.isdigit() and int(name) > newest:
            raise UserError(
                f"{folder.parent}: its newest checkpoint, {name}, cannot be used: {reason}; the newest good one is "
                f"@{newest}; `holdfast run` goes on from that"
            )


def split_name(text: str) -> tuple[Path, str]:
    """`RUN[@CHECKPOINT]` as a folder and a checkpoint's name.

    >>> split_name("runs/a@boundary_1")
    (PosixPath('runs/a'), 'boundary_1')
    """
    folder, _, name = text.rpartition("@")
    if not folder or Path(text).is_dir():  # a folder's name may hold an @
        return Path(text), LATEST
    return Path(folder), name or LATEST


def named_checkpoint(text: str) -> CheckpointInfo:
    """The checkpoint that `RUN[@NAME]` names, the newest unless named."""
    run_dir, name = split_name(text)
    if not run_dir.is_dir():
        raise UserError(f"{text}: there is no run folder {run_dir}; expected RUN or RUN@CHECKPOINT")
    return find_checkpoint(run_dir / "checkpoints", name)


def current_names(infos: Iterable[CheckpointInfo]) -> dict[int, list[str]]:
    """The names of checkpoints by step; where several carry the tag of a best one, the newest has the name."""
    ordered = sorted(infos, key=lambda info: info.step)
    owner = {tag: info.step for info in ordered for tag in info.tags}
    return {info.step: [tag for tag in info.tags if owner[tag] == info.step] for info in ordered}


def kept_steps(infos: Iterable[CheckpointInfo], rolling: int) -> set[int]:
    """Steps that pruning must leave: boundaries, the final one, the best of each stage and the newest few."""
    ordered = sorted(infos, key=lambda info: info.step)
    kept = {info.step for info in ordered[len(ordered) - rolling :]}
    newest_best: dict[str, int] = {}
    for info in ordered:
        for tag in info.tags:
            if _KEPT.fullmatch(tag):
                kept.add(info.step)
            elif tag.startswith("best_"):
                newest_best[tag] = info.step
    return kept | set(newest_best.values())


def set_aside(path: Path) -> None:
    """Put a checkpoint that cannot be read out of the way, so that its step can be saved again."""
    aside = path.with_name(f"unreadable-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def rename(infos: Iterable[CheckpointInfo], names_of: Callable[[int], Iterable[str]]) -> None:
    """Give checkpoints the lasting names that an edited curriculum has for their steps.

    When a stage was appended, the former end is a boundary and no longer `final`. A manifest is replaced as a whole.

    Args:
        names_of: the lasting names of a step.
    """
    for info in infos:
        tags = [*names_of(info.step), *(tag for tag in info.tags if not _KEPT.fullmatch(tag))]
        if set(tags) != set(info.tags):
            write_manifest(info.path, {**info.manifest, "tags": tags})


@functools.cache
def _quiet_orbax() -> None:
    """Keep Orbax from printing what it raises anyway.

    It warns of what we ask it for, logs every error, and after one TensorStore still answers to an event loop that
    Orbax has closed. What else it was reading then fails where nobody waits for it, and what it was about to write is
    left as coroutines that were never begun.
    """
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    shown = sys.unraisablehook

    def hook(trouble: "sys.UnraisableHookArgs") -> None:
        code = getattr(trouble.object, "cr_code", None)  # of a coroutine
        left = code is not None and "orbax" in Path(code.co_filename).parts
        half_made = isinstance(trouble.exc_value, AttributeError) and "_ssock" in str(trouble.exc_value)
        if not left and not half_made and str(trouble.exc_value) != "Event loop is closed":
            shown(trouble)

    sys.unraisablehook = hook


def _by_daemon(action: Callable[[], T]) -> T:
    """Do something in a thread whose own threads end with the process.

    After a failure Orbax leaves threads that wait minutes for each other; Python would not end before them.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome.result()


class CheckpointStore:
    """Writes and reads the checkpoints of one run; open it in `run()` and close it in a `finally`.

    All processes of a run save together, and a checkpoint counts when every one of them has written its part. Each
    reads by itself, so that one that cannot read says so instead of leaving the others waiting.

    Args:
        folder: the run's `checkpoints` folder.
        rolling: how many of the newest to keep besides the tagged ones.
        patience: how long to wait for a disk that refuses.
    """

    def __init__(
        self, folder: Path, *, rolling: int = 2, read_only: bool = False, patience: Patience | None = None
    ) -> None:
        import orbax.checkpoint as ocp

        _quiet_orbax()
        self._ocp = ocp
        self.folder = folder.absolute()
        self.rolling = rolling
        self.read_only = read_only
        self._patience = patience or Patience(0)
        self._writing = -1  # the step whose checkpoint is being written, or none
        self._manager = self._open()

    def _open(self) -> Any:
        ocp, read_only = self._ocp, self.read_only
        if not read_only and processes.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            self._forget_paths()
        together = ocp.options.MultiprocessingOptions()
        me = processes.index()
        by_itself = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        if not read_only:
            processes.barrier("checkpoints")
        return ocp.CheckpointManager(
            self.folder,
            item_names=(STATE, MANIFEST),
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                max_to_keep=None,
                multiprocessing_options=by_itself if read_only else together,
            ),
        )

    def save(self, step: int, state: Any, manifest: Json, *, durable: bool = False) -> None:
        """Start writing a checkpoint; it counts only when it is complete.

        Orbax finishes the one before first, so what is pruned here is older than a durable one. If that one could not
        be finished, this one takes its place. While the disk refuses, it is tried again.

        Args:
            durable: return when it is complete; it is tried again until then. So is one that is kept for good.
        """
        from holdfast.execution.checksums import checksums

        args = self._ocp.args
        manifest = {**manifest, CHECKSUMS: checksums(state)}
        sealed = {**manifest, SEAL: seal_of(manifest)}
        items = args.Composite(**{STATE: args.StandardSave(state), MANIFEST: args.JsonSave(sealed)})
        durable = durable or any(_KEPT.fullmatch(tag) for tag in manifest["tags"])
        self._settle()

        def attempt() -> None:
            if self._manager is None:
                self._manager = self._open()
            if self._writing == step and step in {info.step for info in list_checkpoints(self.folder)}:
                return  # the try before this one was complete, and failed after that
            self._writing = step
            fault_point("checkpoint")
            try:
                self._prune()
                fault_point("checkpoint pruned")
                saved = _by_daemon(lambda: self._manager.save(step, args=items))
                assert saved, f"a checkpoint of step {step} is there already"
                fault_point("checkpoint begun")
                if durable:
                    self._manager.wait_until_finished()
                    self._confirm(step)
                    fault_point("checkpoint written")
            except Exception:
                self._give_up_manager()
                raise

        # Several processes write together: one that tried again by itself would find nobody.
        patience = self._patience if processes.count() == 1 else Patience(0)
        patience.on(f"checkpoint {step}", attempt)

    def _settle(self) -> None:
        """Finish the checkpoint that is being written; one that the disk refused is named and left out."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            if self._writing >= 0:
                self._confirm(self._writing)
            self._forget_paths()
        except Exception as error:
            reason = disk_reason(error)
            if reason is None:
                raise
            self._give_up_manager()
            if processes.count() > 1:
                raise RunError(gave_up(f"checkpoint {self._writing}", reason, 0)) from error
            self._patience.say(f"checkpoint {self._writing} could not be written and is left out: {reason}")

    def _confirm(self, step: int) -> None:
        """Raise an OSError if a checkpoint that was written is not there.

        Where a disk vanishes, its mount point is left: whoever makes folders as needed writes into that one instead,
        and meets no error.
        """
        self._patience.check()
        if processes.is_first() and not (self.folder / str(step)).is_dir():
            raise FileNotFoundError(errno.ENOENT, "what was written is not there", str(self.folder / str(step)))
        self._writing = -1

    def _forget_paths(self) -> None:
        """Take the paths of this machine out of the files by which Orbax marks what is complete: they may be shared."""
        if self.read_only or not processes.is_first():
            return
        with contextlib.suppress(OSError):  # pruned meanwhile, or a disk that refuses: the next time
            for mark in self.folder.glob("[0-9]*/**/commit_success.txt"):
                if os.fsencode(self.folder) in mark.read_bytes():  # that it is there counts, not what it says
                    mark.write_text(f"Checkpoint commit was successful to {mark.parent.name}")

    def _give_up_manager(self) -> None:
        """Let go of a manager that failed: it remembers a step that is not there."""
        manager, self._manager = self._manager, None
        with contextlib.suppress(Exception):  # it raises once more what it has raised already
            manager.close()

    def _prune(self) -> None:
        """Remove what need not be kept; one process decides and does it, under a name that counts for nothing."""
        if self.read_only or not processes.is_first():
            return
        infos = list_checkpoints(self.folder)
        kept = kept_steps(infos, self.rolling)
        for info in infos:
            if info.step not in kept:
                grave = self.folder / f"{info.step}{TEMPORARY}-removed"
                shutil.rmtree(grave, ignore_errors=True)
                shutil.rmtree(info.path.rename(grave))

    def names(self, step: int) -> set[str]:
        """The names of the arrays, or trees of arrays, that the state of a step holds."""
        return set(self._ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / STATE).tree)

    def restore(self, step: int, target: Any) -> Any:
        """The state of a step, placed as the target's shapes and shardings say."""
        args = self._ocp.args
        restored = self._manager.restore(step, args=args.Composite(**{STATE: args.StandardRestore(target)}))
        return restored[STATE]

    def restore_part(self, step: int, target: Any) -> Any:
        """Some of the arrays of a step; the others are not read."""
        args = self._ocp.args
        part = args.PyTreeRestore(
            target,
            restore_args=self._ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        return self._manager.restore(step, args=args.Composite(**{STATE: part}))[STATE]

    def wait(self) -> None:
        """Wait until what was saved is durable, or is known not to be."""
        self._settle()

    def close(self) -> None:
        """Finish what is being written."""
        self._settle()
        if self._manager is None:
            return
        try:
            self._prune()
        except OSError as error:  # what is kept too long goes the next time
            if disk_reason(error) is None:
                raise
        self._manager.close()
