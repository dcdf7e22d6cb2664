"""`holdfast average`: what lies between two checkpoints."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

if TYPE_CHECKING:
    from holdfast.evaluation.averages import Averages
    from holdfast.training.average import Averager

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
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """Average the weights of two checkpoints and see what is kept of the old and learned of the new.

    The same command again evaluates only what is missing. A saved average is a run: compare, eval, generate and
    export take it, and a new run starts from it with --init-from.

    Example: holdfast average RUN@boundary_1 RUN@final --alphas 0,0.1,...,1 --save runs/general/default/averaged
    """
    from holdfast.errors import UserError
    from holdfast.evaluation.averages import JUDGING, alpha_of, parse_alphas

    wanted = parse_alphas(alphas)
    picked = None if at == BEST else alpha_of(at)
    if measure is not None and measure not in JUDGING:
        raise UserError(f"--measure {measure}: expected one of {', '.join(JUDGING)}")
    averager, folder = _open(first, second, overrides or [], tasks, out, save)

    from holdfast.report.average import print_averages, write_averages

    if save is not None and picked is not None:
        wanted = (*wanted, picked)
    found = averager.evaluate(wanted, folder, measure, _silent if as_json else print)
    page = write_averages(found, folder)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_averages(found)
        print(page)
    if save is not None:
        _save(averager, found, save, picked)


def _open(
    first: str, second: str, overrides: list[str], tasks: str | None, out: Path | None, save: Path | None
) -> "tuple[Averager, Path]":
    """The two checkpoints, and the folder of their figures; what cannot be is refused before weights are read."""
    from holdfast.execution.checkpoints import named_checkpoint

    for name in (first, second):
        named_checkpoint(name)

    from holdfast.models.pretrained.write import check_free
    from holdfast.training.average import Averager, default_folder, saved_average

    if save is not None and saved_average(save) is None:
        check_free(save)
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    return Averager(first, second, overrides, names), out or default_folder(first, second)


def _save(averager: "Averager", found: "Averages", folder: Path, picked: float | None) -> None:
    from holdfast.errors import UserError

    judged = found.judged_by()
    alpha = picked if picked is not None else found.best(judged) if judged else None
    if alpha is None:
        raise UserError(
            "--at best: no measure that all tasks have, so nothing is best; name an alpha, such as --at 0.5"
        )
    done = averager.save(alpha, folder, BEST if picked is None else f"{alpha:g}")
    print(f"{folder}: alpha {alpha:g}" + ("" if done else ", saved before"), file=sys.stderr)


def _silent(_line: str) -> None:
    pass
