"""A study's verdict as one self-contained page, and its pictures."""

from html import escape

import numpy as np

from holdfast.report.drawing.chart import Chart, Line, Panel
from holdfast.report.drawing.figures import figure as chart_figure
from holdfast.report.drawing.figures import html_table
from holdfast.report.page import page
from holdfast.report.verdict_tables import BESIDE, HEAD, arm_rows, beside_rows, plain_rows
from holdfast.studies.frontier import Array, lines_of
from holdfast.studies.inference import LEVEL
from holdfast.studies.verdict import Judgement, Outcome, Verdict
from holdfast.studies.words import plain_words, sentence

PLAIN, EACH_SEED, MARGIN = "plain, mean", "plain, each seed", "plain moved by the margin"
PLAIN_COLOR, SEED_COLOR, FIRST_COLOR = 0, 9, 1
READING = (
    "Left learns more, down keeps more. An arm is better where it lies below plain by more than its interval and the "
    "margin: below the left dashed line. The bar is the interval of the difference, at the level that Holm's "
    "correction leaves it."
)


def chart(found: Judgement, outcome: Outcome) -> Chart:
    """Old against new: plain's line over its rates for each seed and for the means, the margin, arms with intervals."""
    study = found.measured
    turned = outcome.higher_is_better
    old, new = outcome.readable(outcome.plain()), study.new
    along = max(
        lines_of(study.points), key=lambda line: (line.along == "rate", _last(found, line.points), len(line.points))
    )
    order = along.points
    lines = [
        Line(EACH_SEED, new[seed, order].tolist(), old[seed, order].tolist(), SEED_COLOR) for seed in range(len(new))
    ]
    means = new.mean(0)[order], old.mean(0)[order]
    lines += [
        Line(MARGIN, (means[0] + shift).tolist(), means[1].tolist(), PLAIN_COLOR, dash=True)
        for shift in (-found.margin, found.margin)
    ]
    labels = [study.multiple(study.points[index].rate) for index in order]
    tips = [f"plain at rate {label}" for label in labels]
    lines.append(Line(PLAIN, means[0].tolist(), means[1].tolist(), PLAIN_COLOR, "both", tips=tips, labels=labels))
    for index, (name, verdict) in enumerate(found.verdicts[outcome.name].items()):
        lines += _arm_lines(found, outcome, name, verdict, FIRST_COLOR + index % 8)
    task = outcome.tasks[0][0].name
    for bound, (at, kept) in study.bounds.items():
        if len(outcome.tasks) == 1 and task in kept:
            lines.append(Line(f"{bound} (bound)", [at], [kept[task]], SEED_COLOR, "points", tips=[f"{bound}, a bound"]))
    seeds = len(study.seeds)
    return Chart(
        f"frontier_{found.outcomes.index(outcome)}",
        f"Learned new, kept old: {outcome.name}",
        READING.replace("down keeps", "up keeps").replace("below", "above") if turned else READING,
        f"Old against new for plain at {len(order)} rates and {len(study.arms)} arms over {seeds} seeds; "
        f"margin {found.margin:.3g} on the new loss.",
        [Panel(f"kept old, {outcome.unit}", lines, 380)],
        x_label="learned new, bits per byte (left is better)",
        scatter=True,
    )


def _last(found: Judgement, points: Array) -> int:
    first = found.measured.points[int(points[0])]
    return (first.steps or 0) if first.share == 1 else -1


def _arm_lines(found: Judgement, outcome: Outcome, name: str, verdict: Verdict, color: int) -> list[Line]:
    new, old = float(found.measured.arms[name].new.mean()), outcome.readable(float(outcome.arm(name).mean()))
    tip = f"{name}: {verdict.word}"
    made = [Line(name, [new], [old], color, "points", tips=[tip])]
    told = verdict.told
    if told is not None and np.isfinite(told.half):
        made.insert(0, Line(name, [new, new], [old - told.half, old + told.half], color))
    return made


def render(found: Judgement, title: str) -> str:
    """The page as HTML."""
    study, primary = found.measured, found.outcomes[0]
    facts = {
        "seeds": str(len(study.seeds)),
        "chosen on": f"{len(found.selection_seeds)} other seeds" if found.selection_seeds else "no other seeds",
        "runs": str(study.runs),
        "margin δ": f"{found.margin:.3g} ({found.margin_source})",
        "level": f"{LEVEL:g} one-sided, Holm over {len(found.primary)}",
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead" id="summary">{escape(sentence(found))}</p><dl class="facts">{listed}</dl>',
        _notes(found),
        *(_outcome(found, outcome, primary is outcome) for outcome in found.outcomes),
        _beside(found),
        _words(),
    ]
    return page(f"{title} · Holdfast", "\n".join(part for part in parts if part))


def _notes(found: Judgement) -> str:
    told = [*plain_words(found), *found.notes]
    return "".join(f'<p class="muted">{escape(note[0].upper() + note[1:])}.</p>' for note in told)


def _outcome(found: Judgement, outcome: Outcome, first: bool) -> str:
    several = len(found.outcomes) > 1
    name = f"{outcome.name} ({'primary' if first else 'one of the old tasks'})" if several else outcome.name
    said = "" if first else f"<p>{escape(sentence(found, outcome))}</p>"
    arms = html_table(HEAD, arm_rows(found, outcome))
    plain = html_table(("plain", "new", "old", "note"), plain_rows(found, outcome))
    return (
        f'<section id="outcome-{found.outcomes.index(outcome)}"><h2>{escape(name)}, {escape(outcome.unit)}</h2>{said}'
        f"{arms}</section>{chart_figure(chart(found, outcome))}"
        f"<section><h2>Plain training: {escape(outcome.name)}</h2>{plain}</section>"
    )


def _beside(found: Judgement) -> str:
    head, rows = beside_rows(found)
    if not rows:
        return ""
    told = "Means over runs, beside the verdict and no part of it."
    if BESIDE["step_seconds"] in head:
        told += " The time of a step holds for the machine that it was measured on."
    return f'<section id="cost"><h2>Cost</h2><p class="muted">{escape(told)}</p>{html_table(head, rows)}</section>'


def _words() -> str:
    meanings = {
        "Δ₊": "plain's least old loss with a new loss of at most the arm's + δ, minus the arm's old loss. Better: its "
        "interval lies above 0.",
        "Δ₋": "the same with the arm's new loss − δ. Worse: its interval lies below 0. There is none where no plain "
        "run learns that much.",
        "δ × slope": "what the margin itself is worth where the arm is: much where the frontier is steep.",
        "no evidence": "neither; an effect of the size that is named would have been seen in 4 of 5 such studies.",
        "equal": "both intervals within ± the margin.",
        "learns less": "than the slowest plain run: nothing to compare with until plain is run at a smaller rate.",
        "learns more": "than every plain run: compared where plain learns most.",
        "dominated": "another rate of plain learns at least as much and keeps at least as much, on means over seeds.",
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meanings.items())
    return f'<section id="words"><h2>How to read it</h2><dl class="words">{listed}</dl></section>'
