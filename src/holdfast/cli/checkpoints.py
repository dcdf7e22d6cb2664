"""`holdfast checkpoints`: what a run has kept."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def checkpoints_command(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """List the checkpoints of a run: step, tokens, stage, size, kept or rolling.

    Example: holdfast checkpoints runs/general/default/quickstart
    """
    from holdfast.errors import UserError
    from holdfast.execution.checkpoints import kept_steps, list_checkpoints

    if not run.is_dir():
        raise UserError(f"{run}: there is no such run folder")
    infos = list_checkpoints(run / "checkpoints")
    kept = kept_steps(infos, rolling=0) if infos else set()
    table = Table("step", "tokens", "stage", "size", "names", "kept")
    for info in infos:
        table.add_row(
            f"{info.step:,}",
            f"{info.manifest['tokens']:,}",
            str(info.manifest["stage"]),
            f"{info.num_bytes / 2**20:.1f} MiB",
            ", ".join(info.tags),
            "kept" if info.step in kept else "rolling",
        )
    Console().print(table)
