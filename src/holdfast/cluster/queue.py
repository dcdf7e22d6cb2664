"""What became of submitted runs: SLURM's word where it still knows them, else the runs' own files."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cluster import slurm
from holdfast.cluster.submissions import PREPARED, Submission
from holdfast.report.live import status

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Line:
    """One run in the table of the queue."""

    id: str
    job: str
    run: str
    state: str
    reason: str
    elapsed: str
    restarts: int
    progress: str


def lines(submission: Submission) -> list[Line]:
    """The state of every run of a submission."""
    told = submission.states() if slurm.available("scontrol") or slurm.available("sacct") else {}
    return [line(submission, index, told.get(index)) for index in range(len(submission.runs))]


def line(submission: Submission, index: int, told: slurm.JobState | None) -> Line:
    """The state of one run."""
    run = submission.runs[index]
    seen = status(submission.run_dir(index), run.name)
    if submission.job is None:
        state, reason = "not submitted", "cut off before SLURM answered"
    elif told is not None:
        state, reason = told.state, told.reason
    else:
        # SLURM forgets finished jobs after some minutes where no accounting is kept.
        state = "COMPLETED" if seen.state == "finished" else UNKNOWN
        reason = "by its results" if seen.state == "finished" else f"SLURM knows it no more; the run is {seen.state}"
    progress = f"{seen.step:,} of {seen.total_steps:,}" if seen.total_steps else "not started"
    if run.folder.startswith(f"{PREPARED}/"):
        progress = "no run"
    return Line(
        id=submission.id,
        job=submission.job_of(index) if submission.job else "",
        run=run.folder,
        state=state,
        reason=reason,
        elapsed=told.elapsed if told else "",
        restarts=told.restarts if told else 0,
        progress="finished" if seen.state == "finished" else progress,
    )


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """The last lines of a file, and where it ends; a file that is not there yet is empty."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "", 0
    kept = data.splitlines(keepends=True)[-count:] if count else []
    return b"".join(kept).decode(errors="replace"), len(data)


def followed(
    submission: Submission, indices: Sequence[int], ends: dict[Path, int], task: int
) -> Iterator[tuple[Path, str]]:
    """What is added to logs, as it comes, until the jobs are over.

    Args:
        ends: how much of each file was shown already.
    """
    while True:
        states = submission.states()
        live = any(index in states and states[index].live for index in indices)
        for index in indices:
            path = submission.log(index, task)
            text, end = added(path, ends.get(path, 0))
            ends[path] = end
            if text:
                yield path, text
        if not live:
            return
        time.sleep(1.0)


def added(path: Path, start: int) -> tuple[str, int]:
    """What stands in a file after a position, and where it ends."""
    if not path.exists():
        return "", start
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    return data.decode(errors="replace"), start + len(data)
