"""Runs beside each other, on the terminal, on a page, as CSV and as LaTeX."""

import functools
import re
import sys
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
from holdfast.report.config_tree import shown
from holdfast.report.drawing import heat
from holdfast.report.drawing.chart import number
from holdfast.report.drawing.figures import figure, html_table
from holdfast.report.export import (
    ARROWS,
    METRIC_NAMES,
    better,
    in_unit,
    latex_table,
    metrics_of,
    open_runs,
    shown_change,
    to_csv,
)
from holdfast.report.groups import (
    Group,
    Outcome,
    best_group,
    config_differences,
    grouped,
    mean_and_spread,
    outcomes,
    pair_sentence,
    run_names,
)
from holdfast.report.page import MEANINGS
from holdfast.report.pictures import comparison
from holdfast.report.run_files import Run, readable
from holdfast.report.shell import page
from holdfast.report.verdicts import UNITS, verdicts
from holdfast.studies.words import few_seeds_words

MARK = "best"
PLAIN_WIDTH = 120  # of a file or a log, where no terminal has one
NONE = "null"  # how an option without a value is shown
HONEST = (
    "Nothing is marked best unless it is better than every other one over paired seeds: the 95 % interval of the "
    "differences excludes zero."
)
ONE_SEED = f"One seed each: this describes these runs, not their methods; {few_seeds_words(1)}."


