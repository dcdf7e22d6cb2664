"""Forecasts against the truth of finished runs, and what they are tuned with.

    python -m benchmarks.forecast RUNS… --csv benchmarks/results/forecast.csv    # judge: from 25 % of each last stage
    python -m benchmarks.forecast --summary                                      # the table, from the CSV alone
    python -m benchmarks.forecast --tune RUNS…                                   # print `Constants` for these runs

RUNS are folders of runs; others among them are left out. Each run is cut after a share of its stage, and only what its
files held by then is forecast from. Persistence says that the change measured so far stays: the last probe, over the
same rows at the switch. `held` is a harder one, which knows besides how far the probes' rows are off all rows.

Tuning leaves one way to keep the old out at a time for the widths of intervals: they hold for ways never seen.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast.analysis import forecast as model
from holdfast.analysis.forecast import Constants, Course, Curve, Forecast, Learned
from holdfast.report.forecasts import StageAhead, curves, of_stage, planned
from holdfast.report.run_files import is_run, open_run

RESULTS = Path(__file__).parent / "results" / "forecast.csv"
FIELDS = (
    "study", "run", "group", "quantity", "dataset", "cut", "truth", "forecast", "low", "high", "persistence", "held",
    "refusal",
)  # fmt: skip
ANCHORED = ("ewc", "si", "sfa", "asft", "osf", "ssu")
TUNING_CUTS = (0.2, 0.22, 0.25, 0.27)
HELD, WIDER = (
    0.95,
    1.3,
)  # errors that a width holds, and how much wider it is made: other data differ more than other ways
LEAST_SHARE = 0.1  # of what is still to be learned or was lost: runs of one curriculum cannot tell less for another
EXPONENTS = (-0.5, 0.5)  # logarithms that whole curves start from
QUANTITIES = ("old", "new")


class Case(NamedTuple):
    """A run whose last stage is over."""

    path: Path
    group: str  # plain, unanchored (replay and the like), anchored (a penalty, or weights that are held)
    stage: StageAhead
    known: dict[str, Curve]


def cases(folders: Iterable[Path]) -> list[Case]:
    """The finished runs with a switch; runs of several stages are looked at in their last."""
    made = []
    for path in sorted(filter(is_run, folders)):
        run = open_run(path, curves=False)
        stages = planned(run) if run.finished else []
        if not stages:
            continue
        known = curves(run, stages[-1])
        if not (stages[-1].old and stages[-1].new):  # joint training and the like
            continue
        if all(_truth(stages[-1], known.get(name)) is not None for name in (*stages[-1].old, *stages[-1].new)):
            made.append(Case(path, group(run.flat, stages[-1]), stages[-1], known))
    return made


def group(options: dict[str, object], stage: StageAhead) -> str:
    """What kind of run it is."""
    methods = options.get("training/methods") or []
    assert isinstance(methods, list)
    if stage.anchored or any(name in ANCHORED for name in methods):
        return "anchored"
    return "unanchored" if stage.replay or methods or options.get("optimization/lora/rank") else "plain"


def _truth(stage: StageAhead, curve: Curve | None) -> float | None:
    """The change over all rows at the end of a stage."""
    ends = [change for step, change, _ in (curve.full if curve else ()) if step == stage.end - stage.start]
    return ends[0] if ends else None


def judge(found: Sequence[Case], cut: float) -> list[dict[str, object]]:
    """One row for each run and quantity."""
    rows = []
    for case in found:
        stage, now = case.stage, int(cut * (case.stage.end - case.stage.start))
        seen = {name: curve.until(now) for name, curve in case.known.items()}
        made = of_stage(stage, {name: curve for name, curve in seen.items() if len(curve.steps)})
        for quantity, names in (("old", stage.old), ("new", stage.new)):
            for name in names:
                own, end = seen[name], made[name]
                answer = end._asdict() if isinstance(end, Forecast) else {"refusal": end.reason}
                rows.append(
                    {
                        "study": case.path.parent.name,
                        "run": case.path.name,
                        "group": case.group,
                        "quantity": quantity,
                        "dataset": name,
                        "cut": cut,
                        "truth": _truth(stage, case.known[name]),
                        "persistence": own.changes[-1] if len(own.changes) else 0.0,
                        "held": own.corrected()[-1] if len(own.changes) else 0.0,
                    }
                    | {"forecast" if key == "change" else key: value for key, value in answer.items()}
                )
    return rows


def summary(rows: Sequence[dict[str, str]]) -> list[str]:
    """The table of the acceptance list, by study and over all of them."""
    lines = [
        "| runs of | quantity | runs | answered | error | persistence | ratio | to `held` | covered |",
        "|" + "---|" * 9,
    ]
    studies = sorted({row["study"] for row in rows})
    for study in [*studies, *(["all"] if len(studies) > 1 else [])]:
        for kind in ("plain", "unanchored", "anchored"):
            for quantity in QUANTITIES:
                own = [
                    r for r in rows if (r["group"], r["quantity"]) == (kind, quantity) and study in (r["study"], "all")
                ]
                if own:
                    lines.append(_line(f"{study}, {kind}", quantity, own))
    return lines


def _line(name: str, quantity: str, rows: Sequence[dict[str, str]]) -> str:
    told = [row for row in rows if not row["refusal"]]
    if not told:
        return f"| {name} | {quantity} | {len(rows)} | 0 % | | | | | |"
    truth, made, low, high, stays, held = (
        np.array([float(row[key]) for row in told])
        for key in ("truth", "forecast", "low", "high", "persistence", "held")
    )
    error, first, second = (float(np.abs(each - truth).mean()) for each in (made, stays, held))
    covered = float(((low <= truth) & (truth <= high)).mean())
    return (
        f"| {name} | {quantity} | {len(rows)} | {len(told) / len(rows):.0%} | {error:.3f} | {first:.3f} | "
        f"{error / first:.2f} | {error / second:.2f} | {covered:.0%} |"
    )


class Example(NamedTuple):
    """One forecast that tuning learns from."""

    way: str
    course: Course
    new: Curve
    old: Curve
    truth_new: float
    truth_old: float
    learned: Learned


def examples(found: Sequence[Case], constants: Constants) -> list[Example]:
    """Runs with one old and one new dataset, cut at several shares, with every later full evaluation as an end."""
    made = []
    for case in found:
        stage = case.stage
        if stage.unlike or stage.anchored or len(stage.old) != 1 or len(stage.new) != 1:
            continue
        old, new = case.known[stage.old[0]], case.known[stage.new[0]]
        length = stage.end - stage.start
        ends = {step: change for step, change, _ in old.full}
        for cut in TUNING_CUTS:
            seen, known = new.until(int(cut * length)), old.until(int(cut * length))
            for step, truth, _ in new.full:
                course = Course(stage.rates[:step], stage.effective, stage.anchored)
                if step > cut * length and model.unfit(course, seen) is None:
                    learned = model.learn(course, seen, constants)
                    way = case.path.name.split("-x")[0]
                    made.append(Example(way, course, seen, known, truth, ends[step], learned))
    return made


def tune(found: Sequence[Case]) -> Constants:
    """The constants for some runs."""
    constants = _shapes(found, model.TUNED)
    made = examples(found, constants)
    fitted = _exchange(made, constants)
    # Spreads are those around forecasts by constants of the other ways.
    errors: dict[str, list[tuple[float, ...]]] = {"new": [], "old": []}
    for way in sorted({each.way for each in made}):
        others = _exchange([each for each in made if each.way != way], constants)
        for each in made:
            if each.way == way:
                errors["new"].append((model.new_end(each.new, each.learned, others)[0] - each.truth_new, *_parts(each)))
                end = model.old_end(each.course, each.old, [each.learned], others)[0]
                errors["old"].append((end - each.truth_old, *_parts(each, others)))
    spread_new, spread_old = (_spread(np.array(errors[name])) for name in ("new", "old"))
    fitted = fitted._replace(spread_new=spread_new[:2], spread_old=spread_old[:3])
    return fitted._replace(
        width_new=_width(np.array(errors["new"]), spread_new), width_old=_width(np.array(errors["old"]), spread_old)
    )


def _parts(each: Example, constants: Constants | None = None) -> tuple[float, ...]:
    """What the spread of a forecast is made of: what was left to learn, of an old loss also its level; its scatter."""
    if constants is None:
        return each.learned.further, each.learned.scatter
    level, _, scatter = model.old_level(each.course, each.old, [each.learned], constants)
    return each.learned.further, level * model.regained(each.course, each.old), scatter


def _shapes(found: Sequence[Case], constants: Constants) -> Constants:
    """Mean exponents of whole curves, fitted with wide priors."""
    from scipy.optimize import least_squares

    fits = []
    for case in found:
        if case.stage.unlike or len(case.stage.new) != 1:
            continue
        curve = case.known[case.stage.new[0]]
        times, _ = model.clock(case.stage.course, curve)
        centre = np.array([np.log(model.SCALE * curve.level), np.log(times[-1] / 30), *EXPONENTS])

        def residuals(values: np.ndarray, curve=curve, times=times, centre=centre) -> np.ndarray:
            off = (model.learning_curve(times, values) - curve.changes) / (model.NOISE * np.abs(curve.changes).max())
            return np.concatenate([off, (values - centre) / np.array([1.0, 1.5, 0.6, 0.4])])

        if model.unfit(case.stage.course, curve) is None:
            fits.append(least_squares(residuals, centre, max_nfev=300).x)
    return constants._replace(tail=float(np.median(np.array(fits)[:, 2])), onset=float(np.median(np.array(fits)[:, 3])))


def _exchange(made: Sequence[Example], constants: Constants, ridge: float = 1e-3) -> Constants:
    """Exchange and recovery by least squares; the level of each run moves with them a little, so three rounds."""
    for _ in range(3):
        rows, targets = [], []
        for each in made:
            level, exchange, _ = model.old_level(each.course, each.old, [each.learned], constants)
            further, root = each.learned.further, np.sqrt(each.course.replay)
            own = exchange - model.exchange_rate(each.course, constants)
            back = level * model.regained(each.course, each.old)
            rows.append([further, root * further, root * back])
            targets.append(each.truth_old - level - own * further)
        table = np.array(rows)
        found = np.linalg.solve(table.T @ table + ridge * np.eye(3), table.T @ np.array(targets)).tolist()
        constants = constants._replace(exchange=(found[0], found[1]), recovery=found[2])
    return constants


def _spread(errors: np.ndarray) -> tuple[float, ...]:
    """Sizes of the parts of a spread under which the errors are most likely, as a normal distribution has it."""
    from scipy.optimize import minimize

    off, parts, scatter = errors[:, 0], errors[:, 1:-1], errors[:, -1]

    def unlikely(logs: np.ndarray) -> float:
        sizes = np.exp(2 * logs)
        variance = sizes[0] + scatter**2 + (parts**2) @ sizes[1:]
        return float(np.sum(np.log(variance) + off**2 / variance) / 2)

    start = np.log(np.full(1 + parts.shape[1], 0.05))
    bounds = [(np.log(0.005), np.log(1.0)), *[(np.log(LEAST_SHARE), np.log(1.0))] * parts.shape[1]]
    return tuple(float(value) for value in np.exp(minimize(unlikely, start, bounds=bounds).x))


def _width(errors: np.ndarray, spread: Sequence[float]) -> float:
    """Spreads that hold nearly all of the errors of ways that were left out, and more."""
    sizes = np.array(spread)
    deviation = np.sqrt(sizes[0] ** 2 + errors[:, -1] ** 2 + (errors[:, 1:-1] ** 2) @ sizes[1:] ** 2)
    return WIDER * float(np.quantile(np.abs(errors[:, 0]) / deviation, HELD))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--cut", type=float, default=0.25, help="share of the stage that is seen")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="where the rows go, or are")
    parser.add_argument("--summary", action="store_true", help="print the table of the CSV alone")
    parser.add_argument("--tune", action="store_true", help="print constants for these runs")
    given = parser.parse_args(arguments)
    if given.tune:
        print(_shown(tune(cases(given.runs))))
        return
    if not given.summary:
        rows = judge(cases(given.runs), given.cut)
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="")
            writer.writeheader()
            writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    with given.csv.open(newline="") as file:
        sys.stdout.write("\n".join(summary(list(csv.DictReader(file)))) + "\n")


def _short(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value


def _shown(constants: Constants) -> str:
    """The constants as they stand in the source."""

    def rounded(value: object) -> object:
        return tuple(map(rounded, value)) if isinstance(value, tuple) else round(float(value), 4)  # type: ignore[arg-type]

    return f"Constants{rounded(tuple(constants))}"


if __name__ == "__main__":
    main()
