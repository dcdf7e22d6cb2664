"""`holdfast diff`: what did I lose between two models?"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from holdfast.cli.options import named_data, table
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.analysis.diff import Diff
    from holdfast.curriculum import Stage
    from holdfast.data.config import DataConfig
    from holdfast.evaluation.results import Example
    from holdfast.training.runs import OpenModel

LOST = 3  # the exit code: everything worked, and something was lost beyond the tolerance


def diff_command(
    a: Annotated[str, typer.Argument(help="RUN, RUN@CHECKPOINT, the folder of a model, or a hub name: before.")],
    b: Annotated[str, typer.Argument(help="The same: after.")],
    data: Annotated[
        Optional[str], typer.Option("--data", help="Datasets and files, with commas; of runs: what they trained on.")
    ] = None,
    tasks: Annotated[
        Optional[str], typer.Option("--tasks", help="Evaluations, with commas; of runs: their own.")
    ] = None,
    harness: Annotated[
        Optional[str], typer.Option("--harness", help="Tasks of lm-evaluation-harness, with commas.")
    ] = None,
    harness_tasks: Annotated[
        Optional[Path], typer.Option("--harness-tasks", help="Folder with task definitions for the harness.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Bits per byte, and share of known questions, that may go.")
    ] = 0.05,
    by: Annotated[Optional[str], typer.Option("--by", help="A field of your files to show the texts by.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=2, help="Most texts and questions of each.")] = 500,
    html: Annotated[Optional[Path], typer.Option("--html", help="Write a page of its own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Show what was lost between two models, without training.

    Bits per byte on the same bytes (tokenizers may differ), answers that changed, the texts and questions that
    changed most. Exit code 0: nothing was lost beyond the tolerance; 3: something was.

    Example: holdfast diff runs/general/default/first@boundary_1 runs/general/default/first --tasks lists
    """
    from holdfast.analysis.diff import diff, to_json
    from holdfast.training.runs import open_model

    first, second = open_model(a), open_model(b)
    config, datasets = _datasets(first, second, _names(data), by, asked=tasks is not None or harness is not None)
    chosen = _tasks(first, second, _names(tasks), default=data is None and harness is None)
    if not (datasets or chosen or harness):
        raise UserError(f"{a}, {b}: nothing to compare them on, as neither is a run; name --data, --tasks or --harness")
    answered = _harness(first, second, _names(harness), harness_tasks, limit) if harness else {}
    found = diff(
        first,
        second,
        data=config,
        datasets=datasets,
        tasks=chosen,
        tolerance=tolerance,
        limit=limit,
        answered=answered,
        told=lambda line: print(f"{line} ...", file=sys.stderr),
    )
    if as_json:
        print(json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _print(found)
    if html is not None:
        _write(found, html, say=not as_json)
    if found.lost:
        raise typer.Exit(LOST)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _datasets(
    first: "OpenModel", second: "OpenModel", named: Sequence[str], by: str | None, *, asked: bool
) -> "tuple[DataConfig, list[str]]":
    """Where data comes from, and the datasets to measure: those named, else those of the runs."""
    from holdfast.data.config import DataConfig, SourceConfig

    runs = [side.run for side in (first, second) if side.run is not None]
    base = runs[0].options.data if runs else DataConfig()
    sources = {name: each for run in reversed(runs) for name, each in run.options.data.sources.items()}
    own = [name for run in runs for stage in run.curriculum.stages for name in _names_of(stage)]
    chosen = [] if named or asked else list(dict.fromkeys(own))
    for name in named:
        key, path = named_data(name, [*sources, *chosen])
        if path is not None:
            group = None if by is None else f"{{{by}}}"
            sources[key] = SourceConfig(path=path, group=group)
        chosen.append(key)
    if by is not None and not any(sources.get(name) and sources[name].group for name in chosen):
        raise UserError(f"--by {by}: only files that --data names have fields; name some")
    return dataclasses.replace(base, sources=sources), chosen


def _names_of(stage: "Stage") -> list[str]:
    return [sampling.name for sampling in stage.mixture if sampling.name != "self"]


def _tasks(first: "OpenModel", second: "OpenModel", named: Sequence[str], *, default: bool) -> list[str]:
    if named or not default:
        return list(named)
    runs = [side.run for side in (first, second) if side.run is not None]
    return list(dict.fromkeys(name for run in runs for name in run.config.evaluations))


def _harness(
    first: "OpenModel", second: "OpenModel", names: Sequence[str], folder: Path | None, limit: int
) -> "dict[str, tuple[Sequence[Example], Sequence[Example], float]]":
    """Answers of both models to tasks of the harness that score each question as right or wrong."""
    from holdfast.evaluation.harness import HarnessModel, answers, run_harness

    sides = []
    for side in (first, second):
        model = HarnessModel(side.runner, side.params, side.tokenizer)
        sides.append(answers(run_harness(model, names, limit=limit, include_path=folder)))
    missing = [name for name in names if not any(found.startswith(name) for found in sides[0])]
    if missing:
        raise UserError(f"--harness {', '.join(missing)}: it scores no single question as right or wrong")
    return {name: (examples, sides[1][name][0], guess) for name, (examples, guess) in sides[0].items()}


def _write(found: "Diff", path: Path, *, say: bool) -> None:
    from holdfast.report.diff import write_diff

    write_diff(found, path)
    if say:
        print(path)


def _print(found: "Diff") -> None:
    """The tables, the surest of the answers that changed, and the sentence last."""
    from rich.console import Console
    from rich.text import Text

    from holdfast.report.diff import DATA_HEAD, TASK_HEAD, data_row, sentence, task_row

    console = Console(highlight=False)
    console.print(Text(f"A: {found.first}\nB: {found.second}"), soft_wrap=True)
    if found.tasks:
        console.print(table(TASK_HEAD, [task_row(each) for each in found.tasks], name="task"))
    for task in (each for each in found.tasks if each.word == "lost"):
        for first, second, _ in task.examples[:3]:
            console.print(Text(f"{task.name}: …{first.prompt.strip()[-120:]}"), soft_wrap=True)
            console.print(Text(f"  A said {first.chosen!r}, B says {second.chosen!r}"), soft_wrap=True)
    if found.data:
        console.print(table(DATA_HEAD, [data_row(each) for each in found.data], name="dataset"))
    for note in found.notes:
        console.print(Text(note), soft_wrap=True)
    console.print(Text(sentence(found)), soft_wrap=True)
