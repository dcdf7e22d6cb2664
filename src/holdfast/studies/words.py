"""A judgement in words, and as JSON."""

import math
from typing import Any

from holdfast.studies.inference import FEWEST_SEEDS, LEVEL
from holdfast.studies.verdict import (
    BETTER,
    EQUAL,
    FAR_APART,
    LEARNS_LESS,
    LEARNS_MORE,
    NO_EVIDENCE,
    SLOW_END,
    TOO_FEW,
    WORSE,
    Estimate,
    Judgement,
    Outcome,
    Verdict,
)
from holdfast.types import Json

RECOMMENDED_SEEDS = 8
_ORDER = (BETTER, WORSE, EQUAL, LEARNS_MORE, NO_EVIDENCE, LEARNS_LESS, TOO_FEW)


def figure(value: float | None, beside: float | None = None) -> str:
    """A figure with the decimals that its uncertainty leaves it.

    >>> figure(0.31999, 0.041), figure(0.0123, 0.0012), figure(12.3456, 3.0), figure(None)
    ('0.32', '0.012', '12.35', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    scale = abs(beside if beside and math.isfinite(beside) else value)
    decimals = min(max(math.ceil(-math.log10(scale)), 2), 4) if scale > 0 else 2
    return f"{value:.{decimals}f}"


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number} {what}{'s' if number != 1 else ''}"


def sized(found: Estimate) -> str:
    """A mean without its sign, and half the width of its interval."""
    return f"{figure(abs(found.mean), found.half)} ± {figure(found.half, found.half)}"


def ordered(verdicts: dict[str, Verdict]) -> list[tuple[str, Verdict]]:
    """Arms as they are told: the better ones first, those that keep most before the others."""
    return sorted(verdicts.items(), key=lambda item: (_ORDER.index(item[1].word), -_mean(item[1])))


def _mean(verdict: Verdict) -> float:
    return verdict.told.mean if verdict.told is not None else 0.0


def sentence(found: Judgement, outcome: Outcome | None = None) -> str:
    """What can be said of all arms for one outcome, the primary one unless given."""
    told_of = outcome or found.outcomes[0]
    parts: list[str] = []
    told: set[str] = set()
    for name, verdict in ordered(dict(found.verdicts[told_of.name])):
        first = verdict.word not in told
        told.add(verdict.word)
        parts.append(arm_words(name, verdict, told_of, first=first))
    said = "; ".join(parts)
    return f"{said}." if said else "Plain training alone: there is no arm to judge."


def arm_words(name: str, verdict: Verdict, outcome: Outcome, *, first: bool = True) -> str:
    """The verdict on one arm; the first of its kind is told at length."""
    found = verdict.told
    seeds = counted(verdict.seeds, "seed")
    if verdict.word == TOO_FEW:
        rest = (
            f" ({seeds}; a verdict needs {FEWEST_SEEDS}, {RECOMMENDED_SEEDS} are recommended)"
            if first
            else f" ({seeds})"
        )
        return f"{name}: {TOO_FEW}{rest}"
    if found is None:
        return f"{name}: no verdict, it {'; '.join(verdict.notes)}"
    if verdict.word in (BETTER, WORSE):
        side = "more" if verdict.word == BETTER else "less"
        if not first:
            return f"{name}: {sized(found)}{'' if side == 'more' else ' less'}"
        also = " and learns more than every plain run" if LEARNS_MORE in " ".join(verdict.notes) else ""
        than = "plain where it learns most" if also else "plain training that learns as much"
        told = f"{outcome.unit} {side}" if outcome.unit == "bits per byte" else f"{side} {outcome.unit}"
        return f"{name} keeps {sized(found)} {told} than {than}{also}"
    if verdict.word == EQUAL:
        return f"{name}: equal to plain training that learns as much, within {outcome.margin:.3g}"
    if verdict.word == LEARNS_MORE:
        side = "more" if found.mean > 0 else "less"
        return (
            f"{name} learns more than every plain run and keeps {sized(found)} {side} than plain where it learns most"
        )
    if found.low > 0:  # it is not called better, because plain might keep as much at a rate that was not run
        why = [note for note in verdict.notes if note.startswith((SLOW_END, FAR_APART))]
        return f"{name}: {NO_EVIDENCE} yet, {'; '.join(why)}"
    seen = f"an effect of {figure(verdict.mde, verdict.mde)} would have been seen"
    if not first or verdict.mde is None:
        return f"{name}: no evidence, {seen}"
    more = f" ({verdict.more_seeds} more seeds would halve that)" if verdict.more_seeds else ""
    held = (
        "" if verdict.more_seeds else " (more held-out documents would lower that, more seeds alone would not halve it)"
    )
    return f"{name}: no evidence, {seen}{more or held}"


def plain_words(found: Judgement) -> list[str]:
    """What must be said of plain's own rates."""
    study = found.measured
    return [
        f"plain at rate {study.multiple(rate)} is dominated by rate {study.multiple(by)}"
        for rate, by in found.dominated.items()
    ]


