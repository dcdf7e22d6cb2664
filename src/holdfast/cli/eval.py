"""`holdfast eval`: a checkpoint of a run, evaluated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Optional

import typer

if TYPE_CHECKING:
    from holdfast.evaluation.results import TaskResult


def eval_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value, such as eval.kind=generate eval.limit=100.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="latest, a step, boundary_1, best_0, final.")
    ] = "latest",
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
    """Evaluate a checkpoint: accuracies with chance and interval, held-out losses, divergence from the reference.

    Example: holdfast eval runs/general/default/quickstart --checkpoint boundary_1 --tasks arithmetic,lists
    """
    from holdfast.errors import UserError
    from holdfast.evaluation.results import write_examples
    from holdfast.training.runs import open_run
    from holdfast.training.weights import no_average

    if harness is not None and (tasks is not None or out is not None):
        raise UserError("--harness: --tasks and --out are of our own evaluations; leave them out, or --harness")
    opened = open_run(run, overrides)
    trainer = opened.trainer(checkpoint)
    if ema:
        average = trainer.state.ema_params()
        if average is None:
            raise no_average(run)
        trainer.state = trainer.state.replace(params=average)
    if harness is not None:
        results = _harness(trainer, _names(harness), harness_tasks)
        print(json.dumps(results, indent=1, default=str))
        return
    found = _evaluate(trainer, None if tasks is None else _names(tasks))
    if out is not None:
        write_examples(out, found)
    if as_json:
        print(json.dumps({name: _record(result) for name, result in found.items()}, indent=1))
    else:
        _print_table(found)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _evaluate(trainer: Any, names: list[str] | None) -> "dict[str, TaskResult]":
    """Evaluate what the run has, or what is named."""
    from holdfast.training.measure import chosen_evaluator
    from holdfast.training.state import KLDivergenceTrainState

    reference = trainer.state.reference_params() if isinstance(trainer.state, KLDivergenceTrainState) else None
    return chosen_evaluator(trainer, names).evaluate(trainer.state.params, reference)


def _harness(trainer: Any, tasks: list[str], folder: Path | None) -> dict[str, Any]:
    from holdfast.evaluation.forward import Runner
    from holdfast.evaluation.harness import HarnessModel, run_harness
    from holdfast.models.decoder import Decoder

    evaluation = trainer.settings.evaluation
    runner: Runner[Any] = Runner(Decoder(trainer.model_spec), trainer.model_spec, trainer.topology)
    model = HarnessModel(runner, trainer.state.params, trainer.tokenizer, evaluation.batch_size)
    results = run_harness(model, tasks, limit=evaluation.limit, include_path=folder, seed=evaluation.seed)
    return dict(results["results"])


def _record(result: "TaskResult") -> dict[str, Any]:
    from holdfast.evaluation.matrix import finite

    record: dict[str, Any] = {
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
            name,
            accuracy,
            _number(result.chance, 3),
            _number(result.majority, 3),
            *(_number(result.measures[measure], 3) for measure in ("bits_per_byte", "nll", "kl_forward", "kl_reverse")),
        )
    Console(highlight=False).print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
