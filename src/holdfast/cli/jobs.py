"""`holdfast jobs`: what there is to choose from."""

from rich.console import Console
from rich.table import Table

from holdfast import registry


def jobs_command() -> None:
    """List jobs, datasets, evaluations, optimizers, schedules, models, penalties and trackers.

    Example: holdfast jobs
    """
    console = Console(highlight=False)
    for kind, plugins in registry.KINDS.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name in plugins:
            table.add_row(name, plugins.help(name))
        console.print(table)
        console.print()
