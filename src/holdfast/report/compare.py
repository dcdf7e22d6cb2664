"""Runs beside each other, on the terminal, on a page, as CSV and as LaTeX."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from holdfast.errors import UserError
from holdfast.evaluation.matrix import METRICS
from holdfast.execution.files import write_atomically
from holdfast.report import compare_charts, heat
from holdfast.report.chart import number
from holdfast.report.config_tree import shown
from holdfast.report.export import latex_table, open_runs, to_csv
from holdfast.report.figures import figure, html_table
from holdfast.report.groups import Group, best_group, config_differences, grouped, mean_and_spread, run_names
from holdfast.report.page import MEANINGS, page
from holdfast.report.run_files import Run

MARK = "best"
NONE = "null"  # how an option without a value is shown
HONEST = (
    "Nothing is marked best unless it is better than every other one over paired seeds: the 95 % interval of the "
    "differences excludes zero."
)


@dataclass(frozen=True)
class Score:
    """One metric of one group: mean, spread over seeds, and whether it is surely the best."""

    mean: float | None
    spread: float | None
    best: bool

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        return number(self.mean) + (f" ± {number(self.spread, 3)}" if self.spread is not None else "")


@dataclass(frozen=True)
class Comparison:
    """Runs in groups of one config."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]

    def measures(self) -> list[str]:
        """Measures of the matrix that any run has."""
        return [
            measure
            for measure in compare_charts.UNITS
            if any(g.values(measure, m) for g in self.groups for m in METRICS)
        ]

    def scores(self) -> Iterator[tuple[str, str, list[Score]]]:
        """Every metric that any group has, with the score of each group."""
        for measure in self.measures():
            for metric in METRICS:
                best = best_group(self.groups, measure, metric)
                scores = []
                for index, group in enumerate(self.groups):
                    values = list(group.values(measure, metric).values())
                    mean, spread = mean_and_spread(values) if values else (None, None)
                    scores.append(Score(mean, spread, index == best))
                if any(score.mean is not None for score in scores):
                    yield measure, metric, scores

    def tables(self) -> Iterator[tuple[str, list[tuple[str, list[Score]]]]]:
        """The same by measure: its metrics, each with the score of each group."""
        for measure, rows in groupby(self.scores(), key=lambda row: row[0]):
            yield measure, [(metric, scores) for _, metric, scores in rows]

    def differences(self) -> dict[str, list[str]]:
        """Options that are not the same in all groups: path -> value of each, with commas where its runs differ."""
        index = {run: place for place, run in enumerate(self.runs)}
        found = {}
        for path, values in config_differences(self.runs).items():
            texts = [
                ", ".join(dict.fromkeys(_short(values[index[run]]) for run in group.runs)) for group in self.groups
            ]
            if len(set(texts)) > 1:
                found[path] = texts
        return found

    @property
    def names_of(self) -> dict[Run, str]:
        """The name of each run."""
        return dict(zip(self.runs, self.names, strict=True))