@dataclass(frozen=True)
class Score:
    """One metric of one group in its own unit: mean, spread over seeds, and whether it is surely the best."""

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
        return [measure for measure in UNITS if any(g.values(measure, m) for g in self.groups for m in METRICS)]

    def scores(self) -> Iterator[tuple[str, str, list[Score]]]:
        """Every metric that any group has, with the score of each group."""
        for measure in self.measures():
            for metric in METRICS:
                best = best_group(self.groups, measure, metric)
                scores = []
                for index, group in enumerate(self.groups):
                    values = list(group.values(measure, metric).values())
                    mean, spread = mean_and_spread(values) if values else (None, None)
                    scores.append(Score(in_unit(measure, metric, mean), spread, index == best))
                if any(score.mean is not None for score in scores):
                    yield measure, metric, scores

    def tables(self) -> Iterator[tuple[str, list[tuple[str, list[Score]]]]]:
        """The same by measure: its metrics, each with the score of each group."""
        for measure, rows in groupby(self.scores(), key=lambda row: row[0]):
            yield measure, [(metric, scores) for _, metric, scores in rows]

    @property
    def several_seeds(self) -> bool:
        """Whether any group has more than one seed that counts."""
        return any(len(group.judged) > 1 for group in self.groups)

    def sentences(self) -> list[str]:
        """What each group kept and lost beside the first."""
        return [pair_sentence(self.groups[0], other) for other in self.groups[1:]]

    @functools.cached_property
    def outcomes(self) -> list[tuple[Group, Outcome]]:
        """What became of every task in every group: all groups of the first task, then of the next."""
        found = [(group, outcomes(group)) for group in self.groups]
        tasks = dict.fromkeys(task for _, each in found for task in each)
        return [(group, each[task]) for task in tasks for group, each in found if task in each]

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
    """Open the runs that paths or globs name; fewer than two are a mistake, and so is one that cannot be judged."""
    runs = open_runs(patterns)
    for run in runs:
        with readable(run.path):  # here, where it can be named
            verdicts(run)
            for measure in UNITS:
                metrics_of(run, measure)
    if len(runs) < 2:
        raise UserError(f"{' '.join(map(str, patterns))}: {len(runs)} run; expected at least two runs to compare")
    return Comparison(tuple(runs), tuple(run_names(runs)), tuple(grouped(runs)))


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """For the terminal: what was kept and lost in words, every task in its own unit, means over seeds, what differs."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for said in found.sentences():
        console.print(Text(said))
    if found.outcomes:
        console.print(outcomes_table(found))
    # With one seed each the metrics would only repeat the tasks above, averaged over different units of difficulty.
    for measure, columns in found.tables() if found.several_seeds else ():
        if measure == "nll" and "bits_per_byte" in found.measures():
            continue  # the same in another unit
        title = f"{UNITS[measure]}, means over tasks; mean ± standard deviation over seeds"
        heads = (f"{METRIC_NAMES[metric]} {ARROWS[better(measure, metric)]}" for metric, _ in columns)
        table = _table(title, *(Column(head, justify="right") for head in heads))
        for index, group in enumerate(found.groups):
            table.add_row(Text(group.name), *(_cell(scores[index]) for _, scores in columns))
        console.print(table)
    if found.differences():
        console.print(differences_table(found))
    for group in found.groups:
        if group.warnings:
            console.print(Text(f"! {group.name}: {', '.join(group.warnings)}"))
    console.print(Text(HONEST if found.several_seeds else ONE_SEED), style="dim")


def outcomes_table(found: Comparison) -> Table:
    """Every task in every group: before its stage, after it, at the end, and what became of it."""
    title = "each task before and after its own stage, and at the end (↑ higher is better, ↓ lower)"
    table = _table(title, Column("run", overflow="fold"))
    for name in ("before", "after", "end", "change [95 %]"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    last, place = "", 0
    for group, each in found.outcomes:
        place = 0 if each.task != last else place + 1
        last = each.task
        # The unit stands below the task's name, beside its second group.
        named = each.task if place == 0 else _unit(each) if place == 1 else ""
        scores = [_score(value) for value in (each.before, each.after, each.now)]
        table.add_row(Text(named), Text(group.name), *scores, shown_change(each.change, each.interval, 3), each.told)
    return table


def _unit(each: Outcome) -> str:
    return f"{UNITS[each.measure]} {ARROWS[better(each.measure)]}"


def _score(value: float | None) -> str:
    """A score with as many decimals as the others of its column."""
    return number(value) if value is None or abs(value) >= 1000 else f"{value:.3f}"


def _ended(each: Outcome) -> str:
    return _score(each.now) + (f" ± {each.spread:.3f}" if each.spread is not None else "")


def _table(title: str, *columns: Column) -> Table:
    """A narrow table, a line a group."""
    first = Column(overflow="fold")
    return Table(
        first, *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )


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
    own = [_stages_joined(lines) for lines in own]
    for name, lines in (("most", usual), *zip((group.name for group in found.groups), own, strict=True)):
        if lines:
            table.add_row(Text(name), Text("\n".join(lines)))
    return table


def _stages_joined(lines: Sequence[str]) -> list[str]:
    """Options that several stages have with one value, in one line.

    >>> _stages_joined(["job: a", "stages/1/beta: 0.5", "stages/1/lr: 1", "stages/2/beta: 0.5"])
    ['job: a', 'stages/1,2/beta: 0.5', 'stages/1/lr: 1']
    """
    joined: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        found = re.fullmatch(r"stages/(\d+)/(.*)", line)
        key = ("stages", found[2]) if found else ("", line)
        joined.setdefault(key, []).append(found[1] if found else "")
    return [f"stages/{','.join(numbers)}/{rest}" if head else rest for (head, rest), numbers in joined.items()]


def _short(value: Any, most: int = 120) -> str:
    text = shown(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def render(found: Comparison) -> str:
    """The comparison as a page that needs nothing else."""
    measures = found.measures()
    shared = comparison.shared_measures(found.groups)[:2]
    planes = [comparison.plane(found.groups, found.names_of, measure) for measure in shared]
    shown = sorted((measure for measure in measures if measure != "nll"), key=lambda name: name != "bits_per_byte")
    curves = [comparison.overlaid(found.groups, measure) for measure in shown]
    folded = comparison.overlaid(found.groups, "nll") if "nll" in measures else None
    body = [
        f"<h1>{len(found.runs)} runs compared</h1>",
        *(f'<p class="lead">{escape(said)}</p>' for said in found.sentences()),
        _outcomes(found),
        *(figure(chart) for chart in curves if chart is not None),
        *(figure(chart) for chart in planes if chart is not None),
        _matrices(found, measures),
        _metrics(found),
        f"<details><summary>{escape(folded.title)}</summary>{figure(folded)}</details>" if folded is not None else "",
        _group_list(found),
        _differences(found),
    ]
    return page("Holdfast: runs compared", "\n".join(body))


def _outcomes(found: Comparison) -> str:
    if not found.outcomes:
        return ""
    rows = []
    for _, members in groupby(found.outcomes, key=lambda pair: pair[1].task):
        pairs = list(members)
        first = pairs[0][1]
        named = f"{escape(first.task)}<br><small>{escape(_unit(first))}</small>"
        task = f'<th scope="rowgroup" rowspan="{len(pairs)}">{named}</th>'
        rows += [f"<tr>{task if place == 0 else ''}{_row(*pair)}</tr>" for place, pair in enumerate(pairs)]
    heads = [f'<th scope="col">{name}</th>' for name in ("task", "run")]
    heads += [f'<th scope="col" class="number">{name}</th>' for name in ("before its stage", "after it", "at the end")]
    heads += [f'<th scope="col">{name}</th>' for name in ("verdict", "change since [95 % interval]")]
    over = "over seeds where a group has several, else " if found.several_seeds else ""
    note = (
        "Tasks in order of their stages, each in its own unit: ↑ higher is better, ↓ lower is better. Intervals are "
        f"{over}paired over the same documents or questions; where nothing could be paired there is none."
    )
    seeds = "" if found.several_seeds else f" {ONE_SEED}"
    return (
        f'<section id="outcomes"><h2>What became of each task</h2><p class="muted">{note}{seeds}</p>'
        f'<div class="scroll"><table class="outcomes"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _row(group: Group, each: Outcome) -> str:
    """What became of a task in a group, without the task's name."""
    facts = f'data-outcome="{escape(each.task)}" data-value="{"" if each.now is None else repr(each.now)}"'
    over = f' <span class="muted">over {escape(each.over)}</span>' if each.interval is not None else ""
    scores = [_score(each.before), _score(each.after), f"<span {facts}>{_ended(each)}</span>"]
    cells = "".join(f'<td class="number">{cell}</td>' for cell in scores)
    kind = "lost" if each.forgotten else "kept" if each.kept else ""
    word = f'<span class="{kind}">{escape(each.told)}</span>'
    change = f"<td>{shown_change(each.change, each.interval, 3)}{over}</td>"
    return f'<th scope="row">{escape(group.name)}</th>{cells}<td>{word}</td>{change}'


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
        heads = [f"{METRIC_NAMES[metric]}, {better(measure, metric)} is better" for metric, _ in columns]
        tables.append(html_table([UNITS[measure], *heads], rows, safe=True))
    seeds = f"Mean ± standard deviation over seeds. {HONEST}" if found.several_seeds else ONE_SEED
    meanings = "".join(f"<dt>{METRIC_NAMES[name]}</dt><dd>{escape(MEANINGS[name])}</dd>" for name in METRICS)
    return (
        f'<section id="metrics"><h2>Means over tasks</h2><p class="muted">Each in the unit of its table. {seeds}</p>'
        f'{"<br>".join(tables)}<dl class="words">{meanings}</dl></section>'
        if tables
        else ""
    )


