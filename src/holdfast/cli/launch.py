"""`holdfast launch`: `run` in several processes of this machine."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Config, Group, InitFrom, Name, Out, Overrides, Parent, Project


def launch_command(
    context: typer.Context,
    config: Config,
    processes: Annotated[int, typer.Option("--processes", help="How many processes to start.", min=1)],
    overrides: Overrides = None,
    devices: Annotated[
        int, typer.Option("--devices-per-process", help="GPUs of each process, or virtual devices of a CPU.", min=1)
    ] = 1,
    name: Name = None,
    project: Project = "general",
    group: Group = "default",
    out: Out = Path("runs"),
    parent: Parent = None,
    init_from: InitFrom = None,
) -> None:
    """Train in several processes of this machine; one that dies ends all, and the same command goes on.

    Example: holdfast launch --processes 2 my.yaml topology.fsdp=2
    """
    from holdfast.cli.configs import read_run
    from holdfast.execution.launching import child_environment, free_port, run_all

    name = name or config.stem
    read_run(config, overrides or [], name, project, group, parent, init_from)
    plugins = (context.parent.params.get("plugin") if context.parent else None) or []
    command = [sys.executable, "-m", "holdfast", *(part for plugin in plugins for part in ("--plugin", plugin))]
    command += ["run", str(config), *(overrides or []), "--name", name, "--project", project, "--group", group]
    command += ["--out", str(out)]
    for option, value in (("--from", parent), ("--init-from", init_from)):
        command += [option, value] if value else []
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes), "--process-id"]
    code = run_all(
        [[*command, str(index)] for index in range(processes)],
        [child_environment(os.environ, index, processes, devices) for index in range(processes)],
    )
    raise typer.Exit(code)
