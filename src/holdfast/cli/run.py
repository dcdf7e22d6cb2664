"""`holdfast run`: train, and go on where an earlier process stopped."""

import functools
from pathlib import Path
from typing import Annotated, Optional

import typer

from holdfast.cli.options import Config, Group, InitFrom, Name, Out, Overrides, Parent, Project


def run_command(
    config: Config,
    overrides: Overrides = None,
    name: Name = None,
    project: Project = "general",
    group: Group = "default",
    out: Out = Path("runs"),
    parent: Parent = None,
    init_from: InitFrom = None,
    coordinator: Annotated[
        Optional[str], typer.Option("--coordinator", help="HOST:PORT of process 0, where several processes work.")
    ] = None,
    processes: Annotated[
        Optional[int], typer.Option("--processes", help="How many; SLURM, Open MPI and Kubernetes tell it themselves.")
    ] = None,
    process_id: Annotated[Optional[int], typer.Option("--process-id", help="Which of them this is, from 0.")] = None,
) -> None:
    """Train. The same command again resumes; a finished run says so.

    Example: holdfast run my.yaml training.seed=1 --name first-try
    """
    from holdfast.cli.configs import read_run
    from holdfast.execution.processes import is_first, joined, membership, together

    with joined(membership(coordinator, processes, process_id)):
        with together():
            resolved = read_run(config, overrides or [], name or config.stem, project, group, parent, init_from)

        from holdfast.report import print_summary, write_report
        from holdfast.training.start import start_run

        code = start_run(
            resolved.job,
            resolved.cfg,
            name=name or config.stem,
            project=project,
            group=group,
            root=out,
            parent=parent,
            init_from=init_from,
            on_results=functools.partial(write_report, pictures=None),
        )
        if code == 0 and is_first():
            print_summary(out / project / group / (name or config.stem))
    raise typer.Exit(code)
