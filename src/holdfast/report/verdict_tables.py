"""A study's verdict as tables: for the terminal, as CSV and as LaTeX."""

import csv
import io
from collections.abc import Sequence

from holdfast.report.export import latex_table
from holdfast.studies.verdict import Estimate, Judgement, Outcome, Verdict
from holdfast.studies.words import figure, ordered

DELTAS = ("Δ₊ [interval]", "Δ at δ = 0", "δ × slope", "Δ₋ [interval]")
HEAD = ("arm", "verdict", "seeds", "new", "old", *DELTAS, "plain there")
BESIDE = {
    "step_seconds": "s/step",
    "memory_gib": "GiB",
    "extra_rows": "extra rows",
    "new_tokens": "new tokens",
    "total_tokens": "all tokens",
    "worst_old": "worst old",
    "relearn_steps": "steps to relearn",
    "relearned": "share relearned",
    "new_kl": "KL on new",
}
COLUMNS = (
    *("outcome", "unit", "arm", "configuration", "verdict", "delta", "low", "high", "p", "mde", "seeds"),
    *("without_margin", "margin_worth", "worse_delta", "worse_low", "worse_high", "new", "old", "plain_at", "notes"),
)


def interval(found: Estimate | None) -> str:
    """A difference with its sign and its interval."""
    if found is None:
        return "–"
    ends = f" [{signed(found.low, found.half)}, {signed(found.high, found.half)}]" if found.half < float("inf") else ""
    return f"{signed(found.mean, found.half)}{ends}"


def signed(value: float | None, beside: float | None = None) -> str:
    """A difference with its sign.

    >>> signed(0.25), signed(-0.5), signed(None)
    ('+0.25', '-0.50', '–')
    """
    text = figure(value, beside)
    return f"+{text}" if value is not None and value > 0 and text != "–" else text


def arm_rows(found: Judgement, outcome: Outcome) -> list[list[str]]:
    """One row for each arm, the better ones first."""
    rows = []
    for name, verdict in ordered(dict(found.verdicts[outcome.name])):
        told = f"{name} ({found.chosen[name]})" if name in found.chosen else name
        values = [figure(float(found.measured.arms[name].new.mean()), 0.001), figure(_old(outcome, name), 0.001)]
        deltas = [
            interval(verdict.better),
            signed(verdict.without_margin),
            signed(verdict.margin_worth),
            interval(verdict.worse),
        ]
        rows.append([told, said(verdict), str(verdict.seeds), *values, *deltas, verdict.at or "–"])
    return rows


def _old(outcome: Outcome, name: str) -> float:
    return outcome.readable(float(outcome.arm(name).mean()))


def said(verdict: Verdict) -> str:
    """The verdict with what must stand beside it."""
    notes = [note for note in verdict.notes if not note.startswith(verdict.word)]
    return "; ".join([verdict.word, *notes])


def plain_rows(found: Judgement, outcome: Outcome) -> list[list[str]]:
    """Every point of plain, then the bounds."""
    study, old = found.measured, outcome.plain().mean(0)
    rows = []
    last = max((point.steps or 0 for point in study.points), default=0)
    for index, at in enumerate(study.points):
        name = f"rate {study.multiple(at.rate)}"
        name += f", {at.steps} steps" if (at.steps or 0) < last else ""
        name += f", {at.share:g} of the trained weights" if at.share < 1 else ""
        whole = at.share == 1 and (at.steps or 0) == last
        by = found.dominated.get(at.rate) if whole else None
        note = f"dominated by rate {study.multiple(by)}" if by is not None else ""
        rows.append(
            [
                name,
                figure(float(study.new.mean(0)[index]), 0.001),
                figure(outcome.readable(float(old[index])), 0.001),
                note,
            ]
        )
    for bound, (new, kept) in study.bounds.items():
        task = outcome.tasks[0][0].name
        value = figure(kept[task], 0.001) if len(outcome.tasks) == 1 and task in kept else "–"
        rows.append([f"{bound} (bound)", figure(new, 0.001), value, "no verdict"])
    return rows


def beside_rows(found: Judgement) -> tuple[list[str], list[list[str]]]:
    """What the results tell beside the verdict: cost, the worst old loss, relearning; empty where they tell nothing."""
    told = {"plain": found.measured.plain_beside} | {name: arm.beside for name, arm in found.measured.arms.items()}
    names = [name for name in BESIDE if any(name in values for values in told.values())]
    head = ["arm", *(BESIDE[name] for name in names)]
    rows = [
        [arm, *(f"{values[name]:.4g}" if name in values else "–" for name in names)] for arm, values in told.items()
    ]
    return head, rows if names else []


def to_csv(found: Judgement) -> str:
    """One row for each arm and outcome, exact to the last bit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in found.outcomes:
        for name, verdict in found.verdicts[outcome.name].items():
            writer.writerow(_csv_row(found, outcome, name, verdict))
    return text.getvalue()


def _csv_row(found: Judgement, outcome: Outcome, name: str, verdict: Verdict) -> Sequence[object]:
    told, worse = verdict.told, verdict.worse
    figures = ("", "", "", "") if told is None else (told.mean, told.low, told.high, told.p)
    return [
        *(outcome.name, outcome.unit, name, found.chosen.get(name, ""), verdict.word, *figures),
        *(_cell(verdict.mde), verdict.seeds, _cell(verdict.without_margin), _cell(verdict.margin_worth)),
        *(("", "", "") if worse is None else (worse.mean, worse.low, worse.high)),
        *(float(found.measured.arms[name].new.mean()), _old(outcome, name), verdict.at, "; ".join(verdict.notes)),
    ]


def _cell(value: float | None) -> object:
    return "" if value is None else value


def to_latex(found: Judgement) -> str:
    """The table of each outcome for a paper."""
    head = ["arm", "verdict", "seeds", "new", "old", r"$\Delta_+$", r"$\Delta$ at $\delta = 0$", r"$\Delta_-$"]
    parts = []
    for outcome in found.outcomes:
        rows = [[*row[:7], row[8]] for row in arm_rows(found, outcome)]
        caption = (
            f"{outcome.name}, {outcome.unit}: kept beyond plain training that learns as much. "
            f"δ = {found.margin:.3g}, {len(found.measured.seeds)} seeds, {found.measured.runs} runs."
        )
        parts.append(latex_table(head, rows, caption).replace("δ", r"$\delta$"))
    return "\n".join(parts)
