"""The `holdfast` command: its commands, and how mistakes and failures end."""

import sys
from collections.abc import Callable
from typing import Annotated, List, Optional

import typer

from holdfast.cli.average import average_command
from holdfast.cli.board import board_command
from holdfast.cli.checkpoints import checkpoints_command
from holdfast.cli.compare import compare_command
from holdfast.cli.configure import configure_command
from holdfast.cli.data import app as data_app
from holdfast.cli.eval import eval_command
from holdfast.cli.export import export_command
from holdfast.cli.forgotten import forgotten_command
from holdfast.cli.generate import generate_command
from holdfast.cli.import_ import import_command
from holdfast.cli.jobs import jobs_command
from holdfast.cli.launch import launch_command
from holdfast.cli.plan import plan_command
from holdfast.cli.prepare import prepare_command
from holdfast.cli.profile import profile_command
from holdfast.cli.queue import app as queue_app
from holdfast.cli.report import report_command
from holdfast.cli.run import run_command
from holdfast.cli.show import show_command
from holdfast.cli.submit import submit_command
from holdfast.cli.tokenizer import app as tokenizer_app
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


@app.callback()
def _options(
    plugin: Annotated[
        Optional[List[str]],
        typer.Option("--plugin", help="Module of your own that registers datasets, evaluations, …; repeatable."),
    ] = None,
) -> None:
    from holdfast.registry import load_plugins

    load_plugins(plugin or [])


COMMANDS: dict[str, Callable[..., None]] = {
    "jobs": jobs_command,
    "configure": configure_command,
    "plan": plan_command,
    "prepare": prepare_command,
    "run": run_command,
    "profile": profile_command,
    "launch": launch_command,
    "submit": submit_command,
    "checkpoints": checkpoints_command,
    "show": show_command,
    "eval": eval_command,
    "generate": generate_command,
    "forgotten": forgotten_command,
    "average": average_command,
    "report": report_command,
    "compare": compare_command,
    "board": board_command,
    "import": import_command,
    "export": export_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
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
