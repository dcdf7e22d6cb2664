"""The report of a run: one HTML file that needs nothing else."""

import dataclasses
import string
from collections.abc import Sequence
from html import escape
from importlib import resources

from holdfast.evaluation.matrix import LOWER_IS_BETTER, METRICS, Cell
from holdfast.evaluation.statistics import forgetting_noise_floor
from holdfast.report import heat, pictures
from holdfast.report.chart import Chart, number
from holdfast.report.config_tree import tree
from holdfast.report.examples import LostExample, surely_forgotten
from holdfast.report.figures import figure, html_table
from holdfast.report.pictures.work import peak_memory, seconds_by_kind, throughput
from holdfast.report.run_files import Run
from holdfast.report.verdicts import UNITS, Verdict, sentence, verdicts
from holdfast.tracking.console import count, duration

MEANINGS = {
    "average": "mean score over all tasks after the last stage",
    "backward_transfer": "mean change of each task from the end of its own stage to the end of the run; "
    "below 0 is forgetting",
    "forward_transfer": "mean gain of a task before its own stage over the untrained model (row 0)",
    "forgetting": "mean drop from a task's best earlier row to the end; it takes a maximum over noisy scores, "
    "so it is a little above 0 even when nothing is forgotten",
    "learning_accuracy": "mean score of each task at the end of its own stage: how well new things were learned",
}
MEASURES = ("accuracy", "bits_per_byte", "nll", "kl_forward", "kl_reverse")


def page(title: str, body: str) -> str:
    """A whole page around a body, with style and script inside."""
    folder = resources.files("holdfast.report")
    read = {name: folder.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    return string.Template(read["html"]).substitute(title=escape(title), css=read["css"], js=read["js"], body=body)


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
    before = [drawn.pop(name) for name in ("curriculum", "loss", "forgetting") if name in drawn]
    work = drawn.pop("work", "")
    parts = [
        _head(run, sentence(run, found)),
        _verdict_table(run, found),
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
        f'<p class="muted">{escape(run.job)}</p>'
        f'<p class="lead {run.state}" id="summary">{escape(said)}</p><dl class="facts">{listed}</dl>'
    )


def _verdict_table(run: Run, found: Sequence[Verdict]) -> str:
    if not found:
        return ""
    rows = []
    for each in found:
        change = "–" if each.change is None else f"{'+' if each.change > 0 else ''}{number(each.change)}"
        if each.interval is not None:
            change += f" [{number(each.interval[0], 3)}, {number(each.interval[1], 3)}]"
        facts = run.facts.get(each.task, {})
        level = number(facts.get("chance")), number(facts.get("majority"))
        scores = [number(value) for value in (each.before, each.after, each.now)]
        word = each.word + (" (one answer for all)" if facts.get("one_class") else "")
        rows.append([each.task, word, each.home, UNITS[each.measure], *scores, change, *level])
    head = ["task", "verdict", "stage", "measure", "before", "after it", "now", "change since (+ is better)"]
    head += ["chance", "majority"]
    return (
        '<section id="verdicts"><h2>What became of each task</h2><p class="muted">Forgotten means that the paired '
        "interval over examples, or where these are not kept the intervals of the two scores, leave no doubt.</p>"
        f"{html_table(head, rows)}</section>"
    )


def _matrices(run: Run) -> str:
    drawn = heats(run)
    if not drawn:
        return '<section id="matrix"><h2>Score matrix</h2><p class="muted">No evaluation was made.</p></section>'
    shown, folded = drawn[:2], drawn[2:]
    more = "".join(heat.html(each) for each in folded)
    rest = f"<details><summary>{len(folded)} more measures</summary>{more}</details>" if folded else ""
    body = f'<p class="muted">{escape(heat.NOTE)}</p>' + "".join(heat.html(each) for each in shown)
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
        cells = [_metric(f"{name}/{metric}", values[name].get(metric)) for name in measures]
        rows.append([escape(metric.replace("_", " ")), *cells])
    titles = [UNITS[name] + (" (negated)" if name in LOWER_IS_BETTER else "") for name in measures]
    table = html_table(["metric", *titles], rows, safe=True)
    meanings = "".join(f"<dt>{name.replace('_', ' ')}</dt><dd>{escape(MEANINGS[name])}</dd>" for name in METRICS)
    left_out = ", ".join(task for task in matrix.tasks if task in matrix.not_learned)
    notes = [f"Left out of the mean forgetting, never above chance: {left_out}."] if left_out else []
    notes += _noise(run)
    told = "".join(f'<p class="muted">{escape(note)}</p>' for note in notes)
    return (
        '<section id="metrics"><h2>Metrics of the matrix</h2><p class="muted">Of higher-is-better scores: losses count '
        f"negative, so for every measure a positive forgetting is a loss of skill.</p>{table}"
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


def _metric(name: str, value: Cell) -> str:
    exact = "" if value is None else repr(value)
    return f'<span data-metric="{name}" data-value="{exact}">{number(value)}</span>'


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
