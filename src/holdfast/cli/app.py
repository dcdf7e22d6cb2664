"""The `holdfast` command: its commands, and how mistakes and failures end."""

import sys
from collections.abc import Callable
from typing import Annotated, List, Optional

import typer

from holdfast.cli.average import average_command
from holdfast.cli.bisect import bisect_command
from holdfast.cli.cluster import app as queue_app
from holdfast.cli.cluster import submit_command
from holdfast.cli.configure import configure_command, jobs_command
from holdfast.cli.data import app as data_app
from holdfast.cli.diff import diff_command
from holdfast.cli.eval import eval_command
from holdfast.cli.generate import generate_command
from holdfast.cli.keep import keep_command
from holdfast.cli.look import (
    board_command,
    checkpoints_command,
    compare_command,
    forgotten_command,
    report_command,
    show_command,
)
from holdfast.cli.models import export_command, import_command
from holdfast.cli.plan import plan_command
from holdfast.cli.profile import profile_command, selftest_command
from holdfast.cli.quickstart import quickstart_command
from holdfast.cli.run import launch_command, prepare_command, run_command
from holdfast.cli.study import app as study_app
from holdfast.cli.tokenizer import app as tokenizer_app
from holdfast.cli.verdict import verdict_command
from holdfast.errors import RunError, UserError
from holdfast.execution.storage import failed_line

app = typer.Typer(
    name="holdfast",
    help="Train language models through a curriculum of datasets without losing what the first ones taught.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from holdfast import __version__

        typer.echo(f"holdfast {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    plugin: Annotated[
        Optional[List[str]],
        typer.Option("--plugin", help="Module of your own that registers datasets, evaluations, …; repeatable."),
    ] = None,
    version: Annotated[  # noqa: ARG001 (its callback answers)
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    from holdfast.registry import load_plugins

    load_plugins(plugin or [])


COMMANDS: dict[str, Callable[..., None]] = {
    "quickstart": quickstart_command,
    "keep": keep_command,
    "jobs": jobs_command,
    "configure": configure_command,
    "plan": plan_command,
    "prepare": prepare_command,
    "run": run_command,
    "profile": profile_command,
    "selftest": selftest_command,
    "launch": launch_command,
    "submit": submit_command,
    "checkpoints": checkpoints_command,
    "show": show_command,
    "eval": eval_command,
    "generate": generate_command,
    "forgotten": forgotten_command,
    "diff": diff_command,
    "bisect": bisect_command,
    "average": average_command,
    "report": report_command,
    "compare": compare_command,
    "verdict": verdict_command,
    "board": board_command,
    "import": import_command,
    "export": export_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(study_app, name="study")
app.add_typer(queue_app, name="queue")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2, a failed run exit code 1."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        line = failed_line(error)
        if line is None:
            raise
        print(line, file=sys.stderr)
        sys.exit(1)
