"""SLURM: `submit`, and `queue` to look after what was submitted."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import Config, InitFrom, Name, Out, Overrides, Parent, Project
from holdfast.cluster.resources import Resources
from holdfast.cluster.sweep import Member, members
from holdfast.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from holdfast.cluster.submissions import Request, Submission


Number = Optional[int]
Text = Optional[str]


def submit_command(
    context: typer.Context,
    config: Config,
    time: Annotated[
        str, typer.Option("--time", help="Limit of one start; the run goes on in the next: 2:00:00, 1-12.")
    ],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each machine.")] = 0,
    tasks_per_node: Annotated[Number, typer.Option(min=1, help="Processes of a machine; one for each GPU.")] = None,
    cpus_per_task: Annotated[Number, typer.Option(min=1, help="CPUs of each process.")] = None,
    mem: Annotated[Text, typer.Option("--mem", help="Memory of each machine, such as 64G.")] = None,
    partition: Annotated[Text, typer.Option("--partition", help="Partition of the cluster.")] = None,
    account: Annotated[Text, typer.Option("--account", help="Account that is charged.")] = None,
    qos: Annotated[Text, typer.Option("--qos", help="Quality of service.")] = None,
    constraint: Annotated[Text, typer.Option("--constraint", help="Features that the machines must have.")] = None,
    setup: Annotated[Optional[List[str]], typer.Option("--setup", help="Line of shell before; repeatable.")] = None,
    grace: Annotated[int, typer.Option(min=1, help="Seconds before the limit when the run saves and stops.")] = 120,
    max_requeues: Annotated[int, typer.Option(min=0, help="How often the job may be queued again.")] = 100,
    array: Annotated[Optional[List[str]], typer.Option(help="path=value,value,…: a sweep; repeatable.")] = None,
    parallel: Annotated[Number, typer.Option(min=1, help="Runs of a sweep at the same time, at most.")] = None,
    prepare: Annotated[Number, typer.Option("--prepare", min=1, help="Prepare the data instead, in N jobs.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script; submit nothing.")] = False,
    name: Name = None,
    project: Project = "general",
    group: Annotated[Text, typer.Option("--group", help="Folder above the run; a sweep's is its name.")] = None,
    out: Out = Path("runs"),
    parent: Parent = None,
    init_from: InitFrom = None,
) -> None:
    """Submit a run, or a sweep of runs, to SLURM.

    It is queued again when its time is over or when it is pushed out, and then goes on. With --prepare N its data is
    prepared in an array of N jobs instead.

    Example: holdfast submit my.yaml --nodes 2 --gpus-per-node 8 --time 12:00:00 --array training/seed=1,2,3
    """
    from holdfast.cluster import submissions

    resources = Resources(
        time=time, nodes=nodes, tasks_per_node=tasks_per_node, gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task, mem=mem, partition=partition, account=account, qos=qos, constraint=constraint,
        grace_seconds=grace, max_requeues=max_requeues, parallel=parallel, setup=tuple(setup or ()),
    )  # fmt: skip
    title, shared, plugins = name or config.stem, list(overrides or []), context.find_root().params.get("plugin") or []
    if prepare is not None:
        if array or parent or init_from:
            raise UserError("--prepare: data is prepared without --array, --from and --init-from; take them out")
        request = preparation(prepare, config, shared, resources, title=title, out=out.absolute(), plugins=plugins)
    else:
        request = make_request(
            members(title, array or []), config, shared, resources,
            title=title, project=project, group=group or (title if array else "default"), out=out.absolute(),
            plugins=plugins, parent=parent, init_from=init_from,
        )  # fmt: skip
    if dry_run:
        print(submissions.preview(request), end="")
    else:
        tell(submissions.submit(request), request)


def make_request(
    runs: Sequence[Member],
    config: Path,
    shared: list[str],
    resources: Resources,
    *,
    title: str,
    project: str,
    group: str,
    out: Path,
    plugins: Sequence[str],
    parent: str | None,
    init_from: str | None,
) -> "Request":
    """A submission whose runs were all checked as `run` would check them."""
    from holdfast.cli.configs import read_run
    from holdfast.cluster.submissions import Request, SubmittedRun
    from holdfast.execution.checkpoints import named_checkpoint

    for run in runs:
        resolved = read_run(config, [*shared, *run.overrides], run.name, project, group, parent, init_from)
        check_mesh(resolved.options.cfg, resources)
    for source in filter(None, (parent, init_from)):
        named_checkpoint(source)  # must be there now, not only when the queue gets to the run
    loaded = [part for module in plugins for part in ("--plugin", module)]
    places = ["--project", project, "--group", group, "--out", str(out)]
    starts = [
        part for option, value in (("--from", parent), ("--init-from", init_from)) if value for part in (option, value)
    ]
    return Request(
        name=title,
        out=out,
        config=config.absolute(),
        command=[sys.executable, "-m", "holdfast", *loaded, "run"],
        arguments=[*shared, *places, *starts],
        runs=[SubmittedRun(run.name, f"{project}/{group}/{run.name}", run.overrides) for run in runs],
        resources=resources,
    )


def preparation(
    count: int,
    config: Path,
    shared: list[str],
    resources: Resources,
    *,
    title: str,
    out: Path,
    plugins: Sequence[str],
) -> "Request":
    """A submission of jobs that prepare a config's data together: `holdfast prepare --shard I/N` in each."""
    from holdfast.cli.configs import read_config
    from holdfast.cluster.submissions import PREPARED, Request, SubmittedRun
    from holdfast.data.shards import MOST_SHARDS
    from holdfast.execution.names import check_name

    if resources.processes > 1 or resources.gpus_per_node:
        raise UserError(
            "--prepare: every job is one process without GPUs; leave --nodes, --tasks-per-node and --gpus-per-node "
            "out, and give it --cpus-per-task"
        )
    if count > MOST_SHARDS:
        raise UserError(f"--prepare {count}: at most {MOST_SHARDS:,} jobs")
    check_name(title, "--name")
    read_config(config, shared).resolved()
    name = f"{title}-prepare"
    return Request(
        name=name,
        out=out,
        config=config.absolute(),
        command=[
            sys.executable,
            "-m",
            "holdfast",
            *(part for each in plugins for part in ("--plugin", each)),
            "prepare",
        ],
        arguments=shared,
        runs=[
            SubmittedRun(f"{name}-{number}", f"{PREPARED}/{name}/{number}", ("--shard", f"{number}/{count}"))
            for number in range(1, count + 1)
        ],
        resources=resources,
        named=False,
    )


