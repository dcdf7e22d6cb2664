"""`holdfast compare`: runs beside each other."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer


def compare_command(
    runs: Annotated[List[str], typer.Argument(help="Folders of runs, or globs such as 'runs/general/*/*'.")],
    html: Annotated[Path, typer.Option("--html", help="Where the page goes.")] = Path("compare.html"),
    csv: Annotated[Optional[Path], typer.Option("--csv", help="Also write all numbers as tidy rows.")] = None,
    latex: Annotated[Optional[Path], typer.Option("--latex", help="Also write the metrics as a LaTeX table.")] = None,
) -> None:
    """Compare runs: what differs, metrics side by side, matrices, curves, learned new against kept old.

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
