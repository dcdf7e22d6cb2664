"""Disks that refuse: what is wrong is understood, waited for and said; what was there stays."""

import errno
import os
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import RunError
from holdfast.execution import checkpoints
from holdfast.execution.checkpoints import CheckpointStore, list_checkpoints, unusable_checkpoints
from holdfast.execution.storage import Patience, disk_reason, failed_line, gave_up, unreachable


def failing(times: int, number: int = errno.ENOSPC) -> Any:
    """An action that the disk refuses so many times."""
    left = [times]

    def action() -> str:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return "done"

    return action


def wrapped(number: int) -> Exception:
    """An error as a library raises it that hides the system's."""
    try:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise ValueError("could not save") from error
    except ValueError as error:
        return error


def test_a_refusal_is_found_behind_other_errors() -> None:
    assert disk_reason(wrapped(errno.EROFS)) == "the disk is read-only"
    for text in ("x [OS error 28: ENOSPC No space left on device]", "x: No space left on device [os_error_code='28']"):
        assert disk_reason(RuntimeError(text)) == "the disk is full"
    assert disk_reason(ValueError("a shape that does not fit")) is None
    assert disk_reason(None) is None


def test_what_was_just_written_and_is_not_there_is_a_folder_that_is_gone() -> None:
    # TensorStore gives no number where the file that it wrote a moment ago cannot be found again.
    of = "Error reading Byte range [0, 199) of local file"
    text = f'Error opening "zarr" driver: Error writing "a" in OCDBT database at local file "b/": {of} "b/d/1"'
    vanished = ValueError(f"NOT_FOUND: {text}")
    assert disk_reason(vanished) == "the folder is gone"
    assert unreachable(vanished) is None
    unfinished = f'Error reading "a" in OCDBT database at local file "3.orbax-checkpoint-tmp/b/": {of} "b/d/1"'
    assert disk_reason(ValueError(f"NOT_FOUND: {unfinished}")) == "the folder is gone"
    for folder, reason in (("3.orbax-checkpoint-tmp/state", "the folder is gone"), ("3/state", None)):
        missing = f"No ArrayMetadata found for process_index=0 in the checkpoint directory: {folder}. But input PyTree"
        assert disk_reason(ValueError(missing)) == reason
    assert disk_reason(ValueError(f'NOT_FOUND: Error opening "zarr" driver: {of} "b/d/1"')) is None
    assert disk_reason(ValueError(f"FAILED_PRECONDITION: {text}")) is None


def test_a_connection_is_not_a_disk() -> None:
    assert disk_reason(OSError(errno.ETIMEDOUT, "x", "/shared/metrics.jsonl")) == "the disk does not answer"
    assert disk_reason(wrapped(errno.ETIMEDOUT)) is None


def test_a_missing_file_may_be_damage_but_a_stale_folder_is_not() -> None:
    assert unreachable(FileNotFoundError(errno.ENOENT, "x")) is None
    assert unreachable(OSError(errno.EIO, "x")) is None
    assert unreachable(wrapped(errno.ESTALE)) == "the shared folder is gone"


def test_a_line_says_what_and_where() -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/shared/run")
    assert failed_line(error) == "failed: the disk is read-only: [Errno 30] Read-only file system: '/shared/run'"
    assert failed_line(ValueError("a bug")) is None


def test_waiting_ends_when_the_disk_takes_it_again() -> None:
    said: list[str] = []
    assert Patience(30, say=said.append).on("results", failing(2)) == "done"
    assert said[0] == "results: the disk is full; trying again for up to 30 s"
    assert said[1].startswith("results: written after ")
    assert len(said) == 2


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_patience_ends_in_one_line(seconds: float) -> None:
    said: list[str] = []
    with pytest.raises(RunError, match=r"results: the disk is full.*; what was saved before is intact") as caught:
        Patience(seconds, say=said.append).on("results", failing(1000))
    assert "\n" not in str(caught.value)
    assert len(said) == (1 if seconds else 0)


def test_other_errors_are_not_waited_for() -> None:
    def broken() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Patience(30).on("results", broken)


