"""Limits of memory and of open files that a process is started with (`ulimit`).

A run ends well, or with exit code 1 and a last line that says what there is too little of: no traceback, no stack of
C++, and never the advice to delete a good store. Without the limit the same command goes on, and ends as the run that
nobody disturbed.
"""

import functools
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch
from benchmarks.campaign.parts.kills import undisturbed

ABOUT = "little memory (`ulimit -v`) or few open files (`ulimit -n`); one line, and the run goes on without the limit"
MEGABYTES, FILES = (150, 2600), (3, 120)
NOISE = re.compile(r"Traceback|\s@\s+0x[0-9a-f]|terminate called|never awaited|delete|remove it")


def tries(seed: int) -> Iterator[Try]:
    """Limits that the number of a try chooses, of memory and of files in turn."""
    number = 0
    while True:
        chance = random.Random(f"limits {seed} {number}")
        memory = number % 2 == 0
        low, high = MEGABYTES if memory else FILES
        most = chance.randint(low, high)
        yield Try(f"{number}: {'memory' if memory else 'files'} {most}", functools.partial(tried, number, memory, most))
        number += 1


def tried(number: int, memory: bool, most: int) -> Outcome:
    """One run under a limit, then without."""
    import resource

    kind = ("plain", "anchored")[number // 2 % 2]
    whole, _ = undisturbed(kind)
    out, log = scratch() / f"limited-{number}", scratch() / "child.log"
    what = "memory" if memory else "open files"
    limit, value = (resource.RLIMIT_AS, most << 20) if memory else (resource.RLIMIT_NOFILE, most)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *tiny.arguments(kind, out, "training.disk_patience=0.2")],
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),  # no threads here
        capture_output=True, text=True, errors="replace", timeout=300,
    )  # fmt: skip
    lines = done.stderr.strip().splitlines()
    last = lines[-1] if lines else "nothing said"
    if done.returncode not in (0, 1) or (done.returncode and not last.startswith("failed: ")):
        return Outcome(what, f"{most}: exit code {done.returncode}: {last[:150]}", held=False)
    found = NOISE.search(done.stderr)
    if found:
        return Outcome(what, f"{most}: said {found.group()!r}", held=False)
    if done.returncode:
        code = tiny.forked(functools.partial(tiny.command, kind, out), log)
        if code:
            return Outcome(what, f"{most}: cannot go on: exit code {code}", held=False)
    wrong = tiny.difference(tiny.run_dir(out), whole)
    shutil.rmtree(out, ignore_errors=True)
    if wrong:
        return Outcome(what, f"{most}: {wrong}", held=False)
    return Outcome(what, "one line, then resumed exactly" if done.returncode else "ended well")
