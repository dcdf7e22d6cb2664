"""Looking at runs: `show`, `report`, `compare`, `board`, `checkpoints`, `forgotten`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import table

if TYPE_CHECKING:
    from holdfast.evaluation.results import Forgotten


def show_command(run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")]) -> None:
    """Show what was learned and forgotten so far.

    One sentence, the score matrix, its metrics.

    Example: holdfast show runs/general/default/quickstart
    """
    from holdfast.report import print_summary, readable

    with readable(run):
        print_summary(run)


def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    pictures: Annotated[bool, typer.Option(help="Also write each picture as SVG and PNG below figures/.")] = True,
) -> None:
    """Write the page of a run and its pictures as files.

    report.html is one page that needs nothing else; the pictures are for papers.

    Example: holdfast report runs/general/default/quickstart
    """
    from holdfast.report import readable, write_report

    with readable(run):
        path = write_report(run, pictures=pictures)
    typer.echo(str(path))
    if pictures:
        typer.echo(str(path.parent / "figures"))


def compare_command(
    runs: Annotated[List[str], typer.Argument(help="Folders of runs, or globs such as 'runs/general/*/*'.")],
    html: Annotated[Path, typer.Option("--html", help="Where the page goes.")] = Path("compare.html"),
    csv: Annotated[Optional[Path], typer.Option("--csv", help="Also write all numbers as tidy rows.")] = None,
    latex: Annotated[Optional[Path], typer.Option("--latex", help="Also write the metrics as a LaTeX table.")] = None,
) -> None:
    """Compare runs, side by side, with a page.

    What differs, metrics, matrices, curves, learned new against kept old.

    Example: holdfast compare 'runs/general/default/*' --csv out.csv --latex out.tex
    """
    from holdfast.report import compare

    found = compare.compare(runs)
    compare.print_comparison(found)
    typer.echo(str(compare.write_page(found, html)))
    if csv is not None:
        compare.write_csv(found, csv)
        typer.echo(str(csv))
    if latex is not None:
        compare.write_latex(found, latex)
        typer.echo(str(latex))


def board_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs.")] = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8765,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; one that others can reach asks for a token.")
    ] = "127.0.0.1",
) -> None:
    """Serve a local page of all runs and their live state.

    It overlays curves, opens reports and compares ticked runs. Read-only, for this machine unless --host says else.

    Example: holdfast board runs
    """
    from holdfast.errors import require_package

    require_package("starlette", "board", "holdfast board")
    require_package("uvicorn", "board", "holdfast board")
    from holdfast.report.board import serve

    serve(folder, port, typer.echo, host)


def checkpoints_command(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """List the checkpoints of a run.

    Step, tokens, stage, size, names, and whether it is kept or rolling.

    Example: holdfast checkpoints runs/general/default/quickstart
    """
    from rich.console import Console

    from holdfast.errors import UserError
    from holdfast.execution.checkpoints import current_names, kept_steps, list_checkpoints

    if not run.is_dir():
        raise UserError(f"{run}: there is no such run folder")
    infos = list_checkpoints(run / "checkpoints")
    kept = kept_steps(infos, rolling=0) if infos else set()
    names = current_names(infos)
    rows = [
        (
            f"{info.step:,}",
            f"{info.manifest['tokens']:,}",
            str(info.manifest["stage"]),
            f"{info.num_bytes / 2**20:.1f} MiB",
            ", ".join(names[info.step]),
            "kept" if info.step in kept else "rolling",
        )
        for info in infos
    ]
    Console(highlight=False).print(table(("step", "tokens", "stage", "size", "names", "kept"), rows))


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
    """List examples that were right once and are wrong now.

    Right after one stage and wrong after another, with their texts.

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
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for each in found.lost[:limit]:
        if each.before.id != each.before.prompt:
            console.print(f"[dim]{escape(each.before.id)}[/dim]")
        console.print(escape(each.before.prompt), end="")
        console.print(
            f"[green]{escape(each.before.answer)}[/green]  now: [red]{escape(each.after.chosen or '')}[/red]\n"
        )
    console.print(
        f"{escape(found.task)}: {len(found.lost)} of {found.num_known} examples that were right at step "
        f"{found.known_step:,} are wrong at step {found.lost_step:,}"
    )
    if len(found.lost) > limit:
        console.print(f"{limit} are shown; --limit shows more")