def compare(patterns: Sequence[str | Path]) -> Comparison:
    """Open the runs that paths or globs name; fewer than two are a mistake."""
    runs = open_runs(patterns)
    if len(runs) < 2:
        raise UserError(f"{' '.join(map(str, patterns))}: {len(runs)} run; expected at least two runs to compare")
    return Comparison(tuple(runs), tuple(run_names(runs)), tuple(grouped(runs)))


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Tables for the terminal, a line a group so that many fit: what differs, and the metrics of each measure."""
    console = console or Console(highlight=False)
    if found.differences():
        console.print(differences_table(found))
    for measure, columns in found.tables():
        title = f"{compare_charts.UNITS[measure]}, mean ± spread over seeds"
        table = _table(title, *(Column(metric.replace("_", " "), justify="right") for metric, _ in columns))
        for index, group in enumerate(found.groups):
            table.add_row(Text(group.name), *(_cell(scores[index]) for _, scores in columns))
        console.print(table)
    for group in found.groups:
        if group.warnings:
            console.print(Text(f"! {group.name}: {', '.join(group.warnings)}"))
    console.print(Text(HONEST), style="dim")


def _table(title: str, *columns: Column) -> Table:
    """A narrow table, a line a group."""
    return Table(Column(overflow="fold"), *columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _cell(score: Score) -> Text:
    return Text(f"{score} {MARK}", "bold green") if score.best else Text(str(score))


def _titled(group: Group) -> str:
    return group.name + (f" (! {', '.join(group.warnings)})" if group.warnings else "")


def differences_table(found: Comparison) -> Table:
    """What differs in the configs: what most groups have, and what each has of its own."""
    table = _table("what differs", Column("options"))
    own: list[list[str]] = [[] for _ in found.groups]
    usual = []
    for path, values in found.differences().items():
        value, count = Counter(values).most_common(1)[0]
        common = value if 2 * count > len(values) else NONE
        if common != NONE:
            usual.append(f"{path}: {common}")
        for lines, each in zip(own, values, strict=True):
            if each != common:
                lines.append(f"{path}: {each}")
    for name, lines in (("most", usual), *zip((group.name for group in found.groups), own, strict=True)):
        if lines:
            table.add_row(Text(name), Text("\n".join(lines)))
    return table


def _short(value: Any, most: int = 120) -> str:
    text = shown(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def render(found: Comparison) -> str:
    """The comparison as a page that needs nothing else."""
    measures = found.measures()
    shared = compare_charts.shared_measures(found.groups)[:2]
    planes = [compare_charts.plane(found.groups, found.names_of, measure) for measure in shared]
    curves = [compare_charts.overlaid(found.groups, measure) for measure in measures]
    body = [
        f"<h1>{len(found.runs)} runs compared</h1>",
        _group_list(found),
        _metrics(found),
        *(figure(chart) for chart in planes if chart is not None),
        *(figure(chart) for chart in curves if chart is not None),
        _matrices(found, measures),
        _differences(found),
    ]
    return page("Holdfast: runs compared", "\n".join(body))


def _group_list(found: Comparison) -> str:
    names = found.names_of
    rows = []
    for group in found.groups:
        warn = f'<span class="warn">{escape(", ".join(group.warnings))}</span>' if group.warnings else ""
        runs = "<br>".join(f"{escape(names[run])} (seed {escape(str(run.seed))})" for run in group.runs)
        rows.append([escape(group.name), warn, runs])
    return (
        '<section id="groups"><h2>Runs</h2><p class="muted">Seeds of the same config are one group. Runs with other '
        "amounts of new data or compute than the rest are flagged: learning less is not forgetting less.</p>"
        f"{html_table(['group', 'flags', 'runs'], rows, safe=True)}</section>"
    )


def _metrics(found: Comparison) -> str:
    tables = []
    for measure, columns in found.tables():
        rows = [
            [escape(group.name), *(_shown_score(measure, metric, scores[index]) for metric, scores in columns)]
            for index, group in enumerate(found.groups)
        ]
        heads = [compare_charts.UNITS[measure], *(metric.replace("_", " ") for metric, _ in columns)]
        tables.append(html_table(heads, rows, safe=True))
    return (
        f'<section id="metrics"><h2>Metrics</h2><p class="muted">Of higher-is-better scores (losses count negative); '
        f"of forgetting less is better. Mean ± standard deviation over seeds. {HONEST}</p>"
        f"{'<br>'.join(tables)}</section>"
    )


def _shown_score(measure: str, metric: str, score: Score) -> str:
    value = "" if score.mean is None else repr(score.mean)
    facts = f'title="{escape(MEANINGS[metric])}" data-metric="{measure}/{metric}" data-value="{value}"'
    return f'<span {facts} class="best">{score} ★ {MARK}</span>' if score.best else f"<span {facts}>{score}</span>"


def _matrices(found: Comparison, measures: Sequence[str]) -> str:
    parts = []
    for measure in measures:
        drawn = [heat.html(each) for each in compare_charts.group_heats(found.groups, measure)]
        if drawn:
            title = escape(compare_charts.UNITS[measure])
            parts.append(
                f'<details open><summary>{title}</summary><div class="beside">{"".join(drawn)}</div></details>'
            )
    note = "The mean over seeds of each group, and its difference from the first: green is better, orange worse."
    return (
        f'<section id="matrices"><h2>Score matrices</h2><p class="muted">{note}</p>{"".join(parts)}</section>'
        if parts
        else ""
    )


def _differences(found: Comparison) -> str:
    rows = [[path, *values] for path, values in found.differences().items()]
    heads = ["option", *(group.name for group in found.groups)]
    table = html_table(heads, rows) if rows else "<p>Nothing differs but the seeds.</p>"
    return f'<section id="differences"><h2>What differs in the configs</h2>{table}</section>'


def write_csv(found: Comparison, path: Path) -> None:
    """All numbers of all runs as tidy rows."""
    write_atomically(path, to_csv(found.runs, found.names))


def write_latex(found: Comparison, path: Path) -> None:
    """The metrics as a table; what is surely best is bold."""
    rows = []
    for measure, metric, scores in found.scores():
        cells = []
        for score in scores:
            text = str(score).replace("±", r"\pm")
            plain = "--" if score.mean is None else f"${text}$"
            cells.append(f"\\textbf{{{plain}}}" if score.best else plain)
        rows.append([f"{compare_charts.UNITS[measure]}: {metric.replace('_', ' ')}", *cells])
    heads = ["", *(_titled(group) for group in found.groups)]
    write_atomically(path, latex_table(heads, rows, f"Mean and standard deviation over seeds. {HONEST}"))


def write_page(found: Comparison, path: Path) -> Path:
    """The comparison as `compare.html`."""
    write_atomically(path, render(found))
    return path
