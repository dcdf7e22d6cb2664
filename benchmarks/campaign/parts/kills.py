"""Kills at every named point of the program, and between any two files that it writes.

One run is killed again and again, each time at a point that the seed chooses, and then left to end. It must end as the
run that nobody disturbed: the same records, arrays, scores and sampled rows to the last bit, and nothing left behind.
"""

import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "kills at named points and between any two files; the run ends as if nothing had happened"
PREPARES = 4  # one of so many runs prepares its data anew
KILLS = 12  # of one run before it may end
# Runs with little to trace die sooner and more often; every third has stages, an anchor, evaluations or self-replay.
ORDER = ("anchored", "plain", "plain", "self-replay", "plain", "plain")
FILES = 16  # that a checkpoint is made of, about
OPERATIONS = 120  # on files, of a whole run, about
LAST = ("checkpoint written", "results", "report", "trained", "end")  # after these little is left to kill


def tries(seed: int) -> Iterator[Try]:
    """Runs that are killed some times before they end."""
    from holdfast.execution.faults import POINTS

    number = 0
    decks: dict[str, list[tuple[str, float]]] = {kind: [] for kind in tiny.CONFIGS}
    while True:
        chance = random.Random(f"{seed} {number}")
        kind = ORDER[number % len(ORDER)]
        deck = decks[kind]
        if len(deck) < KILLS:  # every point that a kind of run passes comes up as often as any other
            passed = [point for point in POINTS if kind == "self-replay" or point != "sampled"]
            fresh = [*passed, *["file of a checkpoint"] * 8, *["file operation"] * 8]
            chance.shuffle(fresh)
            deck += [(point, chance.random()) for point in fresh]
        faults, decks[kind] = deck[:KILLS], deck[KILLS:]
        plan = sorted(faults, key=lambda fault: LAST.index(fault[0]) if fault[0] in LAST else -1)
        name = f"{kind}: " + ", ".join(f"{point} {share:.3f}" for point, share in plan)
        yield Try(name, functools.partial(killed_run, kind, plan, number))
        number += 1


@functools.cache
def undisturbed(kind: str) -> tuple[dict[str, Any], dict[str, int]]:
    """What comes of a run that nobody disturbs, and how often it passes each point; made in another process."""
    tiny.environment()
    tiny.import_all()
    out, log, counted = scratch() / f"whole-{kind}", scratch() / "whole.log", scratch() / f"passes-{kind}.json"

    def run() -> int:
        from holdfast.execution.faults import set_hook

        passes: Counter[str] = Counter()
        set_hook(lambda name: passes.update([name]))
        before = set(sys.modules)
        code = tiny.command(kind, out)
        counted.write_text(json.dumps({"passes": passes, "modules": sorted(set(sys.modules) - before)}))
        return code

    if tiny.forked(run, log):
        raise RuntimeError(f"the run that nobody disturbs failed:\n{log.read_text()[-3000:]}")
    seen = json.loads(counted.read_text())
    tiny.import_what_a_run_imports(seen["modules"])
    passes = {"file operation": OPERATIONS, "file of a checkpoint": FILES, **seen["passes"]}
    return tiny.outcome(tiny.run_dir(out)), passes


def killed_run(kind: str, plan: list[tuple[str, float]], number: int) -> list[Outcome]:
    """Kill a run at every point of a plan, one after the other, let it end, and compare."""
    whole, passes = undisturbed(kind)
    out = scratch() / f"run-{number}"
    # A cache of its own where data is prepared while kills come.
    cache = scratch() / (f"cache-{number}" if number % PREPARES == 0 else "cache")
    log, done = scratch() / "child.log", []
    for point, share in plan:
        # A run that was killed has less before it: later ones are killed at the first or second pass.
        most = passes.get(point, 0) if not done or point.startswith("file") else min(passes.get(point, 0), 2)
        if not most:
            continue
        code = tiny.forked(functools.partial(_child, kind, out, cache, point, 1 + int(share * most)), log)
        if tiny.killed(code):
            done.append(point)
        elif code:
            return [Outcome(point, f"exit code {code}: {last_line(log)}", held=False)]
    code = tiny.forked(functools.partial(_child, kind, out, cache, "", 0), log)
    if code:
        return [Outcome(done[-1] if done else "none", f"cannot go on: {last_line(log)}", held=False)]
    wrong = tiny.difference(tiny.run_dir(out), whole)
    shutil.rmtree(out, ignore_errors=True)
    if number % PREPARES == 0:
        shutil.rmtree(cache, ignore_errors=True)
    if wrong:
        return [Outcome(", ".join(done), wrong, held=False)]
    return [Outcome(point, "resumed exactly") for point in done]


def last_line(log: Path) -> str:
    """The end of what a process said."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "nothing said"


def _child(kind: str, out: Path, cache: Path, point: str, count: int) -> int:
    """A run in this process, which is killed at a point."""
    from holdfast.execution.faults import kill_at, set_hook

    os.environ["HOLDFAST_CACHE"] = str(cache)
    if point == "file operation":
        sys.addaudithook(_kill_at_operation(count, (str(out), str(cache))))
    elif point == "file of a checkpoint":
        set_hook(_kill_between_files(tiny.run_dir(out) / "checkpoints", count))
    elif point:
        set_hook(kill_at(point, count))
    return tiny.command(kind, out)


def _kill_at_operation(count: int, folders: tuple[str, ...]) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook: before the so manieth file of ours is opened for writing, made, renamed or removed."""
    left = count

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open":
            mode = arguments[1]
            if not (isinstance(mode, str) and set(mode) & set("wax+")):
                return
        elif event not in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "tempfile.mkstemp"):
            return
        if isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(folders):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _kill_between_files(folder: Path, count: int) -> Callable[[str], None]:
    """A hook that kills the process when a checkpoint that is being written has so many files."""

    def watch() -> None:
        while True:
            for unfinished in folder.glob("*.orbax-checkpoint-tmp"):
                if sum(len(files) for _, _, files in os.walk(unfinished)) >= count:
                    os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str) -> None:
        if name == "checkpoint pruned":
            threading.Thread(target=watch, daemon=True).start()

    return hook
