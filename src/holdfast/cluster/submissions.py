"""What was submitted: one folder for each submission below the runs, with its config, script, record and logs."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from holdfast.cluster import slurm
from holdfast.cluster.resources import Resources
from holdfast.cluster.script import batch_script, require_submitit
from holdfast.errors import UserError
from holdfast.execution.files import write_atomically, write_json

FOLDER, RECORD, SCRIPT = ".submissions", "submission.json", "job.sh"
PREPARED = ".prepared"  # in place of a run's folder: a share of a preparation, which has none


@dataclass(frozen=True)
class SubmittedRun:
    """One run of a submission; its folder is that below the folder of all runs."""

    name: str
    folder: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submission:
    """One job, or one array of jobs.

    Args:
        id: its name, unique below a folder of runs.
        job: SLURM's number; None when the submission was cut off before SLURM answered.
        processes: tasks of each job.
    """

    id: str
    job: str | None
    submitted: str
    config: str
    runs: tuple[SubmittedRun, ...]
    processes: int
    folder: Path

    @property
    def is_array(self) -> bool:
        """Whether SLURM knows the runs by an index."""
        return len(self.runs) > 1

    def run_dir(self, index: int) -> Path:
        """The folder of a run."""
        return self.folder.parents[1] / self.runs[index].folder

    def job_of(self, index: int) -> str:
        """SLURM's name of the job of a run."""
        return f"{self.job}_{index}" if self.is_array else str(self.job)

    def log(self, index: int, task: int = 0) -> Path:
        """What a task of a run printed, over all its starts."""
        return self.folder / f"{self.job_of(index)}_{task}_log.out"

    def states(self) -> dict[int, slurm.JobState]:
        """What SLURM knows of the runs, by their positions."""
        found = slurm.states(self.job) if self.job else {}
        return {index or 0: state for index, state in found.items()}


@dataclass(frozen=True)
class Request:
    """A submission that is still to be made.

    Args:
        out: the folder of all runs.
        config: the config file; the submission keeps a copy, so that editing it does not change what is queued.
        command: the program and its options up to the config, such as `python -m holdfast run`.
        arguments: what follows the config and is the same for all runs.
        runs: what differs: names, folders, overrides.
        commands: what each run's tasks run, where that is no command with the config's copy and a name.
        after: SLURM's numbers of jobs that must have ended before these start.
        named: whether the command takes `--name`.
    """

    name: str
    out: Path
    config: Path
    command: Sequence[str]
    arguments: Sequence[str]
    runs: Sequence[SubmittedRun]
    resources: Resources
    commands: Sequence[Sequence[str]] = ()
    after: Sequence[str] = ()
    named: bool = True

    def script(self, folder: Path) -> str:
        """The batch script of a submission with this folder."""
        copy = str(folder / self.config.name)
        commands = self.commands or [
            [*self.command, copy, *self.arguments, *(["--name", run.name] if self.named else []), *run.overrides]
            for run in self.runs
        ]
        return batch_script(folder.name, folder, Path.cwd(), commands, self.resources)


def preview(request: Request) -> str:
    """The script that a submission would have; nothing is written."""
    return request.script(request.out / FOLDER / next(_ids(request)))


def submit(request: Request) -> Submission:
    """Write a submission's folder and hand its script to SLURM; what SLURM refuses leaves nothing behind."""
    slurm.require("sbatch")
    require_submitit()
    refuse_twice(request)
    preview(request)  # what cannot be written as a script is found before there is a folder
    folder = _new_folder(request)
    record = Submission(
        id=folder.name,
        job=None,
        submitted=datetime.now(UTC).isoformat(timespec="seconds"),
        config=str(request.config),
        runs=tuple(request.runs),
        processes=request.resources.processes,
        folder=folder,
    )
    try:
        write_atomically(folder / request.config.name, request.config.read_bytes())
        write_atomically(folder / SCRIPT, request.script(folder))
        _write(record)
        record = dataclasses.replace(record, job=slurm.submit(folder / SCRIPT, request.after))
    except (slurm.RefusedError, OSError) as error:
        # Only then: where SLURM may have taken the job, its config and script must stay.
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from None
        raise
    _write(record)
    return record


def refuse_twice(request: Request) -> None:
    """Two jobs that work on one run would stand in each other's way: the second would end at once."""
    wanted = {run.folder for run in request.runs}
    for each in submissions(request.out):
        shared = [index for index, run in enumerate(each.runs) if run.folder in wanted]
        states = each.states() if shared else {}
        for index in shared:
            if index in states and states[index].live:
                raise UserError(
                    f"{each.run_dir(index)}: submitted already as {each.id} ({states[index].state}); "
                    f"`holdfast queue cancel {each.id}`, or choose another --name"
                )


def _ids(request: Request) -> Iterator[str]:
    """Names for the next submission, the first that is free first."""
    taken = {path.name for path in (request.out / FOLDER).glob("*")}
    return (name for number in itertools.count(1) if (name := f"{request.name}-{number}") not in taken)


def _new_folder(request: Request) -> Path:
    """A folder that no other submission has, also when two are made at once."""
    for name in _ids(request):
        folder = request.out / FOLDER / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(folder, error) from None
        return folder
    raise AssertionError("names do not end")


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder}: cannot be written ({error.strerror}); choose another --out")


def _write(record: Submission) -> None:
    values = dataclasses.asdict(record)
    del values["folder"]
    write_json(record.folder / RECORD, values)


def read(folder: Path) -> Submission:
    """The submission of a folder."""
    values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    runs = tuple(SubmittedRun(run["name"], run["folder"], tuple(run["overrides"])) for run in values.pop("runs"))
    return Submission(**values, runs=runs, folder=folder)


def submissions(out: Path) -> list[Submission]:
    """All submissions below a folder of runs, the oldest first."""
    found = [read(path.parent) for path in (out.absolute() / FOLDER).glob(f"*/{RECORD}")]
    return sorted(found, key=lambda each: (each.submitted, each.id))


def find(out: Path, name: str | None) -> tuple[Submission, int | None]:
    """The submission of an id, of SLURM's number or of a run's name, and the run that was meant; None is the newest."""
    known = submissions(out)
    for each in reversed(known):
        if name is None or name in (each.id, each.job):
            return each, None
        for index, run in enumerate(each.runs):
            if name in (each.job_of(index), run.name):
                return each, index
    if not known:
        raise UserError(f"{out}: nothing was submitted here; `holdfast submit CONFIG` does, --out names another folder")
    raise UserError(f"{name}: no such submission in {out}; there is " + ", ".join(each.id for each in known[-10:]))
