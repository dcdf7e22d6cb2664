"""The report of a run: one HTML file that needs nothing else, beside the run that it is of."""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from holdfast.errors import UserError
from holdfast.evaluation.budgets import kept_lines
from holdfast.evaluation.harness_tasks import is_harness
from holdfast.evaluation.matrix import METRICS, Cell
from holdfast.evaluation.results import Example, forgotten
from holdfast.evaluation.statistics import forgetting_noise_floor
from holdfast.execution.files import write_atomically
from holdfast.report import pictures
from holdfast.report.config_tree import tree
from holdfast.report.drawing import heat, svg
from holdfast.report.drawing.chart import Chart, number
from holdfast.report.drawing.figures import figure, html_table
from holdfast.report.export import ARROWS, METRIC_NAMES, better, in_unit
from holdfast.report.forecasts import forecast_lines
from holdfast.report.pictures.work import peak_memory, seconds_by_kind, throughput
from holdfast.report.run_files import Run, open_run
from holdfast.report.shell import page as page
from holdfast.report.verdicts import UNITS, Verdict, sentence, verdicts
from holdfast.tracking.console import count, duration

REPORT, FIGURES = "report.html", "figures"
MEANINGS = {
    "average": "mean over all tasks after the last stage (average)",
    "backward_transfer": "mean over tasks of earlier stages of the change from the end of their own stage to the end "
    "of the run (backward transfer; of a loss, minus it): a loss that rose and an accuracy that fell is forgetting",
    "forward_transfer": "mean over tasks of later stages of the change from before training to the row before their "
    "own stage (forward transfer; of a loss, minus it)",
    "forgetting": "mean drop from a task's best earlier row to the end, or rise of a loss from its lowest; it takes a "
    "maximum over noisy scores, so it is a little above 0 even when nothing is forgotten",
    "learning_accuracy": "mean over tasks at the end of their own stage: how well new things were learned (learning "
    "accuracy)",
}
MEASURES = ("accuracy", "bits_per_byte", "nll", "kl_forward", "kl_reverse")


@dataclasses.dataclass(frozen=True)
class LostExample:
    """An example, how sure the right answer was and how sure the wrong one is now, in nats."""

    task: str
    before: Example
    after: Example
    sureness: float


def charts(run: Run) -> list[Chart]:
    """All pictures that the run has data for."""
    made = (picture(run) for picture in pictures.PICTURES)
    return [chart for chart in made if chart is not None]


def heats(run: Run) -> list[heat.Heat]:
    """The score matrices of all measures."""
    known = run.matrix.measures if run.matrix is not None else {}
    names = [name for name in MEASURES if name in known] + [name for name in known if name not in MEASURES]
    made = (heat.matrix_heat(run, name) for name in names)
    return [each for each in made if each is not None]


def render(run: Run) -> str:
    """The report as HTML."""
    found = verdicts(run)
    drawn = {chart.name: figure(chart) for chart in charts(run)}
    before = [drawn.pop(name) for name in ("keep", "curriculum", "loss", "forgetting") if name in drawn]
    work = drawn.pop("work", "")
    parts = [
        _head(run, sentence(run, found)),
        _verdict_table(run, found),
        _own_batches(run),
        _budgets(run),
        _forecast(run),
        *before,
        _matrices(run),
        _metrics(run),
        _averaged(run),
        *drawn.values(),
        _examples(surely_forgotten(run)),
        work,
        _time(run),
        f'<section id="config"><h2>Configuration</h2>{tree(run.job, run.config)}</section>',
    ]
    return page(f"{run.name} · Holdfast", "\n".join(part for part in parts if part))


