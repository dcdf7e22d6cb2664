"""Training: `prepare`, `run` and `launch`."""

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import Config, Group, InitFrom, Name, Out, Overrides, Parent, Project

if TYPE_CHECKING:
    from holdfast.data.shards import Shard
    from holdfast.training.resolve import ResolvedRun

Strict = Annotated[bool, typer.Option("--strict", help="Exit with 3 unless every budget (keep) is shown to be kept.")]


def prepare_command(
    config: Annotated[Path, typer.Argument(help="YAML config file.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …")] = None,
    shard: Annotated[
        Optional[str], typer.Option("--shard", help="I/N: only the share of job I of N; the last one joins them.")
    ] = None,
) -> None:
    """Read, tokenise and cache the datasets of a config.

    What is not there is downloaded; `run` does all of this too. Stores that are there are looked through for damage.

    Example: holdfast prepare my.yaml data.root=/data
    """
    from holdfast.cli.configs import read_config
    from holdfast.data.shards import Shard
    from holdfast.training.data import load_data

    own = None if shard is None else Shard.parse(shard)
    run = read_config(config, overrides or []).resolved()
    if own is not None:
        _prepare_share(run, own)
        return
    data = load_data(
        run.curriculum,
        run.options.data,
        run.tokenizer,
        evaluations=run.config.evaluations,
        measured=run.held_out,
        progress=True,
    )
    for rows in (*data.train.values(), *data.validation.values(), *data.measured.values()):
        rows.prepared.check()  # a store that is damaged somewhere is made again here
    for source, rows in data.train.items():
        held_out = data.validation[source]
        print(
            f"{source.name} ({source.style.name}): {rows.prepared.num_documents:,} documents, "
            f"{rows.prepared.num_tokens:,} tokens, {len(rows):,} rows; validation {len(held_out):,} rows; "
            f"{rows.loss_share:.1%} of the tokens count in the loss"
        )
    for name, rows in data.measured.items():
        print(
            f"{name} ({rows.style.name}), measured alone: {rows.prepared.num_documents:,} documents, {len(rows):,} rows"
        )
    for leak in data.leaks:
        print(f"leak: {leak}")


def _prepare_share(run: "ResolvedRun", shard: "Shard") -> None:
    from holdfast.training.data import prepare_share

    made = prepare_share(
        run.curriculum,
        run.options.data,
        run.tokenizer,
        shard,
        evaluations=run.config.evaluations,
        measured=run.held_out,
        progress=True,
    )
    for (name, split), store in made.items():
        whole = "its share is done" if store is None else f"all is there, {store.num_documents:,} documents"
        print(f"{name}/{split}: shard {shard}: {whole}")


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
    quiet: Annotated[bool, typer.Option("--quiet", help="No sentence and table at the end.")] = False,
    strict: Strict = False,
) -> None:
    """Train; the same command again resumes.

    A finished run says so. Exits with 3 where a budget (keep) was broken.

    Example: holdfast run my.yaml training.seed=1 --name first-try
    """
    from holdfast.cli.configs import read_run
    from holdfast.execution.processes import START_SECONDS, agreed, is_first, joined, membership, together

    place = membership(coordinator, processes, process_id)
    with joined(place, START_SECONDS if place is None else _start_timeout(config, overrides or [])):
        with together():
            run = read_run(config, overrides or [], name or config.stem, project, group, parent, init_from)

        from holdfast.evaluation.budgets import exit_code
        from holdfast.execution import ExecutionSpec
        from holdfast.report import print_outcome, write_report
        from holdfast.report.run_files import read_results
        from holdfast.training.run import start_run

        spec = ExecutionSpec(
            name=name or config.stem,
            project=project,
            group=group,
            root=out,
            parent=parent,
            init_from=init_from,
            on_results=functools.partial(write_report, pictures=None),
        )
        code = start_run(run, spec)
        if code == 0 and is_first() and not quiet:
            print_outcome(spec.run_dir)
        if code == 0 and run.curriculum.budgets:
            code = agreed(exit_code(read_results(spec.run_dir), strict=strict))
    raise typer.Exit(code)


def _start_timeout(config: Path, overrides: list[str]) -> float:
    """How long to wait for the other processes; what is wrong with a config is said once, when all are there."""
    from holdfast.cli.configs import read_config
    from holdfast.errors import UserError
    from holdfast.execution.processes import START_SECONDS

    try:
        return float(read_config(config, overrides).cfg.topology.start_timeout)
    except UserError:
        return START_SECONDS


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
    strict: Strict = False,
) -> None:
    """Train in several processes of this machine.

    One that dies ends all, and the same command goes on.

    Example: holdfast launch --processes 2 my.yaml topology.fsdp=2
    """
    from holdfast.cli.configs import read_run
    from holdfast.execution.launching import child_environment, free_port, run_all

    name = name or config.stem
    read_run(config, overrides or [], name, project, group, parent, init_from)
    plugins = (context.parent.params.get("plugin") if context.parent else None) or []
    command = [sys.executable, "-m", "holdfast", *(part for plugin in plugins for part in ("--plugin", plugin))]
    command += ["run", str(config), *(overrides or []), "--name", name, "--project", project, "--group", group]
    command += ["--out", str(out), *(["--strict"] if strict else [])]
    for option, value in (("--from", parent), ("--init-from", init_from)):
        command += [option, value] if value else []
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes), "--process-id"]
    code = run_all(
        [[*command, str(index)] for index in range(processes)],
        [child_environment(os.environ, index, processes, devices) for index in range(processes)],
    )
    raise typer.Exit(code)
