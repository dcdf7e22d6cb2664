"""`holdfast show`: a run on the terminal, also while it is in progress."""

from pathlib import Path
from typing import Annotated

import typer


def show_command(run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")]) -> None:
    """Show what was learned and forgotten so far: one sentence, the score matrix, its metrics.

    Example: holdfast show runs/general/default/quickstart
    """
    from holdfast.report import print_summary

    print_summary(run)
