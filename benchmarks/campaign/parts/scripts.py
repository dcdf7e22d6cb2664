"""Hostile names and values in what `holdfast submit` writes for SLURM.

A name or a value is refused in a message, or it reaches the command as one word, letter for letter: the script is run
by bash with programs that play SLURM, and nothing in it may run anything else or change what SLURM is told.
"""

import functools
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "hostile names and values in scripts for SLURM; refused in a message, or one word of the command"
PIECES = (
    "$(touch CANARY)", "`touch CANARY`", "; touch CANARY;", "&& touch CANARY", "| touch CANARY", "\n touch CANARY\n",
    "'", '"', "\\", "#SBATCH --wrap=x", "\n#SBATCH --wrap=x", "${HOME}", "*", "?", "[a]", "~", "!", "%j", "%x", " ",
    "\t", "\r", "--wrap", "-", "..", "/", "ä", "日本", "\u202e", "a" * 300, "<", ">", "(", ")", "{a,b}", "=", "&",
)  # fmt: skip
PLACES = ("name", "group", "project", "out", "override", "partition", "account", "qos", "constraint", "mem", "folder")
PLAYS = """#!/bin/bash
[ "$1" = --unbuffered ] || exit 9
while [ "$1" != HOLDFAST ]; do [ $# -gt 0 ] || exit 8; shift; done
printf '%s\\0' "$@" > "$WORDS"
"""


def tries(seed: int) -> Iterator[Try]:
    """A text of some pieces in one place."""
    number = 0
    while True:
        chance = random.Random(f"scripts {seed} {number}")
        place = PLACES[number % len(PLACES)]
        text = "".join(chance.choices((*PIECES, "a", "b", "run"), k=chance.randint(1, 4)))
        yield Try(f"{place}: {text!r}", functools.partial(tried, place, text))
        number += 1


def tried(place: str, text: str) -> Outcome:
    """One script with a text in one place, run as SLURM would."""
    from holdfast.cluster.resources import Resources
    from holdfast.cluster.script import batch_script
    from holdfast.errors import UserError
    from holdfast.execution import ExecutionSpec

    folder = scratch() / "scripts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    resources = {place: text} if place in ("partition", "account", "qos", "constraint", "mem") else {}
    names = {place: text} if place in ("name", "group", "project") else {}
    words = ["HOLDFAST", "run", "x.yaml"]
    try:
        spec = ExecutionSpec(**{"name": "run", **names})  # refuses names that are no names
        words += ["--name", spec.name, "--group", spec.group, "--project", spec.project]
        words += {"out": ["--out", text], "override": [f"training.note={text}"]}.get(place, [])
        logs = folder / text if place == "folder" else folder / "logs"
        script = batch_script(spec.name, logs, folder, [words], Resources(time="10", **resources))
    except (UserError, ValueError) as error:
        return Outcome(place, "refused" if str(error) else "refused without a word", held=bool(str(error)))
    return _played(folder, place, script, words)


def _played(folder: Path, place: str, script: str, words: list[str]) -> Outcome:
    programs, told = folder / "bin", folder / "words"
    programs.mkdir()
    for name, text in (("srun", PLAYS), ("scontrol", "#!/bin/bash\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "WORDS": str(told), "SLURM_JOB_ID": "7", "HOME": str(folder)}
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    if list(folder.rglob("CANARY")):
        return Outcome(place, "something else was run", held=False)
    if done.returncode or not told.exists():
        return Outcome(place, f"the script failed: {done.stderr.strip()[:150]}", held=False)
    found = told.read_bytes().decode().split("\0")[:-1]  # as they are: text would make a \\n of a \\r
    if found != words:
        return Outcome(place, f"other words: {json.dumps(found)[:150]}", held=False)
    # SLURM reads its lines up to the first command.
    comments = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines())
    asked = [line for line in comments if line.startswith("#SBATCH")]
    if any("--wrap" in line.partition("=")[0] for line in asked):
        return Outcome(place, "SLURM is told something else", held=False)
    return Outcome(place, "one word")
