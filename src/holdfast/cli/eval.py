"""`holdfast eval`: a checkpoint of a run, evaluated."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Optional

import typer

from holdfast.cli.options import run_and_checkpoints
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.evaluation.results import TaskResult
    from holdfast.training.base import Trainer


def eval_command(
    run: Annotated[str, typer.Argument(help="RUN or RUN@CHECKPOINT (latest, a step, boundary_1, best_0, final).")],
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value, such as eval.kind=generate eval.limit=100.")
    ] = None,
    checkpoint: Annotated[Optional[str], typer.Option("--checkpoint", help="The same as RUN@CHECKPOINT.")] = None,
    tasks: Annotated[
        Optional[str], typer.Option("--tasks", help="Evaluations and datasets, with commas; all of the run's.")
    ] = None,
    harness: Annotated[
        Optional[str], typer.Option("--harness", help="Tasks of lm-evaluation-harness instead, with commas.")
    ] = None,
    harness_tasks: Annotated[
        Optional[Path], typer.Option("--harness-tasks", help="Folder with task definitions for the harness.")
    ] = None,
    out: Annotated[Optional[Path], typer.Option("--out", help="Folder for TASK.jsonl with every example.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (training/ema) instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint of a run.

    Accuracies with chance and interval, held-out losses, divergence from the reference. What cannot be evaluated
    because its data is not here is named and left out.

    Example: holdfast eval runs/general/default/quickstart@boundary_1 --tasks arithmetic,lists
    """
    from holdfast.errors import UserError
    from holdfast.evaluation.results import write_examples
    from holdfast.training.runs import open_run
    from holdfast.training.weights import no_ema

    if harness is not None and (tasks is not None or out is not None):
        raise UserError("--harness: --tasks and --out are of our own evaluations; leave them out, or --harness")
    folder, names = run_and_checkpoints(str(run), [checkpoint] if checkpoint else [])
    if len(names) > 1:
        raise UserError(f"{run}: eval takes one checkpoint at a time")
    trainer = open_run(folder, overrides).trainer(*names)
    if ema:
        average = trainer.state.ema_params()
        if average is None:
            raise no_ema(folder)
        trainer.state = trainer.state.replace(params=average)
    if harness is not None:
        results = _harness(trainer, _names(harness), harness_tasks)
        print(json.dumps(results, indent=1, default=str))
        return
    asked = None if tasks is None else _names(tasks)
    found, missing = _evaluate(trainer, asked)
    missing += [f"{name}: {result.failed}" for name, result in found.items() if result.failed is not None]
    found = {name: result for name, result in found.items() if result.failed is None}
    if out is not None:
        write_examples(out, found)
    if as_json:
        print(json.dumps({name: _record(result) for name, result in found.items()}, indent=1))
    elif found:
        _print_table(found)
    if missing and (asked is not None or not found):
        raise UserError("\n".join(missing))
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _evaluate(trainer: "Trainer", names: list[str] | None) -> "tuple[dict[str, TaskResult], list[str]]":
    """Evaluate what the run has, or what is named; also what was left out because its data is missing, and why."""
    from holdfast.training.results import chosen_evaluator

    params, reference = trainer.state.params, trainer.state.reference_params()
    own = trainer.evaluator() if trainer.resolved.overrides_evaluator else None
    if own is not None:
        tasks, datasets = ([n for n in known if names is None or n in names] for known in (own.tasks, own.rows))
        return own.evaluate(params, reference, tasks=tasks, datasets=datasets), []
    missing: list[str] = []
    evaluator = chosen_evaluator(trainer.resolved, trainer.topology, names, missing.append)
    # A dataset that is also an evaluation is missing twice, for one reason.
    return evaluator.evaluate(params, reference), list(dict.fromkeys(missing))


def _harness(trainer: Any, tasks: list[str], folder: Path | None) -> Json:
    from holdfast.evaluation.forward import Runner
    from holdfast.evaluation.harness import HarnessModel, run_harness

    run = trainer.resolved
    evaluation = run.options.evaluation
    runner: Runner = Runner(run.model, trainer.topology)
    model = HarnessModel(runner, trainer.state.params, run.tokenizer, evaluation.batch_size)
    if folder is None and evaluation.harness_include_path is not None:
        folder = Path(evaluation.harness_include_path).expanduser()
    few = evaluation.harness_num_fewshot
    results = run_harness(model, tasks, limit=evaluation.limit, num_fewshot=few, include_path=folder)
    return dict(results["results"])


def _record(result: "TaskResult") -> Json:
    from holdfast.evaluation.matrix import finite

    record: Json = {
        "measures": {name: finite(value) for name, value in result.measures.items()},
        "intervals": {name: list(ends) for name, ends in result.intervals.items()},
        "rows": result.num_rows,
        "tokens": result.num_tokens,
    }
    return record | result.facts() if result.accuracy is not None else record


def _print_table(results: "Mapping[str, TaskResult]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("task", "accuracy", "chance", "majority", "bits/byte", "nll", "KL fwd", "KL rev"):
        table.add_column(title, no_wrap=True)
    for name, result in results.items():
        accuracy = _number(result.accuracy, 3)
        if "accuracy" in result.intervals:
            accuracy += "\n{:.3f}–{:.3f}".format(*result.intervals["accuracy"])
        if result.one_class:
            accuracy += "\nall one answer"
        table.add_row(
            Text(name),
            accuracy,
            _number(result.chance, 3),
            _number(result.majority, 3),
            *(_number(result.measures[measure], 3) for measure in ("bits_per_byte", "nll", "kl_forward", "kl_reverse")),
        )
    Console(highlight=False).print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
