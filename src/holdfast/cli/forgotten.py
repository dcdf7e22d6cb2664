"""`holdfast forgotten`: the examples that a run knew and lost."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from holdfast.evaluation.results import Forgotten


def forgotten_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    task: Annotated[str, typer.Option("--task", help="Name of an evaluation of the run.")],
    known: Annotated[
        Optional[str], typer.Option("--known", help="Stage (name or number) after which it was known; the best one.")
    ] = None,
    lost: Annotated[
        Optional[str], typer.Option("--lost", help="Stage (name or number) after which it is lost; the last one.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Examples to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="All of them, as JSON lines.")] = False,
) -> None:
    """List examples that were right after one stage and wrong after another, with their texts.

    Example: holdfast forgotten runs/general/default/quickstart --task arithmetic --known 3 --lost 4
    """
    from holdfast.evaluation.results import forgotten, step_after

    steps = [None if stage is None else step_after(run, stage) for stage in (known, lost)]
    found = forgotten(run, task, *steps)
    if as_json:
        for each in found.lost:
            print(json.dumps({name: dataclasses.asdict(value) for name, value in each._asdict().items()}))
        return
    _show(found, limit)


def _show(found: "Forgotten", limit: int) -> None:
    console = Console(highlight=False)
    for each in found.lost[:limit]:
        if each.before.id != each.before.prompt:
            console.print(f"[dim]{escape(each.before.id)}[/dim]")
        console.print(escape(each.before.prompt), end="")
        console.print(
            f"[green]{escape(each.before.answer)}[/green]  now: [red]{escape(each.after.chosen or '')}[/red]\n"
        )
    console.print(
        f"{found.task}: {len(found.lost)} of {found.num_known} examples that were right at step {found.known_step:,} "
        f"are wrong at step {found.lost_step:,}"
    )
    if len(found.lost) > limit:
        console.print(f"{limit} are shown; --limit shows more")