def _shown_score(measure: str, metric: str, score: Score) -> str:
    value = "" if score.mean is None else repr(score.mean)
    facts = f'title="{escape(MEANINGS[metric])}" data-metric="{measure}/{metric}" data-value="{value}"'
    return f'<span {facts} class="best">{score} ★ {MARK}</span>' if score.best else f"<span {facts}>{score}</span>"


def _matrices(found: Comparison, measures: Sequence[str]) -> str:
    parts = []
    for measure in measures:
        drawn = [heat.html(each) for each in comparison.group_heats(found.groups, measure)]
        if drawn:
            title, unfolded = escape(UNITS[measure]), "" if measure == "nll" else " open"
            parts.append(
                f'<details{unfolded}><summary>{title}</summary><div class="beside">{"".join(drawn)}</div></details>'
            )
    mean = "The mean over seeds of each group" if found.several_seeds else "Each run"
    note = f"{mean}, and its difference from the first: green is better, orange worse; framed: after the own stage."
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
        rows.append([f"{UNITS[measure]}: {METRIC_NAMES[metric]} ({better(measure, metric)} is better)", *cells])
    heads = ["", *(_titled(group) for group in found.groups)]
    caption = f"Mean and standard deviation over seeds. {HONEST}" if found.several_seeds else ONE_SEED
    write_atomically(path, latex_table(heads, rows, f"Means over tasks. {caption}"))


def write_page(found: Comparison, path: Path) -> Path:
    """The comparison as `compare.html`."""
    write_atomically(path, render(found))
    return path
