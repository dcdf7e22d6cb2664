"""Disks that fill up, turn read-only, vanish or are slow while a run writes.

A run meets the fault at a named point. Where it may wait, the disk is well again after a moment and the run goes on.
Where it may not, it ends with exit code 1 and one line that names the disk, and the same command goes on later. Either
way it ends as the run that nobody disturbed. The disks are file systems in memory: mounting them needs root.
"""

import functools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch
from benchmarks.campaign.parts.kills import last_line, undisturbed

ABOUT = "a disk that is full, read-only, gone or slow at a named point; waited for, or one line and the run goes on"
FAULTS = ("full", "read-only", "gone", "slow")
# Points before which the run has not written anything, or after which it writes nothing, tell little.
POINTS = ("first step", "stage entered", "step", "evaluated", "checkpoint", "checkpoint begun", "results", "trained")
KINDS = ("plain", "anchored")
SIZE = "32m"
SECONDS = 0.5  # that a fault lasts where the run may wait
PAUSE = 0.002  # of a slow disk, before each file that is opened, renamed or removed


def tries(seed: int) -> Iterator[Try]:
    """Faults of every kind at every point, with and without patience."""
    if os.geteuid() or shutil.which("mount") is None:
        return
    number = 0
    while True:
        chance = random.Random(f"disks {seed} {number}")
        fault, patient = FAULTS[number % len(FAULTS)], chance.random() < 0.5
        kind, point, share = KINDS[number // len(FAULTS) % len(KINDS)], chance.choice(POINTS), chance.random()
        name = f"{number}: {kind}, {fault} at {point} {share:.3f}, {'patient' if patient else 'not patient'}"
        yield Try(name, functools.partial(tried, number, kind, fault, point, share, patient))
        number += 1


class Disk:
    """A small disk at `place`, which can be harmed and mended."""

    def __init__(self, folder: Path) -> None:
        self.backing, self.place = folder / "backing", folder / "disk"
        for each in (self.backing, self.place):
            each.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", self.backing)
        _mount("--bind", self.backing, self.place)

    def harm(self, fault: str) -> None:
        """Make the fault happen now."""
        if fault == "full":
            with (self.backing / "ballast").open("wb", buffering=0) as file:
                while file.write(b"x" * 4096) == 4096:
                    if not os.statvfs(self.backing).f_bavail:
                        break
        elif fault == "gone":
            _unmount(self.place)
        elif fault == "read-only":  # mounted anew, because a disk with open files does not turn read-only
            _unmount(self.place)
            _mount("--bind", self.backing, self.place)
            _mount("-o", "remount,bind,ro", self.place)

    def mend(self, fault: str) -> None:
        """Undo it."""
        if fault == "full":
            (self.backing / "ballast").unlink()
        else:
            _unmount(self.place)
            _mount("--bind", self.backing, self.place)

    def remove(self) -> None:
        """Take it away for good."""
        _unmount(self.place)
        _unmount(self.backing)


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def tried(number: int, kind: str, fault: str, point: str, share: float, patient: bool) -> Outcome:
    """One run on a disk that fails once."""
    whole, passes = undisturbed(kind)
    what = f"{fault}, {point}"
    count = 1 + int(share * passes.get(point, 0))
    folder, log = scratch() / f"disk-{number}", scratch() / "child.log"
    disk = Disk(folder)
    try:
        code = tiny.forked(functools.partial(_child, kind, disk, fault, point, count, patient), log)
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            return Outcome(what, "a traceback", held=False)
        waits = patient or fault == "slow"
        if code == 0:
            how = "waited for" if waits else "nothing was to be written"
        elif code == 1 and not waits and text.count("failed: ") == 1:
            how = "one line, then resumed exactly"
            disk.mend(fault)
        else:
            return Outcome(what, f"exit code {code}: {last_line(log)}", held=False)
        if code:
            code = tiny.forked(functools.partial(tiny.command, kind, disk.place), log)
            if code:
                return Outcome(what, f"cannot go on: exit code {code}", held=False)
        elif fault == "gone" and not disk.place.joinpath("general").exists():
            disk.mend(fault)
        wrong = tiny.difference(tiny.run_dir(disk.place), whole)
        return Outcome(what, wrong, held=False) if wrong else Outcome(what, how)
    finally:
        disk.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _child(kind: str, disk: Disk, fault: str, point: str, count: int, patient: bool) -> int:
    """A run in this process that meets the fault."""
    from holdfast.execution.faults import at_point, set_hook

    if fault == "slow":
        sys.addaudithook(_slow(str(disk.place)))
    else:
        set_hook(at_point(point, count, functools.partial(_strike, disk, fault, patient)))
    return tiny.command(kind, disk.place, f"training.disk_patience={60 if patient else 0.2}")


def _strike(disk: Disk, fault: str, patient: bool) -> None:
    disk.harm(fault)
    if patient:

        def mended() -> None:
            time.sleep(SECONDS)
            disk.mend(fault)

        threading.Thread(target=mended, daemon=True).start()


def _slow(folder: str) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook that waits before each operation on a file below a folder."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(arguments[0]).startswith(folder):
            time.sleep(PAUSE)

    return hook
