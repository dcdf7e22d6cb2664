"""`holdfast queue`: what became of submitted runs."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from holdfast.cli.options import Out
from holdfast.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Look after runs that were submitted: status, logs, cancel.")

WHAT = "A submission, SLURM's number of a job, or the name of a run"


@app.command()
def status(
    job: Annotated[Optional[str], typer.Argument(help=f"{WHAT}; all unless given.")] = None,
    out: Out = Path("runs"),
) -> None:
    """Show what was submitted: the job's state, how often it was queued again, and how far the run is.

    Example: holdfast queue status
    """
    from rich.console import Console
    from rich.table import Column, Table

    from holdfast.cluster import queue, slurm
    from holdfast.cluster.submissions import find, submissions

    chosen, only = ([find(out, job)[0]], find(out, job)[1]) if job else (submissions(out), None)
    console = Console(highlight=False)
    if not chosen:
        console.print(f"{out}: nothing was submitted here; `holdfast submit CONFIG` does")
        return
    table = Table("submission", "job", "state", "elapsed", "restarts", "steps", Column("run", overflow="fold"))
    for submission in chosen:
        for index, line in enumerate(queue.lines(submission)):
            if only in (None, index):
                state = f"{line.state} ({line.reason})" if line.reason else line.state
                table.add_row(line.id, line.job, state, line.elapsed, f"{line.restarts}", line.progress, line.run)
    console.print(table)
    if not slurm.available("scontrol"):
        console.print("this machine has no SLURM: states are read from the runs' files alone", style="yellow")


@app.command()
def logs(
    job: Annotated[Optional[str], typer.Argument(help=f"{WHAT}; the newest submission unless given.")] = None,
    task: Annotated[int, typer.Option("--task", min=0, help="The process whose output is shown.")] = 0,
    lines: Annotated[int, typer.Option("--lines", min=0, help="Lines from the end; 0 = none.")] = 1000,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show what is added, until the jobs end.")] = False,
    out: Out = Path("runs"),
) -> None:
    """Show what submitted runs printed, over all their starts.

    Example: holdfast queue logs first-1 --follow
    """
    from holdfast.cluster import queue
    from holdfast.cluster.submissions import find

    submission, only = find(out, job)
    if submission.job is None:
        raise UserError(f"{submission.id}: was cut off before SLURM answered; it has no logs")
    if task >= submission.processes:
        raise UserError(f"--task {task}: {submission.id} has {submission.processes} processes, counted from 0")
    indices = list(range(len(submission.runs))) if only is None else [only]
    ends: dict[Path, int] = {}
    shown: Path | None = None
    for index in indices:
        path = submission.log(index, task)
        text, ends[path] = queue.last_lines(path, lines)
        shown = _show(path, text if path.exists() else "(nothing yet)\n", shown, many=len(indices) > 1)
    if follow:
        for path, text in queue.followed(submission, indices, ends, task):
            shown = _show(path, text, shown, many=len(indices) > 1)


def _show(path: Path, text: str, shown: Path | None, *, many: bool) -> Path:
    """Print a piece of a log, under its name where there are several and the last piece was of another."""
    if many and path != shown:
        typer.echo(f"==> {path} <==")
    typer.echo(text, nl=False)
    return path


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help=WHAT + ".")],
    out: Out = Path("runs"),
) -> None:
    """End the jobs of a submission, or one of them; the runs keep their checkpoints and can be submitted again.

    Example: holdfast queue cancel first-1
    """
    from holdfast.cluster import slurm
    from holdfast.cluster.submissions import find

    submission, only = find(out, job)
    if submission.job is None:
        raise UserError(f"{submission.id}: was cut off before SLURM answered; there is nothing to cancel")
    states = submission.states()
    indices = range(len(submission.runs)) if only is None else [only]
    live = [index for index in indices if index in states and states[index].live]
    if not live:
        typer.echo(f"{submission.id}: has ended already")
        return
    slurm.cancel(submission.job if only is None else submission.job_of(only))
    typer.echo(f"{submission.id}: cancelled {', '.join(submission.job_of(index) for index in live)}")
