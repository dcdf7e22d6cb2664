"""Pictures of several runs: forgetting curves over each other, matrices and their differences, the Pareto plane."""

from collections.abc import Sequence

from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell
from holdfast.evaluation.statistics import pareto
from holdfast.report.chart import Chart, Line, Panel, Span, Value, number
from holdfast.report.groups import Group, mean_and_spread
from holdfast.report.heat import MEASURE_NAMES, Heat, HeatCell, shade
from holdfast.report.pictures.forgetting import curves
from holdfast.report.run_files import Run

UNITS = {"accuracy": "accuracy", "bits_per_byte": "bits per byte", "nll": "nats per token"}


def shared_measures(groups: Sequence[Group]) -> list[str]:
    """The measures that every run has; bits per byte first, which all datasets have."""
    ordered = ("bits_per_byte", "accuracy", "nll")
    return [name for name in ordered if all(_measured(run, name) for group in groups for run in group.judged)]


def _measured(run: Run, measure: str) -> bool:
    rows = run.matrix.measures.get(measure, ()) if run.matrix is not None else ()
    return any(value is not None for row in rows for value in row)


def overlaid(groups: Sequence[Group], measure: str) -> Chart | None:
    """The curve of every task in a panel of its own, one line a group, its seeds as mean and spread."""
    found = [[curves(run, measure) for run in group.judged] for group in groups]
    tasks = dict.fromkeys(task for runs in found for each in runs for task in each)
    panels = []
    for task in tasks:
        lines = []
        for index, (group, runs) in enumerate(zip(groups, found, strict=True)):
            line = _mean_line(group.name, [each[task] for each in runs if task in each], index)
            if line is not None:
                lines.append(line)
        panels.append(Panel(f"{task}, {UNITS[measure]}", lines, 150))
    if not panels:
        return None
    longest = max((run for group in groups for run in group.runs), key=lambda run: run.tokens)
    stages = longest.timeline.stages
    same = len({tuple((s.name, s.start) for s in run.timeline.stages) for g in groups for run in g.runs}) == 1
    return Chart(
        f"curves_{measure}",
        f"Forgetting curves: {UNITS[measure]}",
        "One panel a task, one line a group of runs; bands are one standard deviation over seeds.",
        f"{UNITS[measure]} of {len(panels)} tasks over tokens, for {len(groups)} groups of runs.",
        panels,
        spans=[Span(stage.start, stage.end, stage.name) for stage in stages] if same else (),
        x_range=(0.0, float(max(longest.tokens, 1))),
    )


def _mean_line(name: str, found: Sequence[dict[float, Value]], color: int) -> Line | None:
    shared = sorted(set.intersection(*(set(each) for each in found))) if found else []
    x, y, low, high = [], [], [], []
    for at in shared:
        known = [value for each in found if (value := each[at]) is not None]
        if len(known) == len(found):
            mean, spread = mean_and_spread(known)
            x.append(at)
            y.append(mean)
            low.append(mean - (spread or 0.0))
            high.append(mean + (spread or 0.0))
    if not x:
        return None
    bands = (low, high) if len(found) > 1 else ((), ())
    return Line(name, x, y, color, "both" if len(x) < 40 else "line", low=bands[0], high=bands[1])


def group_matrix(group: Group, measure: str) -> tuple[Sequence[str], Sequence[str], list[list[Cell]]] | None:
    """Stages, tasks and the mean matrix over the seeds of a group; a cell that a seed lacks is None."""
    matrices = [run.matrix for run in group.judged if run.matrix is not None and measure in run.matrix.measures]
    if not matrices or len({(each.stages, each.tasks) for each in matrices}) != 1:
        return None
    first = matrices[0]
    rows: list[list[Cell]] = []
    for row in range(len(first.stages) + 1):
        line: list[Cell] = []
        for column in range(len(first.tasks)):
            values = [each.measures[measure][row][column] for each in matrices]
            known = [value for value in values if value is not None]
            line.append(sum(known) / len(known) if len(known) == len(values) else None)
        rows.append(line)
    return first.stages, first.tasks, rows