def check_mesh(cfg: "DictConfig", resources: Resources) -> None:
    """Refuse a mesh that does not fit the GPUs that are asked for, or a batch that they cannot share evenly.

    Better now than when the queue gets to it.
    """
    from holdfast.config import configure
    from holdfast.execution.topology import TopologyConfig, axis_sizes
    from holdfast.training.compile import check_batch

    if resources.gpus_per_node:
        sizes = axis_sizes(configure(TopologyConfig, cfg), resources.nodes * resources.gpus_per_node)
        batch_size, per_device = cfg.training.batch_size, cfg.training.per_device_batch_size
        check_batch(batch_size, per_device, sizes["data"] * sizes["fsdp"])


def tell(submission: "Submission", request: "Request") -> None:
    """What was submitted, and how to look after it."""
    count = len(submission.runs)
    what = "runs" if request.named else "shares of the data"
    runs = f"{count} {what}" if count > 1 or not request.named else str(submission.run_dir(0))
    print(f"{submission.id}: job {submission.job}, {runs}, processes of a run: {submission.processes}")
    print(f"script and logs: {submission.folder}")
    print(f"holdfast queue status {submission.id} --out {request.out}")
    if count > 1 and request.named:
        print(f"holdfast compare '{submission.run_dir(0).parent}/*'")
    if request.out.is_relative_to(tempfile.gettempdir()):
        print(f"note: {request.out} is a temporary folder; other machines of a cluster do not see it", file=sys.stderr)


app = typer.Typer(no_args_is_help=True, help="Look after runs that were submitted: status, logs, cancel.")

WHAT = "A submission, SLURM's number of a job, or the name of a run"


@app.command()
def status(
    job: Annotated[Optional[str], typer.Argument(help=f"{WHAT}; all unless given.")] = None,
    out: Out = Path("runs"),
) -> None:
    """Show what was submitted and how far it is.

    The job's state, how often it was queued again, and the run's steps.

    Example: holdfast queue status
    """
    from rich.console import Console

    from holdfast.cli.options import table
    from holdfast.cluster import queue, slurm
    from holdfast.cluster.submissions import find, submissions

    chosen, only = ([find(out, job)[0]], find(out, job)[1]) if job else (submissions(out), None)
    console = Console(highlight=False)
    if not chosen:
        typer.echo(f"{out}: nothing was submitted here; `holdfast submit CONFIG` does")
        return
    rows = []
    for submission in chosen:
        for index, line in enumerate(queue.lines(submission)):
            if only in (None, index):
                state = f"{line.state} ({line.reason})" if line.reason else line.state
                rows.append((line.id, line.job, state, line.elapsed, f"{line.restarts}", line.progress, line.run))
    console.print(table(("submission", "job", "state", "elapsed", "restarts", "steps", "run"), rows))
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
    """Show what submitted runs printed, over all starts.

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
    """End the jobs of a submission, or one of them.

    The runs keep their checkpoints and can be submitted again.

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
