"""`holdfast verdict`: what can be said of a study's arms, and how sure it is."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, Tuple

import typer

from holdfast.cli.options import Out, table
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.studies.results import Row
    from holdfast.studies.verdict import Judgement

WIDTH = 160  # of a file or a log, where no terminal has one


def verdict_command(
    study: Annotated[Path, typer.Argument(help="Folder or YAML file of a study, or a CSV file from elsewhere.")],
    out: Out = Path("runs"),
    html: Annotated[Optional[Path], typer.Option("--html", help="Also write a page that needs nothing else.")] = None,
    csv: Annotated[Optional[Path], typer.Option("--csv", help="Also write all figures as rows.")] = None,
    latex: Annotated[Optional[Path], typer.Option("--latex", help="Also write the tables for a paper.")] = None,
    svg: Annotated[Optional[Path], typer.Option("--svg", help="Also write the picture of the primary outcome.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead.")] = False,
    select: Annotated[
        Optional[str], typer.Option("--select", help="Seeds to choose configurations on, such as 0,1; others judge.")
    ] = None,
    margin: Annotated[
        Optional[float], typer.Option("--margin", help="On the new loss; 1 % of what plain learns.", min=0.0)
    ] = None,
    base_rate: Annotated[
        Optional[float], typer.Option("--base-rate", help="Learning rate that others are multiples of.")
    ] = None,
    pair: Annotated[
        Optional[Tuple[str, str]],
        typer.Option("--pair", help="Compare two arms with each other instead; plain@0.003 is plain at a rate."),
    ] = None,
    resample: Annotated[
        int, typer.Option("--resample", help="With --pair: how often to swap the two names at random.", min=0)
    ] = 0,
) -> None:
    """Judge ways to train against plain training.

    In words, as a table, as a page; the columns of a file from elsewhere are arm, seed, learning_rate, old, new, and
    optionally strength, task, steps, document. The arm plain is what the others are judged by.

    Example: holdfast verdict results.csv --html verdict.html
    """
    from holdfast.studies.results import read_results, results_file
    from holdfast.studies.verdict import judge_rows
    from holdfast.studies.words import to_json

    files = {"html": html, "csv": csv, "latex": latex, "svg": svg}
    path = results_file(study, out)
    _check_files(path, files)
    _check_pair(pair is not None, resample, {**files, "select": select, "base-rate": base_rate})
    if base_rate is not None and not 0 < base_rate < float("inf"):
        raise UserError(f"--base-rate: got {base_rate:g}, expected a learning rate above 0")
    if margin is not None and not margin < float("inf"):
        raise UserError(f"--margin: got {margin:g}, expected a loss of at least 0")
    rows = read_results(path)
    if pair is not None:
        _pair(path, rows, pair, resample, margin, as_json)
        return
    try:
        found = judge_rows(rows, selection=_seeds(select), margin=margin, base_rate=base_rate)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=1, allow_nan=False, ensure_ascii=False))
    else:
        _print(found)
    written = _write(found, study, files)
    for each in written:
        typer.echo(str(each), err=as_json)


def _check_files(results: Path, files: dict[str, Path | None]) -> None:
    """Refuse a target that is a folder, or the results themselves, before anything is computed."""
    for kind, path in files.items():
        if path is not None and (path.is_dir() or path.resolve() == results.resolve()):
            told = "a folder" if path.is_dir() else "the file of results"
            raise UserError(f"--{kind}: {path} is {told}; expected the name of a file to be written")


def _check_pair(pair: bool, resample: int, others: dict[str, object]) -> None:
    """Refuse options that would be left without effect."""
    if resample and not pair:
        raise UserError("--resample: expected --pair beside it, the two names that are swapped")
    for name, value in others.items():
        if pair and value is not None:
            raise UserError(f"--{name}: not with --pair, which prints one comparison; leave one of them out")


def _seeds(text: str | None) -> list[int]:
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--select: got {text!r}, expected seeds with commas between them, such as 0,1") from None


def _print(found: "Judgement") -> None:
    import sys

    from rich.console import Console
    from rich.text import Text

    from holdfast.report.verdict_tables import HEAD, arm_rows, beside_rows, plain_rows
    from holdfast.studies.words import counted, plain_words, sentence

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(Text(sentence(found)))
    for outcome in found.outcomes:
        if outcome is not found.outcomes[0]:
            console.print(Text(f"{outcome.name}: {sentence(found, outcome)}"))
    for outcome in found.outcomes:
        console.print(table(HEAD, arm_rows(found, outcome), title=f"{outcome.name}, {outcome.unit}"))
        console.print(table(("plain", "new", "old", ""), plain_rows(found, outcome)))
    head, rows = beside_rows(found)
    if rows:
        console.print(table(head, rows, title="cost"))
    size = f"{counted(len(found.measured.seeds), 'seed')}, {counted(found.measured.runs, 'run')}"
    notes = [
        f"δ = {found.margin:.3g} ({found.margin_source}); {size}",
        *plain_words(found),
        *found.notes,
    ]
    for note in notes:
        console.print(Text(f"- {note}"))


def _write(found: "Judgement", study: Path, asked: dict[str, Path | None]) -> list[Path]:
    """Write the files that were asked for."""
    from holdfast.execution.files import write_atomically
    from holdfast.report import verdict_page, verdict_tables
    from holdfast.report.drawing.svg import draw

    title = f"Verdict: {study.resolve().name if study.is_dir() else study.stem}"
    makers = {
        "html": lambda: verdict_page.render(found, title),
        "csv": lambda: verdict_tables.to_csv(found),
        "latex": lambda: verdict_tables.to_latex(found),
        "svg": lambda: draw(verdict_page.chart(found, found.outcomes[0]), alone=True),
    }
    written = []
    for kind, path in asked.items():
        if path is not None:
            write_atomically(path, makers[kind]())
            written.append(path)
    return written


def _pair(
    path: Path, rows: list["Row"], pair: tuple[str, str], resample: int, margin: float | None, as_json: bool
) -> None:
    """Two arms with each other, seed by seed."""
    from holdfast.studies.pairs import compare_pair, resampled

    try:
        found = compare_pair(rows, *pair, margin=margin)
        counts = resampled(rows, *pair, times=resample, margin=margin) if resample else {}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if as_json:
        typer.echo(json.dumps({**found.to_json(), "resampled": counts}, indent=1, allow_nan=False, ensure_ascii=False))
        return
    typer.echo(found.words())
    if counts:
        typer.echo(f"{resample} resamplings: " + ", ".join(f"{word} {count}" for word, count in counts.items()))
