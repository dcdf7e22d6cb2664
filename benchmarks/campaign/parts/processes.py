"""Two processes of one run of which one dies, stops, differs from the other, comes late or not at all.

One that dies or stops ends both, and the same command goes on to the results of a run that nobody disturbed. One that
was started with something else ends both before anything is written. One that is late is waited for; one that does
not come is named in a line.
"""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "one of two processes dies, stops, differs, comes late or not at all; both end in a line, and go on exactly"
KINDS = ("dies", "stops", "differs", "late", "missing")
DIFFERENCES = (
    "optimization.lr=0.3",
    "training.seed=5",
    "optimization.weight_decay=0.5",
    "logging.checkpoint_interval=4",
    "architecture.n_embd=16",
)
MESH = ("topology.data=2", "training.per_device_batch_size=2")
SECONDS = 300


def tries(seed: int) -> Iterator[Try]:
    """Every kind in turn, at an instant and for a process that the number chooses."""
    number = 0
    while True:
        chance = random.Random(f"processes {seed} {number}")
        kind, share, victim = KINDS[number % len(KINDS)], chance.random(), chance.randrange(2)
        yield Try(
            f"{number}: {kind} {share:.3f}, process {victim}", functools.partial(tried, number, kind, share, victim)
        )
        number += 1


def start(
    out: Path, *overrides: str, second: Sequence[str] = (), delays: Sequence[float] = (0, 0)
) -> list[subprocess.Popen[str]]:
    """The two processes of a run, each after its delay; one with a negative delay is not started."""
    from holdfast.execution.launching import free_port

    command = [sys.executable, "-m", "holdfast", *tiny.arguments("anchored", out, *MESH, *overrides)]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    started = []
    for index, delay in enumerate(delays):
        if delay < 0:
            continue
        time.sleep(delay)
        log = (scratch() / f"process-{index}.log").open("w")
        line = [*command, "--process-id", str(index), *(second if index else ())]
        started.append(subprocess.Popen(line, stdout=log, stderr=log, text=True))
    return started


def ended(processes: Sequence["subprocess.Popen[str]"]) -> tuple[list[int], str]:
    """Exit codes, and all that was said; a process that does not end is killed."""
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(-999)
    return codes, "".join(path.read_text(errors="replace") for path in sorted(scratch().glob("process-*.log")))


@functools.cache
def undisturbed() -> dict[str, object]:
    """What comes of two processes that nobody disturbs."""
    tiny.environment()
    out = scratch() / "whole-two"
    codes, said = ended(start(out))
    if any(codes):
        raise RuntimeError(f"the run that nobody disturbs failed:\n{said[-3000:]}")
    return tiny.outcome(tiny.run_dir(out))


def tried(number: int, kind: str, share: float, victim: int) -> Outcome:
    """One run whose processes are not as they should be."""
    whole = undisturbed()
    out = scratch() / f"two-{number}"
    try:
        wrong = _met(out, kind, share, victim)
        if wrong is not None:
            return Outcome(kind, wrong, held=False)
        codes, said = ended(start(out))
        if any(codes):
            return Outcome(kind, f"cannot go on: exit codes {codes}: {said.strip().splitlines()[-1][:150]}", held=False)
        wrong = tiny.difference(tiny.run_dir(out), whole)
        return Outcome(kind, wrong, held=False) if wrong else Outcome(kind, "ended in a line, then resumed exactly")
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _met(out: Path, kind: str, share: float, victim: int) -> str | None:
    """Let it happen; what was wrong with how the processes ended, None where nothing was."""
    if kind == "missing":
        codes, said = ended(start(out, "topology.start_timeout=3", delays=(0, -1) if victim else (-1, 0)))
        return None if codes == [1] and "has not come within 3 s" in said else f"exit codes {codes}"
    if kind == "late":
        codes, said = ended(start(out, delays=(0, 1 + 4 * share)))
        return None if codes == [0, 0] else f"exit codes {codes}"
    if kind == "differs":
        codes, said = ended(start(out, second=(DIFFERENCES[int(share * len(DIFFERENCES))],)))
        clean = codes == [2, 2] and "something else than process 0" in said and not tiny.run_dir(out).exists()
        return None if clean else f"exit codes {codes}"
    processes = start(out, "topology.step_timeout=12")
    _strike(processes, out, kind, share, victim)
    codes, said = ended(processes[:victim] + processes[victim + 1 :])
    os.kill(processes[victim].pid, signal.SIGKILL)
    processes[victim].wait()
    if "Traceback" in said:
        return "a traceback"
    return f"exit codes {codes}" if codes[0] in (-999, 2) else None


def _strike(processes: Sequence["subprocess.Popen[str]"], out: Path, kind: str, share: float, victim: int) -> None:
    """Kill or stop a process when the run has recorded so many steps, or has ended."""
    from holdfast.tracking.jsonl import read_lines

    path, wanted, started = tiny.run_dir(out) / "metrics.jsonl", int(share * 5), time.monotonic()
    while time.monotonic() - started < SECONDS and all(process.poll() is None for process in processes):
        if path.exists() and any(each.get("step", 0) >= wanted for each in read_lines(path)[0]):
            break
        time.sleep(0.02)
    if processes[victim].poll() is None:
        processes[victim].send_signal(signal.SIGKILL if kind == "dies" else signal.SIGSTOP)
