"""Checkpoints of a run: Orbax folders named by step, each with a manifest that says what it is.

A checkpoint is written asynchronously under a temporary name and renamed when it is complete. Its names
(`boundary_1`, `best_0`, `final`) are tags in its manifest, so there is no pointer that could be ahead of the data.
What only lists or names checkpoints needs no JAX.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast.execution import processes
from holdfast.execution.files import write_atomically

STATE, MANIFEST = "state", "manifest"
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's name for what is not complete; left over, it is removed
_KEPT = re.compile(r"boundary_\d+|final")


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint."""

    step: int
    path: Path
    manifest: dict[str, Any]

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


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST / "metadata").read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def find_checkpoint(folder: Path, name: str) -> CheckpointInfo:
    """The checkpoint of a name: `latest`, a step, or a tag such as `boundary_1`, `best_0`, `final`.

    Several may carry the tag of a best one; the newest is the best.
    """
    infos = list_checkpoints(folder)
    if not infos:
        raise UserError(f"{folder}: there is no checkpoint; `holdfast run` makes them")
    wanted = [info for info in infos if name == str(info.step) or name in info.tags]
    if name == "latest":
        return infos[-1]
    if name == "best":
        wanted = [info for info in infos if any(tag.startswith("best_") for tag in info.tags)]
    if not wanted:
        names = sorted({tag for info in infos for tag in info.tags}) + [str(info.step) for info in infos]
        raise UserError(f"{folder.parent}: no checkpoint {name!r}; there are latest, {', '.join(names)}")
    return wanted[-1]


def split_name(text: str) -> tuple[Path, str]:
    """`RUN[@CHECKPOINT]` as a folder and a checkpoint's name.

    >>> split_name("runs/a@boundary_1")
    (PosixPath('runs/a'), 'boundary_1')
    """
    folder, _, name = text.partition("@")
    return Path(folder), name or "latest"


def named_checkpoint(text: str) -> CheckpointInfo:
    """The checkpoint that `RUN[@NAME]` names, the newest unless named."""
    run_dir, name = split_name(text)
    if not run_dir.is_dir():
        raise UserError(f"{text}: there is no run folder {run_dir}; expected RUN or RUN@CHECKPOINT")
    return find_checkpoint(run_dir / "checkpoints", name)


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


def set_aside(info: CheckpointInfo) -> None:
    """Put a checkpoint that cannot be read out of the way, so that its step can be saved again."""
    aside = info.path.parent / f"unreadable-{info.step}"
    shutil.rmtree(aside, ignore_errors=True)
    info.path.rename(aside)


def rename(infos: Iterable[CheckpointInfo], names_of: Callable[[int], Iterable[str]]) -> None:
    """Give checkpoints the lasting names that an edited curriculum has for their steps.

    When a stage was appended, the former end is a boundary and no longer `final`. A manifest is replaced as a whole.

    Args:
        names_of: the lasting names of a step.
    """
    for info in infos:
        tags = [*names_of(info.step), *(tag for tag in info.tags if not _KEPT.fullmatch(tag))]
        if set(tags) != set(info.tags):
            write_atomically(info.path / MANIFEST / "metadata", json.dumps({**info.manifest, "tags": tags}))


class CheckpointStore:
    """Writes and reads the checkpoints of one run; open it in `run()` and close it in a `finally`.

    All processes of a run save together, and a checkpoint counts when every one of them has written its part. Each
    reads by itself, so that one that cannot read says so instead of leaving the others waiting.

    Args:
        folder: the run's `checkpoints` folder.
        rolling: how many of the newest to keep besides the tagged ones.
    """

    def __init__(self, folder: Path, *, rolling: int = 2, read_only: bool = False) -> None:
        import orbax.checkpoint as ocp
        from absl import logging

        logging.set_verbosity(logging.ERROR)  # Orbax warns of what we ask it for
        self._ocp = ocp
        self.folder = folder.absolute()
        self.rolling = rolling
        self.read_only = read_only
        if not read_only and processes.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        together = ocp.options.MultiprocessingOptions()
        me = processes.index()
        by_itself = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        if not read_only:
            processes.barrier("checkpoints")
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(STATE, MANIFEST),
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                max_to_keep=None,
                multiprocessing_options=by_itself if read_only else together,
            ),
        )

    def save(self, step: int, state: Any, manifest: dict[str, Any]) -> None:
        """Start writing a checkpoint; it counts only when it is complete.

        Orbax finishes the one before first, so what is pruned here is older than a durable one.
        """
        args = self._ocp.args
        self._manager.wait_until_finished()
        self._prune()
        saved = self._manager.save(
            step, args=args.Composite(**{STATE: args.StandardSave(state), MANIFEST: args.JsonSave(manifest)})
        )
        assert saved, f"a checkpoint of step {step} is there already"

    def _prune(self) -> None:
        """Remove what need not be kept; one process decides and does it, under a name that counts for nothing."""
        if self.read_only or not processes.is_first():
            return
        infos = list_checkpoints(self.folder)
        kept = kept_steps(infos, self.rolling)
        for info in infos:
            if info.step not in kept:
                shutil.rmtree(info.path.rename(self.folder / f"{info.step}{TEMPORARY}-removed"))

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
        """Wait until what was saved is durable."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being written."""
        self._manager.wait_until_finished()
        self._prune()
        self._manager.close()
