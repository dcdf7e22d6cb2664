"""`holdfast submit`: hand a run, or a sweep of runs, to SLURM."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import Config, InitFrom, Name, Out, Overrides, Parent, Project
from holdfast.cluster.resources import Resources
from holdfast.cluster.sweep import Member, members

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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script; submit nothing.")] = False,
    name: Name = None,
    project: Project = "general",
    group: Annotated[Text, typer.Option("--group", help="Folder above the run; a sweep's is its name.")] = None,
    out: Out = Path("runs"),
    parent: Parent = None,
    init_from: InitFrom = None,
) -> None:
    """Submit a run to SLURM: it is queued again when its time is over or when it is pushed out, and then goes on.

    Example: holdfast submit my.yaml --nodes 2 --gpus-per-node 8 --time 12:00:00 --array training/seed=1,2,3
    """
    from holdfast.cluster import submissions

    resources = Resources(
        time=time, nodes=nodes, tasks_per_node=tasks_per_node, gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task, mem=mem, partition=partition, account=account, qos=qos, constraint=constraint,
        grace_seconds=grace, max_requeues=max_requeues, parallel=parallel, setup=tuple(setup or ()),
    )  # fmt: skip
    title, shared = name or config.stem, list(overrides or [])
    request = make_request(
        members(title, array or []), config, shared, resources,
        title=title, project=project, group=group or (title if array else "default"), out=out.absolute(),
        plugins=context.find_root().params.get("plugin") or [], parent=parent, init_from=init_from,
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
        check_mesh(resolved.cfg, resources)
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


def check_mesh(cfg: "DictConfig", resources: Resources) -> None:
    """Refuse a mesh that does not fit the GPUs that are asked for, or a batch that they cannot share evenly.

    Better now than when the queue gets to it.
    """
    from holdfast.config import configure
    from holdfast.execution.topology import TopologyConfig, axis_sizes
    from holdfast.training.microbatch import check_batch

    if resources.gpus_per_node:
        sizes = axis_sizes(configure(TopologyConfig, cfg), resources.nodes * resources.gpus_per_node)
        batch_size, per_device = cfg.training.batch_size, cfg.training.per_device_batch_size
        check_batch(batch_size, per_device, sizes["data"] * sizes["fsdp"])


def tell(submission: "Submission", request: "Request") -> None:
    """What was submitted, and how to look after it."""
    count = len(submission.runs)
    runs = f"{count} runs" if count > 1 else str(submission.run_dir(0))
    print(f"{submission.id}: job {submission.job}, {runs}, processes of a run: {submission.processes}")
    print(f"script and logs: {submission.folder}")
    print(f"holdfast queue status {submission.id} --out {request.out}")
    if count > 1:
        print(f"holdfast compare '{submission.run_dir(0).parent}/*'")
    if request.out.is_relative_to(tempfile.gettempdir()):
        print(f"note: {request.out} is a temporary folder; other machines of a cluster do not see it", file=sys.stderr)
