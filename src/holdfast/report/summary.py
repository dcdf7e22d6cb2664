"""A run on the terminal: in short as it ends, or with its score matrices and their metrics."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from holdfast.evaluation.budgets import kept_lines
from holdfast.evaluation.matrix import LOWER_IS_BETTER, METRICS
from holdfast.report.drawing.chart import number
from holdfast.report.drawing.heat import Heat, HeatCell, matrix_heat
from holdfast.report.export import ARROWS, METRIC_NAMES, better, in_unit
from holdfast.report.forecasts import forecast_lines
from holdfast.report.page import MEASURES, REPORT
from holdfast.report.run_files import Run, open_run
from holdfast.report.verdicts import UNITS, Verdict, sentence, verdicts
from holdfast.tracking.console import count

SHOWN = ("accuracy", "bits_per_byte")


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Show what a run has come to, finished or not."""
    console = console or Console(highlight=False)
    run = open_run(run_dir, curves=False)
    console.print(Text(sentence(run)), soft_wrap=True)
    for line in kept_lines(run.results):
        console.print(Text(line), soft_wrap=True)
    for problem in run.problems:
        console.print(Text(f"! {problem}"), soft_wrap=True)
    if not run.finished:
        _print_progress(run, console)
    for line in forecast_lines(run):
        console.print(Text(line), soft_wrap=True)
    for measure in SHOWN:
        heat = matrix_heat(run, measure)
        if heat is not None:
            console.print(matrix_table(heat))
        averaged = matrix_heat(run.averaged, measure) if run.averaged is not None else None
        if averaged is not None:
            console.print(matrix_table(dataclasses.replace(averaged, title=f"averaged weights: {averaged.title}")))
    metrics = metrics_table(run)
    if metrics is not None:
        console.print(metrics)
    for line in run.failures:
        console.print(Text(line), soft_wrap=True)
    _print_page(run_dir, console)


def print_outcome(run_dir: Path, console: Console | None = None) -> None:
    """Show a run as it ends: what was kept and what was lost in one sentence and one table, and where the page is."""
    console = console or Console(highlight=False)
    run = open_run(run_dir, curves=False)
    found = verdicts(run)
    if run.matrix is None or not found:
        print_summary(run_dir, console)
        return
    stages = run.matrix.stages
    found.sort(key=lambda each: stages.index(each.home) if each.home else len(stages))
    console.print(Text(sentence(run, found)), soft_wrap=True)
    for line in kept_lines(run.results):
        console.print(Text(line), soft_wrap=True)
    console.print(outcome_table(found))
    for line in run.failures:
        console.print(Text(line), soft_wrap=True)
    _print_page(run_dir, console)


def outcome_table(found: Sequence[Verdict]) -> Table:
    """What became of each task; the arrow says which way is better."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "measured in"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after its stage", "at the end"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in found:
        better = "↓" if each.measure in LOWER_IS_BETTER else "↑"
        kept = each.change is not None and each.word in ("learned", "known before")
        scores = (number(score, 3) for score in (each.before, each.after if each.home else None, each.now))
        table.add_row(Text(each.task), f"{UNITS[each.measure]} {better}", *scores, "kept" if kept else each.word)
    return table


def _print_page(run_dir: Path, console: Console) -> None:
    report = run_dir / REPORT
    hint = f"report: {report}" if report.is_file() else f"report: `holdfast report {run_dir}` writes it"
    console.print(Text(hint), soft_wrap=True)


def _print_progress(run: Run, console: Console) -> None:
    train = run.kind("train")
    if train:
        last = train[-1]
        stages = run.timeline.stages
        index = last.get("stage", 0)
        stage = stages[index].name if index < len(stages) else index
        parts = [
            f"stage {stage}",
            f"step {run.step:,}",
            f"loss {number(last.get('loss'))}",
            f"{count(run.tokens)} tokens",
        ]
        console.print(Text(" · ".join(parts)))


def matrix_table(heat: Heat) -> Table:
    """A score matrix with shades behind the values, where the terminal has colours."""
    table = Table(title=heat.title, title_justify="left")
    table.add_column("")
    for name in heat.columns:
        table.add_column(Text(name + (" (not learned)" if name in heat.marked else "")), justify="right")
    for name, cells in zip(heat.rows, heat.cells, strict=True):
        table.add_row(Text(name), *(_text(cell) for cell in cells))
    return table


def _text(cell: HeatCell) -> Text:
    if cell.value is None:
        return Text("–", style="dim")
    # From grey to green: readable on light and on dark terminals, and without colours just a number.
    share = min(max(cell.shade, 0.0), 1.0)
    red, green, blue = (round(70 + (end - 70) * share) for end in (20, 120, 80))
    style = Style(color="white", bgcolor=f"rgb({red},{green},{blue})", bold=cell.home)
    return Text(number(cell.value), style=style)


def metrics_table(run: Run) -> Table | None:
    """The metrics of the matrix, one column a measure."""
    matrix = run.matrix
    measures = [name for name in MEASURES[:3] if matrix is not None and name in matrix.measures]
    if matrix is None or not measures:
        return None
    given = run.results.get("metrics", {}) if run.results.get("finished") else {}
    table = Table(
        "mean over tasks",
        *(Column(UNITS[name], justify="right") for name in measures),
        title="metrics (↑ higher is better, ↓ lower is better)",
        title_justify="left",
    )
    for metric in METRICS:
        values = [in_unit(name, metric, (given.get(name) or matrix.metrics(name)).get(metric)) for name in measures]
        shown = [
            number(value) + ("" if value is None else f" {ARROWS[better(name, metric)]}")
            for name, value in zip(measures, values, strict=True)
        ]
        table.add_row(METRIC_NAMES[metric], *shown)
    return table
