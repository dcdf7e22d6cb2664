"""`holdfast report`: the page of a run."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    pictures: Annotated[bool, typer.Option(help="Also write each picture as SVG and PNG below figures/.")] = True,
) -> None:
    """Write report.html, one page that needs nothing else, and the pictures as files for papers.

    Example: holdfast report runs/general/default/quickstart
    """
    from holdfast.report import write_report

    path = write_report(run, pictures=pictures)
    typer.echo(str(path))
    if pictures:
        typer.echo(str(path.parent / "figures"))
