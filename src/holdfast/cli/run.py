"""`holdfast run`: train, and go on where an earlier process stopped."""

import functools
from pathlib import Path
from typing import Annotated, List, Optional

import typer


def run_command(
    config: Annotated[Path, typer.Argument(help="YAML config file.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …, such as training.seed=1")] = None,
    name: Annotated[Optional[str], typer.Option("--name", help="Name of the run; the config's file name.")] = None,
    project: Annotated[str, typer.Option("--project", help="Folder above the group.")] = "general",
    group: Annotated[str, typer.Option("--group", help="Folder above the run.")] = "default",
    out: Annotated[Path, typer.Option("--out", help="Folder of all runs.")] = Path("runs"),
    parent: Annotated[
        Optional[str], typer.Option("--from", help="RUN@CHECKPOINT whose past this new run shares (a branch).")
    ] = None,
    init_from: Annotated[
        Optional[str], typer.Option("--init-from", help="RUN[@CHECKPOINT] whose weights alone this run starts from.")
    ] = None,
) -> None:
    """Train. The same command again resumes; a finished run says so.

    Example: holdfast run my.yaml training.seed=1 --name first-try
    """
    from holdfast.cli.configs import read_config
    from holdfast.errors import UserError
    from holdfast.execution.names import check_name

    if parent and init_from:
        raise UserError("--from and --init-from: choose one, a shared past or the weights alone")
    for value, option in ((name or config.stem, "--name"), (project, "--project"), (group, "--group")):
        check_name(value, option)
    resolved = read_config(config, overrides or [])

    from holdfast.training.check import checked

    checked(resolved.job, resolved.cfg)

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
    if code == 0:
        print_summary(out / project / group / (name or config.stem))
    raise typer.Exit(code)