def test_nothing_is_written_beside_a_folder_that_is_gone(tmp_path: Path) -> None:
    """The folder's name may be there: a mount point without its mount."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    patience = Patience(0, folder / "lock")
    folder.rename(tmp_path / "away")
    folder.mkdir()
    for _ in range(2):
        with pytest.raises(RunError, match="the folder is gone"):
            patience.on("results", lambda: (folder / "results.json").touch())
        (folder / "lock").touch()  # another file of that name is not the run's
    assert not (folder / "results.json").exists()


STATE = {"params": np.arange(1000.0)}


def manifest(step: int, *tags: str) -> dict[str, Any]:
    return {"step": step, "tags": list(tags)}


def test_a_checkpoint_waits_for_its_folder_to_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    said: list[str] = []
    store = CheckpointStore(folder / "checkpoints", patience=Patience(60, folder / "lock", said.append))
    store.save(1, STATE, manifest(1), durable=True)
    folder.rename(tmp_path / "away")
    back = threading.Timer(0.5, lambda: (tmp_path / "away").rename(folder))
    back.start()
    store.save(2, STATE, manifest(2), durable=True)
    back.join()
    store.close()
    assert said[0].startswith("checkpoint 2: the folder is gone; trying again")
    assert [info.step for info in list_checkpoints(folder / "checkpoints")] == [1, 2]
    assert not unusable_checkpoints(folder / "checkpoints")


def test_a_checkpoint_that_failed_in_the_background_is_named_and_the_next_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    store = CheckpointStore(tmp_path, patience=Patience(30, say=said.append))
    store.save(1, STATE, manifest(1))
    store.wait()
    store.save(2, STATE, manifest(2))
    fail = failing(1)
    waited = store._manager.wait_until_finished

    def refuse() -> None:
        waited()
        fail()

    monkeypatch.setattr(store._manager, "wait_until_finished", refuse)
    store.save(3, STATE, manifest(3, "boundary_1"))
    store.close()
    assert said == ["checkpoint 2 could not be written and is left out: the disk is full"]
    assert 3 in {info.step for info in list_checkpoints(tmp_path)}


def test_a_checkpoint_that_is_kept_for_good_is_tried_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    store = CheckpointStore(tmp_path, patience=Patience(30, say=said.append))
    monkeypatch.setattr(store._manager, "wait_until_finished", failing(3))
    monkeypatch.setattr(store._manager, "save", failing(3))
    store._settle()
    said.clear()
    store.save(5, STATE, manifest(5, "final"))
    assert [info.step for info in list_checkpoints(tmp_path)] == [5]  # before anything waits for it
    store.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_checkpoint_that_went_to_another_disk_is_not_taken_for_written(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk vanishes without an error: who makes folders as needed has written below the empty mount point."""
    said: list[str] = []
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    (folder / "lock").touch()
    store = CheckpointStore(folder / "checkpoints", patience=Patience(60, folder / "lock", said.append))

    def begun(point: str) -> None:
        if point == "checkpoint begun" and not away.exists() and not said:
            finished = store._manager.wait_until_finished
            store._manager.wait_until_finished = lambda: vanished(finished)

    def vanished(finished: Any) -> None:
        store._manager.wait_until_finished = finished
        finished()
        folder.rename(away)
        (folder / "checkpoints" / "1").mkdir(parents=True)
        (folder / "lock").touch()
        threading.Timer(0.2, back).start()

    def back() -> None:
        folder.rename(tmp_path / "below")
        shutil.rmtree(away / "checkpoints" / "1")
        away.rename(folder)

    monkeypatch.setattr(checkpoints, "fault_point", begun)
    store.save(1, STATE, manifest(1), durable=durable)
    store.wait()
    store.save(2, STATE, manifest(2), durable=True)
    store.close()
    assert [info.step for info in list_checkpoints(folder / "checkpoints")] == ([1, 2] if durable else [2])
    assert any("checkpoint 1" in line and "the folder is gone" in line for line in said)


def test_what_does_not_count_is_told_apart(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, STATE, manifest(step), durable=True)
    store.close()
    (tmp_path / "2" / "manifest" / "metadata").write_text("{")
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "0.orbax-checkpoint-tmp-removed").mkdir()
    found = unusable_checkpoints(tmp_path)
    assert set(found) == {"2", "3.orbax-checkpoint-tmp"}
    assert "damaged" in found["2"]
    assert found["3.orbax-checkpoint-tmp"] == "it was not finished"
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_a_manifest_that_the_disk_does_not_give_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(Path, "read_text", lambda path: failing(1, errno.ESTALE)())
    for listed in (list_checkpoints, unusable_checkpoints):
        with pytest.raises(OSError, match="Stale"):
            listed(tmp_path)


def test_limits_of_handles_and_memory_are_named_and_no_fault_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failed_line(OSError(errno.EMFILE, "Too many open files"))
    assert found is not None
    assert "may not open more files" in found
    for error in (
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"),
        ImportError("libjax.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
    ):
        assert unreachable(error) == "there is too little memory"
    full = RuntimeError("RESOURCE_EXHAUSTED: Error writing [OS error 28: ENOSPC No space left on device]")
    assert disk_reason(full) == "the disk is full"
    assert "mend the disk" not in gave_up("results.json", "there is too little memory", 0)

    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("holdfast.execution.storage.os.open", exhausted)
    found = failed_line(ModuleNotFoundError("No module named 'jaxlib'"))  # as an import without handles fails
    assert found is not None
    assert "may not open more files" in found


def test_what_orbax_was_still_reading_when_it_failed_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda trouble: shown.append(str(trouble.exc_value)))
    checkpoints._quiet_orbax.cache_clear()
    checkpoints._quiet_orbax()
    for file in ("packages/orbax/checkpoint/reading.py", "own/reading.py"):
        made: dict[str, Any] = {}
        text = f"async def read():\n    try:\n        await wait()\n    finally:\n        raise ValueError({file!r})\n"
        made["wait"] = _forever
        exec(compile(text, file, "exec"), made)
        reading = made["read"]()
        reading.send(None)
        del reading  # closed by the garbage collection, where it raises
    checkpoints._quiet_orbax.cache_clear()
    assert shown == ["own/reading.py"]


@types.coroutine
def _forever() -> Iterator[None]:
    while True:
        yield
