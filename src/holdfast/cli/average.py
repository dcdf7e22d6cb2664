"""`holdfast average`: what lies between two checkpoints."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

if TYPE_CHECKING:
    from holdfast.analysis.interpolation import Interpolator
    from holdfast.evaluation.interpolations import Interpolations

BEST = "best"


def average_command(
    first: Annotated[str, typer.Argument(help="RUN@CHECKPOINT at alpha 0, such as RUN@boundary_1.")],
    second: Annotated[str, typer.Argument(help="RUN@CHECKPOINT at alpha 1, such as RUN@final; may be another run.")],
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value of the second's run, such as eval.limit=100.")
    ] = None,
    alphas: Annotated[
        str, typer.Option("--alphas", help="Shares of the second, from 0 to 1, with commas.")
    ] = "0,0.1,...,1",
    tasks: Annotated[
        Optional[str], typer.Option("--tasks", help="Evaluations and datasets, with commas; all of the run's.")
    ] = None,
    measure: Annotated[
        Optional[str],
        typer.Option("--measure", help="What is judged by: bits_per_byte, accuracy or nll; the first that all have."),
    ] = None,
    out: Annotated[
        Optional[Path], typer.Option("--out", help="Folder for figures and picture; RUN/averages/… of the second.")
    ] = None,
    save: Annotated[
        Optional[Path], typer.Option("--save", help="New run folder for the weights of one alpha (see --at).")
    ] = None,
    at: Annotated[str, typer.Option("--at", help="The alpha to save, or best.")] = BEST,
    lines: Annotated[
        Optional[float],
        typer.Option(
            "--lines",
            min=0,
            max=1,
            help="LiNeS: alpha is scaled from this in the first layer, and outside the layers, to 1 in the last.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """Average the weights of two checkpoints.

    Shows what is kept of the old and learned of the new at each share of the second.

    The same command again evaluates only what is missing. A saved average is a run: compare, eval, generate and
    export take it, and a new run starts from it with --init-from.

    With --lines 0.5 the layers near the input, which hold most of the old, take half the step that the last one takes;
    embeddings, final norm and head stand outside the layers and take the first one's. Choose it on other data.

    Example: holdfast average RUN@boundary_1 RUN@final --alphas 0,0.1,...,1 --save runs/general/default/averaged
    """
    from holdfast.errors import UserError
    from holdfast.evaluation.interpolations import JUDGING, alpha_of, parse_alphas

    wanted = parse_alphas(alphas)
    picked = None if at == BEST else alpha_of(at)
    if measure is not None and measure not in JUDGING:
        raise UserError(f"--measure {measure}: expected one of {', '.join(JUDGING)}")
    interpolator, folder = _open(first, second, overrides or [], tasks, out, save, lines)
    if save is not None and picked is not None:
        wanted = (*wanted, picked)
    found = interpolator.evaluate(wanted, folder, measure, _silent if as_json else print)
    _show(found, folder, as_json)
    if save is not None:
        _save(interpolator, found, save, picked)


def _open(
    first: str,
    second: str,
    overrides: list[str],
    tasks: str | None,
    out: Path | None,
    save: Path | None,
    lines: float | None,
) -> "tuple[Interpolator, Path]":
    """The two checkpoints, and the folder of their figures; what cannot be is refused before weights are read."""
    from holdfast.execution.checkpoints import named_checkpoint

    for name in (first, second):
        named_checkpoint(name)

    from holdfast.analysis.interpolation import Interpolator, default_folder, saved_interpolation
    from holdfast.models.pretrained.write import check_free

    if save is not None and saved_interpolation(save) is None:
        check_free(save)
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    return Interpolator(first, second, overrides, names, lines), out or default_folder(first, second, lines)


def _show(found: "Interpolations", folder: Path, as_json: bool) -> None:
    from holdfast.report.interpolation import print_interpolations, write_interpolations

    page = write_interpolations(found, folder)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_interpolations(found)
        print(page)


def _save(interpolator: "Interpolator", found: "Interpolations", folder: Path, picked: float | None) -> None:
    from holdfast.errors import UserError

    judged = found.judged_by()
    alpha = picked if picked is not None else found.best(judged) if judged else None
    if alpha is None:
        raise UserError(
            "--at best: no measure that all tasks have, so nothing is best; name an alpha, such as --at 0.5"
        )
    done = interpolator.save(alpha, folder, BEST if picked is None else f"{alpha:g}")
    print(f"{folder}: alpha {alpha:g}" + ("" if done else ", saved before"), file=sys.stderr)


def _silent(_line: str) -> None:
    pass