def _head(run: Run, said: str) -> str:
    train = run.kind("train")
    total = run.timeline.total_steps
    memory, rate = peak_memory(run), throughput(train)
    facts = {
        "steps": f"{run.step:,}" + (f" of {total:,}" if total else ""),
        "tokens": f"{run.tokens:,}",
        "stages": str(len(run.timeline.stages) or "–"),
        "seed": str(run.seed),
        "time": duration(sum(seconds_by_kind(train).values())),
        "speed": f"{count(rate)} tokens/s" if rate else "–",
        "peak memory": f"{memory / 2**30:.2f} GiB" if memory else "not recorded",
        "last loss": number(train[-1].get("loss")) if train else "–",
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return (
        f'<h1>{escape(run.name)} <span class="badge {run.state}" id="state">{run.state}</span></h1>'
        f'<p class="muted">{escape(run.job)}</p>{_problems(run)}'
        f'<p class="lead {run.state}" id="summary">{escape(said)}</p><dl class="facts">{listed}</dl>'
    )


def _budgets(run: Run) -> str:
    """Whether each budget was kept, and what control rows certify."""
    lines = kept_lines(run.results)
    if not lines:
        return ""
    rows = [
        [
            run.timeline.stages[each["stage"]].name if each["stage"] < len(run.timeline.stages) else str(each["stage"]),
            "nothing" if each["alpha"] is None else f"{each['alpha']:.0%}",
            "applied" if each["applied"] else "reported",
            ", ".join(f"{name} {number(own['rise'])}" for name, own in each["control"].items()),
        ]
        for each in run.results["keep"].get("certificates", ())
    ]
    head = ("stage", "certified", "", "rise on control rows")
    caption = "of the way from the snapshot to the end of the stage: what control rows prove within budget, at 95 %"
    table = html_table(head, rows, caption=caption) if rows else ""
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<section id="budgets"><h2>Budgets</h2>{told}{table}</section>'


def _forecast(run: Run) -> str:
    """Where a run that goes on will end, or why that cannot be told."""
    told = "".join(f"<p>{escape(line)}</p>" for line in forecast_lines(run))
    return f'<section id="forecast"><h2>Forecast</h2>{told}</section>' if told else ""


def _problems(run: Run) -> str:
    """What of the files could not be read, and how much of a long run is shown."""
    told = "".join(f'<p class="warn problem">{escape(problem)}</p>' for problem in run.problems)
    if run.every == 1:
        return told
    note = f"A long run: 1 of {run.every} train records is read, and times are told from those."
    return f'{told}<p class="muted" id="thinned">{note}</p>'


def _own_batches(run: Run) -> str:
    if not run.results.get("overrides_batch"):
        return ""
    return (
        '<p class="muted" id="own-batches">The trainer of this job overrides <code>batch()</code>: '
        "the curriculum below is the data plan, not what its batches held.</p>"
    )


def _verdict_table(run: Run, found: Sequence[Verdict]) -> str:
    if not found:
        return ""
    rows = []
    levels = [name for name in ("chance", "majority") if any(name in run.facts.get(each.task, {}) for each in found)]
    order = [run.matrix.tasks[column] for column in heat.column_order(run.matrix)] if run.matrix is not None else []
    for each in sorted(found, key=lambda verdict: order.index(verdict.task)):
        facts = run.facts.get(each.task, {})
        level = [number(facts.get(name)) for name in levels]
        scores = [number(value) for value in (each.before, each.after, each.now)]
        word = each.word + (" (one answer for all)" if facts.get("one_class") else "")
        if each.word == "forgotten" and each.own == "known before":
            word = "known before, forgotten"
        unit = f"{UNITS[each.measure]} {ARROWS[better(each.measure)]}"
        named = f"{escape(each.task)}<br><small>{escape(unit)}</small>"
        rows.append([named, escape(word), *scores, escape(each.changed), *level])
    head = ["task", "verdict", "before", "after it", "now", "change since [95 % interval]", *levels]
    return (
        '<section id="verdicts"><h2>What became of each task</h2><p class="muted">Forgotten means that the 95 % '
        "interval of the change, paired over the same documents or questions, leaves no doubt. Learned means above "
        "chance and majority, or for a loss a paired gain; known before, that it was good before its stage.</p>"
        f"{html_table(head, rows, safe=True)}</section>"
    )


def _matrices(run: Run) -> str:
    drawn = heats(run)
    if not drawn:
        return '<section id="matrix"><h2>Score matrix</h2><p class="muted">No evaluation was made.</p></section>'
    shown, folded = drawn[:2], drawn[2:]
    more = "".join(heat.html(each) for each in folded)
    rest = f"<details><summary>{len(folded)} more measures</summary>{more}</details>" if folded else ""
    body = f'<p class="muted">{escape(heat.NOTE)}</p>' + "".join(heat.html(each) for each in shown)
    rest += "".join(f'<p class="warn failed">{escape(line)}</p>' for line in run.failures)
    return f'<section id="matrix"><h2>Score matrix</h2>{body}{rest}</section>'


def _metrics(run: Run) -> str:
    matrix = run.matrix
    if matrix is None:
        return ""
    measures = [name for name in MEASURES[:3] if name in matrix.measures]
    # A finished run's numbers are those of results.json, to the last digit.
    given = run.results.get("metrics", {}) if run.results.get("finished") else {}
    values = {name: given.get(name) or matrix.metrics(name) for name in measures}
    rows = []
    for metric in METRICS:
        cells = [_metric(name, metric, values[name].get(metric)) for name in measures]
        rows.append([escape(METRIC_NAMES[metric]), *cells])
    table = html_table(["mean over tasks", *(UNITS[name] for name in measures)], rows, safe=True)
    meanings = "".join(f"<dt>{METRIC_NAMES[name]}</dt><dd>{escape(MEANINGS[name])}</dd>" for name in METRICS)
    left_out = ", ".join(task for task in matrix.tasks if task in matrix.not_learned)
    notes = [f"Left out of the mean forgetting, not above chance and majority: {left_out}."] if left_out else []
    notes += _noise(run)
    told = "".join(f'<p class="muted">{escape(note)}</p>' for note in notes)
    return (
        '<section id="metrics"><h2>Metrics of the matrix</h2><p class="muted">Each in the unit of its column; '
        f"↑ higher is better, ↓ lower is better.</p>{table}"
        f'<dl class="words">{meanings}</dl>{told}</section>'
    )


def _averaged(run: Run) -> str:
    """The matrices of the average of the weights, folded: those of the weights themselves come first."""
    if run.averaged is None:
        return ""
    decay = run.results.get("ema", {}).get("decay") or (run.config.get("training") or {}).get("ema")
    drawn = [
        dataclasses.replace(each, name=f"ema_{each.name}", title=f"averaged weights: {each.title}")
        for each in heats(run.averaged)
    ]
    shown = "".join(heat.html(each) for each in drawn)
    return (
        f'<section id="ema"><h2>Averaged weights (EMA, decay {escape(str(decay))})</h2><p class="muted">What an '
        "exponential average of the trained parameters scored at the same steps; everything else on this page is of "
        f"the weights themselves.</p><details><summary>{len(drawn)} matrices</summary>{shown}</details></section>"
    )


def _metric(measure: str, metric: str, value: Cell) -> str:
    shown = in_unit(measure, metric, value)
    exact = "" if shown is None else repr(shown)
    facts = f'data-metric="{measure}/{metric}" data-value="{exact}"'
    return f"<span {facts}>{number(shown)}</span>{'' if shown is None else ' ' + ARROWS[better(measure, metric)]}"


def _noise(run: Run) -> list[str]:
    """What forgetting of accuracy would show although nothing was forgotten."""
    matrix = run.matrix
    if matrix is None or "accuracy" not in matrix.measures:
        return []
    floors = []
    for column, task in enumerate(matrix.tasks):
        home, facts = matrix.homes[column], run.facts.get(task, {})
        score = matrix.measures["accuracy"][home][column] if home is not None else None
        if score is not None and home is not None and home < len(matrix.stages) and facts.get("count"):
            stages = len(matrix.stages) - home + 1
            floors.append((task, forgetting_noise_floor(score, int(facts["count"]), stages, 0.1)))
    if not floors:
        return []
    listed = ", ".join(f"{task} {number(floor.mean)} (seldom above {number(floor.upper)})" for task, floor in floors)
    return [
        f"Noise floor of the forgetting of accuracy, if nothing were forgotten and 10 % of answers churned: {listed}."
    ]


def _examples(lost: Sequence[LostExample]) -> str:
    if not lost:
        return ""
    cards = "".join(
        f"<li><blockquote>{escape(_cut(each.before.prompt))}</blockquote><p>{escape(each.task)}: answered "
        f"<b>{escape(each.before.answer.strip())}</b> then, <b>{escape((each.after.chosen or 'nothing').strip())}</b> "
        f'now <span class="muted">(sure by {number(each.sureness, 3)} nats)</span></p></li>'
        for each in lost
    )
    return (
        '<section id="examples"><h2>Most surely forgotten</h2><p class="muted">Right after the task\'s own stage, '
        "wrong now; first those where both the right and the wrong answer had the widest margin.</p>"
        f'<ol class="cards">{cards}</ol></section>'
    )


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else "… " + text[-most:]


def _time(run: Run) -> str:
    spent = seconds_by_kind(run.kind("train"))
    if not spent:
        return ""
    whole = sum(spent.values()) or 1.0
    rows = [[kind, duration(seconds), f"{seconds:.1f}", f"{seconds / whole:.1%}"] for kind, seconds in spent.items()]
    stage = run.kind("stage")[-1] if run.kind("stage") else {}
    place = f"Processes: {stage.get('processes', '?')}, devices: {stage.get('devices', '?')}" if stage else ""
    memory = peak_memory(run)
    told = f"{place}; peak memory {f'{memory / 2**30:.2f} GiB' if memory else 'not recorded'}."
    return (
        f'<section id="time"><h2>Time by kind of work</h2><p class="muted">{escape(told)}</p>'
        f"{html_table(['work', 'time', 'seconds', 'share'], rows)}</section>"
    )


def surely_forgotten(run: Run, most: int = 10) -> list[LostExample]:
    """Of all tasks those lost since the row after their own stage, the surest of both answers first.

    Tasks of the harness have no stage of their own: what they lost since they were answered best.
    """
    matrix = run.matrix
    if matrix is None:
        return []
    found = []
    for task, home in zip(matrix.tasks, matrix.homes, strict=True):
        point = run.row_point(home) if home is not None else None
        if task not in run.facts or (point is None and not is_harness(task)):
            continue
        try:
            lost = forgotten(run.path, task, known_step=None if point is None else point.step).lost
        except (UserError, OSError, ValueError, KeyError, TypeError):
            continue  # not evaluated since, or the files were not copied along
        for before, after in lost:
            found.append(LostExample(task, before, after, min(before.margin, -after.margin)))
    ordered = sorted(found, key=lambda each: -each.sureness)
    share = max(3, most // max(len({each.task for each in found}), 1))
    # A task that lost much must not push all others out.
    tasks = dict.fromkeys(each.task for each in ordered)
    kept = [each for task in tasks for each in [one for one in ordered if one.task == task][:share]]
    return sorted(kept, key=lambda each: -each.sureness)[:most]


def write_report(run_dir: Path, *, pictures: bool | None = True) -> Path:
    """Write `report.html`, and with `pictures` an SVG and a PNG file of each picture; returns the page's path.

    PNG files need the extra `figures`; without it the SVG files are all, and a line says so.

    Args:
        pictures: None writes them where a tracker shows them: at the end of a run that has one.
    """
    run = open_run(run_dir)
    path = run_dir / REPORT
    write_atomically(path, render(run))
    if _wanted(run) if pictures is None else pictures:
        folder = run_dir / FIGURES
        drawn, tables = charts(run), heats(run)
        for chart in drawn:
            write_atomically(folder / _file(chart.name, "svg"), svg.draw(chart, alone=True))
        for table in tables:
            write_atomically(folder / _file(table.name, "svg"), heat.svg(table))
        if importlib.util.find_spec("matplotlib") is None:
            print(
                f"{folder}: SVG files alone; PNG files need matplotlib: pip install 'holdfast[figures]'",
                file=sys.stderr,
            )
            return path
        from holdfast.report.drawing import png

        for name, data in png.draw_all(drawn, tables):
            write_atomically(folder / _file(name, "png"), data)
    return path


def _file(name: str, ending: str) -> str:
    """A picture's file; its name may be made of names in a run's files, which could lead elsewhere.

    >>> _file("matrix_a/b", "svg")
    'matrix_a_b.svg'
    """
    return f"{re.sub(r'[^A-Za-z0-9._+=-]', '_', name)[:100]}.{ending}"


def _wanted(run: Run) -> bool:
    logging = run.config.get("logging") or {}
    return run.finished and any(logging.get(name) for name in ("wandb", "tensorboard", "trackers"))