def few_seeds_words(seeds: int) -> str | None:
    """Why runs of a few seeds have no verdict; None where they could have one.

    >>> few_seeds_words(1), few_seeds_words(3)
    ('1 seed gives no verdict, 3 may', None)
    """
    return None if seeds >= FEWEST_SEEDS else f"{counted(seeds, 'seed')} gives no verdict, {FEWEST_SEEDS} may"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _estimate(found: Estimate | None) -> Json | None:
    if found is None:
        return None
    return {
        "delta": found.mean,
        "low": _number(found.low),
        "high": _number(found.high),
        "p": _number(found.p) if math.isfinite(found.half) else None,  # one seed has no interval and tests nothing
        "level": found.level,
    }


def verdict_json(verdict: Verdict) -> Json:
    """One verdict; what is not known is null."""
    told = verdict.told
    figures = _estimate(told) or dict.fromkeys(("delta", "low", "high", "p", "level"))
    return {
        "verdict": verdict.word,
        **figures,
        "mde": _number(verdict.mde),
        "seeds": verdict.seeds,
        "more_seeds": verdict.more_seeds,
        "better": _estimate(verdict.better),
        "worse": _estimate(verdict.worse),
        "without_margin": _number(verdict.without_margin),
        "margin_worth": _number(verdict.margin_worth),
        "at": verdict.at or None,
        "by_seed": list(verdict.by_seed),
        "notes": list(verdict.notes),
    }


def to_json(found: Judgement) -> Json:
    """The whole judgement, as `holdfast verdict --json` prints it."""
    study, primary = found.measured, found.outcomes[0]
    arms: dict[str, Any] = {}
    for name, verdict in found.primary.items():
        arm = study.arms[name]
        arms[name] = {
            **verdict_json(verdict),
            "arm": arm.arm,
            "learning_rate": arm.rate,
            "strength": arm.strength or None,
            "new": float(arm.new.mean()),
            "old": primary.readable(float(primary.arm(name).mean())),
            "beside": dict(arm.beside),
        }
        if len(found.outcomes) > 1:
            arms[name]["tasks"] = {
                outcome.name: verdict_json(found.verdicts[outcome.name][name]) for outcome in found.outcomes[1:]
            }
    return {
        "words": sentence(found),
        "arms": arms,
        "outcome": primary.name,
        "unit": primary.unit,
        "margin": found.margin,
        "margin_source": found.margin_source,
        "level": LEVEL,
        "family": len(found.primary),
        "plain": plain_json(found),
        "dominated": {study.multiple(rate): study.multiple(by) for rate, by in found.dominated.items()},
        "bounds": {name: {"new": new, "old": dict(old)} for name, (new, old) in study.bounds.items()},
        "seeds": list(study.seeds),
        "selection_seeds": list(found.selection_seeds),
        "chosen": dict(found.chosen),
        "runs": study.runs,
        "notes": list(found.notes),
    }


def plain_json(found: Judgement) -> list[Json]:
    """Every point of plain, with the rate that dominates it where one does."""
    study, old = found.measured, found.outcomes[0].plain().mean(0)
    made = []
    for index, point in enumerate(study.points):
        ends = point.share == 1 and point.steps == max((p.steps or 0 for p in study.points), default=0)
        by = found.dominated.get(point.rate) if ends or point.steps is None else None
        made.append(
            {
                "learning_rate": point.rate,
                "multiple": float(f"{point.rate / study.base_rate:.6g}"),
                "steps": point.steps,
                "share": point.share,
                "new": float(study.new.mean(0)[index]),
                "old": found.outcomes[0].readable(float(old[index])),
                "dominated_by": None if by is None else float(f"{by / study.base_rate:.6g}"),
            }
        )
    return made