def group_heats(groups: Sequence[Group], measure: str) -> list[Heat]:
    """The mean matrix of every group, then each one's difference from the first where they have the same shape."""
    made, first = [], None
    for index, group in enumerate(groups):
        found = group_matrix(group, measure)
        if found is None:
            continue
        stages, tasks, rows = found
        names = ["before training", *(f"after {stage}" for stage in stages)]
        cells = [
            [
                HeatCell(value, None, shade(value, [r[column] for r in rows], measure))
                for column, value in enumerate(row)
            ]
            for row in rows
        ]
        title = f"{group.name}: {MEASURE_NAMES[measure]}"
        made.append(Heat(f"group{index}_{measure}", title, "", names, tasks, cells))
        if first is None:
            first = (group.name, tasks, len(rows), rows)
        elif (tasks, len(rows)) == first[1:3]:
            title = f"{group.name} minus {first[0]}: {MEASURE_NAMES[measure]}"
            changes = _changes(first[3], rows, measure)
            made.append(Heat(f"difference{index}_{measure}", title, "", names, tasks, changes, diverging=True))
    return made


def _changes(first: list[list[Cell]], second: list[list[Cell]], measure: str) -> list[list[HeatCell]]:
    sign = -1.0 if measure in LOWER_IS_BETTER else 1.0
    changes = [
        [None if a is None or b is None else b - a for a, b in zip(*rows, strict=True)]
        for rows in zip(first, second, strict=True)
    ]
    largest = max((abs(value) for row in changes for value in row if value is not None), default=0.0) or 1.0
    return [[HeatCell(value, None, sign * (value or 0.0) / largest) for value in row] for row in changes]


def learned_and_kept(run: Run, measure: str) -> tuple[float, float] | None:
    """How well new data was learned, and how much of the old was kept: higher is better for both.

    Learned is the mean score of tasks of later stages right after their stage; kept is the mean change of earlier
    tasks from their stage to the end (backward transfer), 0 when nothing was lost.
    """
    matrix = run.matrix
    if matrix is None or measure not in matrix.measures:
        return None
    terms = matrix.per_task(measure)
    homes = dict(zip(matrix.tasks, matrix.homes, strict=True))
    new = [terms[task]["learning_accuracy"] for task, home in homes.items() if home is not None and home >= 2]
    learned = [value for value in new if value is not None]
    kept = [value for each in terms.values() if (value := each["backward_transfer"]) is not None]
    if not learned or not kept:
        return None
    return sum(learned) / len(learned), sum(kept) / len(kept)


def plane(groups: Sequence[Group], names: dict[Run, str], measure: str) -> Chart | None:
    """One point a run: learned new against kept old, and the front that no run surpasses in both."""
    lines, everything = [], []
    for index, group in enumerate(groups):
        found = [(run, place) for run in group.judged if (place := learned_and_kept(run, measure)) is not None]
        if found:
            tips = [
                f"{names[run]}: learned new {number(x)}, kept old {number(y)} ({UNITS[measure]}, higher is better)"
                for run, (x, y) in found
            ]
            x, y = [place[0] for _, place in found], [place[1] for _, place in found]
            lines.append(Line(group.name, x, y, index, "points", tips=tips))
            everything += [place for _, place in found]
    if not lines:
        return None
    front = pareto(everything)
    sign = "−" if measure in LOWER_IS_BETTER else ""
    lines.insert(0, Line("front", [x for x, _ in front], [y for _, y in front], len(groups), "line", dash=True))
    return Chart(
        f"plane_{measure}",
        f"Learned new against kept old: {UNITS[measure]}",
        "Each point is a run; up and to the right is better. A smaller learning rate also forgets less: a method is "
        "better only if it keeps more at the same learning, that is above the front of the others.",
        f"Scatter of {len(everything)} runs: score on new data after its stage against backward transfer.",
        [Panel(f"kept old: backward transfer ({UNITS[measure]})", lines, 300, level=0)],
        x_label=f"learned new: score right after its stage ({sign}{UNITS[measure]})",
        scatter=True,
    )
