"""Whether budgets (`keep`) were kept in the end; held-out data judges, which nothing that steers has seen. No JAX."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.curriculum import Budget, Curriculum
from holdfast.data.sampling import SELF
from holdfast.evaluation.results import FOLDER
from holdfast.evaluation.sums import read_sums
from holdfast.types import Json, JsonView

KEPT, BROKEN, UNDECIDED = "kept", "broken", "undecided"
OWN_SAMPLES = "drift on the model's own samples; no statement about any dataset"


def outcome(
    curriculum: Curriculum, run_dir: Path, points: Sequence[JsonView], certificates: Sequence[JsonView]
) -> list[Json]:
    """What became of each budget by the newest evaluation, as `results.json` has it."""
    found = []
    for budget in curriculum.budgets:
        since = curriculum.stage_start(budget.since)
        if budget.name == SELF.name:
            judged = _own_samples(budget, certificates)
        else:
            judged = held_out_rise(budget.name, since, run_dir, points)
        facts = {"name": budget.name, "limit": budget.limit, "since": since}
        found.append({**facts, "judged": judged, "verdict": verdict(budget.limit, judged)})
    return found


def held_out_rise(name: str, since: int, run_dir: Path, points: Sequence[JsonView]) -> Json | None:
    """The paired rise of a dataset's held-out loss from where its budget begins to the newest whole evaluation."""
    whole = [int(point["step"]) for point in points if point.get("at") != "probe"]
    if since not in whole or max(whole) <= since:
        return None
    first, last = (read_sums(run_dir / FOLDER / str(at)).get(name) for at in (since, max(whole)))
    change = first.change(last, "bits_per_byte") if first is not None and last is not None else None
    if change is None:
        return None
    mean, low, high, num, unit = change
    return {"on": "held-out data", "step": max(whole), "rise": mean, "low": low, "high": high, "num": num, "unit": unit}


def _own_samples(budget: Budget, certificates: Sequence[JsonView]) -> Json | None:
    """The drift on samples that were never trained on, at the end of the last stage."""
    if not certificates:
        return None
    last, own = certificates[-1], certificates[-1]["control"].get(budget.name)
    if own is None:
        return None
    facts = {"rise": own["rise"], "low": own["low"], "high": own["high"], "num": own["documents"]}
    return {"on": "own samples", "step": last["step"], **facts, "unit": "samples", "note": OWN_SAMPLES}


def verdict(limit: float, judged: JsonView | None) -> str:
    """Whether a budget was kept: by the upper end of the interval; broken by its lower one; or undecided.

    >>> verdict(0.05, {"low": 0.01, "high": 0.04}), verdict(0.05, {"low": 0.06, "high": 0.1}), verdict(0.05, None)
    ('kept', 'broken', 'undecided')
    """
    if judged is None:
        return UNDECIDED
    return KEPT if judged["high"] <= limit else BROKEN if judged["low"] > limit else UNDECIDED


def judged_by(limit: float, results: JsonView) -> Json:
    """Results whose budgets are judged by another limit than the run was steered by.

    >>> found = {"keep": {"budgets": [{"limit": 0.03, "judged": {"low": 0.031, "high": 0.04}, "verdict": "broken"}]}}
    >>> judged_by(0.05, found)["keep"]["budgets"][0]["verdict"]
    'kept'
    """
    kept = results.get("keep", {})
    budgets = [{**each, "limit": limit, "verdict": verdict(limit, each["judged"])} for each in kept.get("budgets", ())]
    return {**results, "keep": {**kept, "budgets": budgets}}


def told(found: JsonView, certificates: Sequence[JsonView]) -> str:
    """What became of a budget, in a sentence.

    Args:
        found: as `outcome` has it.
    """
    judged, limit = found["judged"], f"{found['limit']:g} bits per byte"
    what = "drift on own samples" if found["name"] == SELF.name else str(found["name"])
    if judged is None:
        return f"Budget undecided: {what} was not measured on held-out data before and after (training/evaluate)."
    rise = f"{judged['rise']:+.3f} [{judged['low']:+.3f}, {judged['high']:+.3f}]"
    words = {
        KEPT: f"Budget kept: {what} {rise}, within {limit}",
        BROKEN: f"Budget broken: {what} {rise}, above {limit}",
        UNDECIDED: f"Budget undecided: {what} {rise}, around {limit}",
    }
    alpha = certificates[-1]["alpha"] if certificates else None
    proved = "" if alpha is None else f"; control rows certify {alpha:.0%} of the way from the snapshot"
    note = f" ({judged['note']})" if "note" in judged else ""
    return f"{words[str(found['verdict'])]}, over {judged['num']} {judged['unit']}{proved}.{note}"


def kept_lines(results: JsonView) -> list[str]:
    """What became of the budgets of a run, a sentence each."""
    kept = results.get("keep", {})
    return [told(each, kept.get("certificates", ())) for each in kept.get("budgets", ())]


def exit_code(results: JsonView, *, strict: bool) -> int:
    """3 where a budget was broken, or with `strict` not shown to be kept; otherwise 0.

    >>> exit_code({"keep": {"budgets": [{"verdict": "undecided"}]}}, strict=True)
    3
    """
    verdicts = {str(each["verdict"]) for each in results.get("keep", {}).get("budgets", ())}
    return 3 if BROKEN in verdicts or (strict and UNDECIDED in verdicts) else 0
