"""`holdfast board`: all runs below a folder, live, on a local page."""

from pathlib import Path
from typing import Annotated

import typer


def board_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs.")] = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", help="Port on the loopback address; 0 takes a free one.", min=0)
    ] = 8765,
) -> None:
    """Serve a page that lists all runs with their live state, opens their reports and compares ticked ones.

    Read-only, for this machine alone.

    Example: holdfast board runs
    """
    from holdfast.report.board import serve

    serve(folder, port, typer.echo)
