"""SLURM's own programs, called and read: sbatch, scontrol, sacct, scancel."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UserError

# States of jobs that are still to run, run, or are about to run again.
LIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT"})
_SECONDS = 60


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job."""

    state: str
    reason: str = ""
    elapsed: str = ""
    restarts: int = 0
    nodes: str = ""

    @property
    def live(self) -> bool:
        """Whether the job may still do something."""
        return self.state in LIVE


def available(program: str) -> bool:
    """Whether a program of SLURM is on this machine."""
    return shutil.which(program) is not None


class RefusedError(UserError):
    """SLURM did not take a job."""


def require(program: str) -> None:
    """Refuse to go on where a program of SLURM is missing."""
    if not available(program):
        raise UserError(
            f"{program}: there is no such program here: this machine has no SLURM; go to a login node of the cluster, "
            "or let `holdfast submit … --dry-run` print the script"
        )


def call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM; one that is not here or does not answer is a UserError."""
    # A job that submits another must not hand its own numbers on.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    require(command[0])
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: SLURM did not answer within {_SECONDS} seconds; try again later") from None


def submit(script: Path, after: Sequence[str] = ()) -> str:
    """Hand a script to SLURM; returns the number of its job. What SLURM does not take is `RefusedError`.

    Args:
        after: numbers of jobs that must have ended before it starts, however they ended.
    """
    waits = [f"--dependency=afterany:{':'.join(after)}"] if after else []
    done = call("sbatch", "--parsable", *waits, str(script))
    if done.returncode:
        raise RefusedError(f"sbatch refused the job: {_said(done)}")
    return done.stdout.strip().partition(";")[0]


def cancel(job: str) -> None:
    """End a job, or take it from the queue."""
    done = call("scancel", job)
    if done.returncode:
        raise UserError(f"scancel {job}: {_said(done)}")


def states(job: str) -> dict[int | None, JobState]:
    """What SLURM knows of a job, by index for an array and at None for a single job; empty when it forgot it."""
    if available("scontrol"):
        done = call("scontrol", "show", "job", "--oneliner", job)
        if done.returncode == 0:
            return read_scontrol(done.stdout)
        if "Invalid job id" not in done.stderr:
            raise UserError(f"scontrol: {_said(done)}")
    if available("sacct"):
        done = call("sacct", "-n", "-P", "-X", "-j", job, "-o", "JobID,State,Reason,Elapsed,Restarts,NodeList")
        # Without accounting sacct fails, and there is nothing more to ask.
        if done.returncode == 0:
            return read_sacct(done.stdout)
    return {}


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "; ".join(line.removeprefix("sbatch: error: ") for line in lines) or f"exit code {done.returncode}"


def read_scontrol(text: str) -> dict[int | None, JobState]:
    """The jobs in what `scontrol show job --oneliner` prints.

    >>> read_scontrol("JobId=7 ArrayJobId=7 ArrayTaskId=1-2%1 JobState=PENDING Reason=Priority Restarts=0")[2].state
    'PENDING'
    """
    found: dict[int | None, JobState] = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        state = JobState(
            state=fields["JobState"],
            reason=_told(fields.get("Reason", "")),
            elapsed=fields.get("RunTime", ""),
            restarts=int(fields.get("Restarts", 0)),
            nodes=_told(fields.get("NodeList", "")),
        )
        indices = expand_indices(fields["ArrayTaskId"]) if "ArrayTaskId" in fields else [None]
        found |= dict.fromkeys(indices, state)
    return found


def read_sacct(text: str) -> dict[int | None, JobState]:
    """The jobs in what `sacct -n -P -X` prints.

    >>> read_sacct("7_1|COMPLETED|None|00:01:00|1|node1")[1]
    JobState(state='COMPLETED', reason='', elapsed='00:01:00', restarts=1, nodes='node1')
    """
    found: dict[int | None, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6:
            continue
        job, state, reason, elapsed, restarts, nodes = fields
        index = job.partition("_")[2].strip("[]")
        # "CANCELLED by 1000" is cancelled all the same.
        told = JobState(state.split(" ")[0], _told(reason), elapsed, int(restarts or 0), _told(nodes))
        found |= dict.fromkeys(expand_indices(index) if index else [None], told)
    return found


def _told(value: str) -> str:
    return "" if value in ("None", "(null)", "None assigned", "Unknown") else value


def expand_indices(text: str) -> list[int | None]:
    """The indices of an array as SLURM writes them.

    >>> expand_indices("0,2-3,4-8:2%2")
    [0, 2, 3, 4, 6, 8]
    """
    found: list[int | None] = []
    for part in text.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1, int(step or 1))
    return found
