"""Pictures of several runs: forgetting curves over each other, matrices and their differences, the Pareto plane."""

from collections.abc import Iterable, Sequence

from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell, Rows, ScoreMatrix
from holdfast.evaluation.statistics import pareto
from holdfast.report.drawing.chart import Chart, Line, Panel, Span, Value, number
from holdfast.report.drawing.heat import MEASURE_NAMES, Heat, HeatCell, column_order, shade
from holdfast.report.export import better
from holdfast.report.groups import Group, mean_and_spread
from holdfast.report.pictures.curves import curves
from holdfast.report.run_files import Run
from holdfast.report.verdicts import UNITS

FEWEST = 3  # points of a plane: two say no more than the table


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
    tasks = _in_order(groups, dict.fromkeys(task for runs in found for each in runs for task in each))
    panels = []
    for task in tasks:
        lines = []
        for index, (group, runs) in enumerate(zip(groups, found, strict=True)):
            line = _mean_line(group.name, [each[task] for each in runs if task in each], index)
            if line is not None:
                lines.append(line)
        panels.append(Panel(f"{task}, {UNITS[measure]} ({better(measure)} is better)", lines, 150))
    if not panels:
        return None
    longest = max((run for group in groups for run in group.runs), key=lambda run: run.tokens)
    stages = longest.timeline.stages
    same = len({tuple((s.name, s.start) for s in run.timeline.stages) for g in groups for run in g.runs}) == 1
    return Chart(
        f"curves_{measure}",
        f"Forgetting curves: {UNITS[measure]}",
        "One panel a task, one line a group of runs"
        + ("; bands are one standard deviation over seeds." if any(len(g.judged) > 1 for g in groups) else "."),
        f"{UNITS[measure]} of {len(panels)} tasks over tokens, for {len(groups)} groups of runs.",
        panels,
        spans=[Span(stage.start, stage.end, stage.name) for stage in stages] if same else (),
        x_range=(0.0, float(max(longest.tokens, 1))),
    )


def _in_order(groups: Sequence[Group], tasks: Iterable[str]) -> list[str]:
    """Tasks in order of their stages in the first run that has a matrix."""
    matrix = next((run.matrix for group in groups for run in group.judged if run.matrix is not None), None)
    order = [matrix.tasks[column] for column in column_order(matrix)] if matrix is not None else []
    return sorted(tasks, key=lambda task: order.index(task) if task in order else len(order))


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


def group_matrix(group: Group, measure: str) -> ScoreMatrix | None:
    """The mean matrix over the seeds of a group, columns in order of their stages; a cell that a seed lacks is None."""
    matrices = [run.matrix for run in group.judged if run.matrix is not None and measure in run.matrix.measures]
    if not matrices or len({(each.stages, each.tasks) for each in matrices}) != 1:
        return None
    first = matrices[0]
    columns = [
        column
        for column in column_order(first)
        if any(row[column] is not None for each in matrices for row in each.measures[measure])
    ]
    rows: list[tuple[Cell, ...]] = []
    for row in range(len(first.stages) + 1):
        line: list[Cell] = []
        for column in columns:
            values = [each.measures[measure][row][column] for each in matrices]
            known = [value for value in values if value is not None]
            line.append(sum(known) / len(known) if len(known) == len(values) else None)
        rows.append(tuple(line))
    tasks = tuple(first.tasks[column] for column in columns)
    homes = tuple(first.homes[column] for column in columns)
    return ScoreMatrix(first.stages, tasks, homes, {measure: tuple(rows)})


def group_heats(groups: Sequence[Group], measure: str) -> list[Heat]:
    """The mean matrix of every group, then each one's difference from the first where they have the same shape."""
    made: list[Heat] = []
    first: tuple[str, ScoreMatrix] | None = None
    for index, group in enumerate(groups):
        matrix = group_matrix(group, measure)
        if matrix is None:
            continue
        rows = matrix.measures[measure]
        names = ["before training", *(f"after {stage}" for stage in matrix.stages)]
        shades = [
            [shade(value, [r[column] for r in rows], measure) for column, value in enumerate(row)] for row in rows
        ]
        title = f"{group.name}: {MEASURE_NAMES[measure]} ({better(measure)} is better)"
        made.append(Heat(f"group{index}_{measure}", title, "", names, matrix.tasks, _cells(matrix, rows, shades)))
        if first is None:
            first = (group.name, matrix)
        elif (matrix.tasks, len(rows)) == (first[1].tasks, len(first[1].measures[measure])):
            title = f"{group.name} minus {first[0]}: {MEASURE_NAMES[measure]}"
            changes = _changes(first[1], matrix, measure)
            made.append(Heat(f"difference{index}_{measure}", title, "", names, matrix.tasks, changes, diverging=True))
    return made


def _cells(matrix: ScoreMatrix, values: Rows, shades: Sequence[Sequence[float]]) -> list[list[HeatCell]]:
    return [
        [
            HeatCell(value, None, depth, home == row)
            for value, depth, home in zip(line, depths, matrix.homes, strict=True)
        ]
        for row, (line, depths) in enumerate(zip(values, shades, strict=True))
    ]


def _changes(first: ScoreMatrix, second: ScoreMatrix, measure: str) -> list[list[HeatCell]]:
    sign = -1.0 if measure in LOWER_IS_BETTER else 1.0
    changes = tuple(
        tuple(None if a is None or b is None else b - a for a, b in zip(*rows, strict=True))
        for rows in zip(first.measures[measure], second.measures[measure], strict=True)
    )
    largest = max((abs(value) for row in changes for value in row if value is not None), default=0.0) or 1.0
    return _cells(second, changes, [[sign * (value or 0.0) / largest for value in row] for row in changes])


def new_and_old(run: Run, measure: str) -> tuple[float, float] | None:
    """The mean score of later tasks right after their stage, and the mean change of earlier ones since theirs.

    Both in the unit of the measure: of a loss, lower is better for both.
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
    sign = -1.0 if measure in LOWER_IS_BETTER else 1.0
    return sign * sum(learned) / len(learned), sign * sum(kept) / len(kept)


def plane(groups: Sequence[Group], names: dict[Run, str], measure: str) -> Chart | None:
    """One point a run: new against old, and the front that no run surpasses in both, where there is one."""
    lines, everything = [], []
    for index, group in enumerate(groups):
        found = [(run, place) for run in group.judged if (place := new_and_old(run, measure)) is not None]
        if found:
            tips = [
                f"{names[run]}: new {number(x)}, change of the old {number(y)} ({UNITS[measure]}, {better(measure)} is "
                "better)"
                for run, (x, y) in found
            ]
            x, y = [place[0] for _, place in found], [place[1] for _, place in found]
            lines.append(Line(group.name, x, y, index, "points", tips=tips))
            everything += [place for _, place in found]
    if len(everything) < FEWEST:
        return None
    lower = measure in LOWER_IS_BETTER
    sign = -1.0 if lower else 1.0
    front = [(sign * x, sign * y) for x, y in pareto([(sign * x, sign * y) for x, y in everything])]
    drawn = len(front) > 1
    if drawn:
        lines.insert(0, Line("front", [x for x, _ in front], [y for _, y in front], len(groups), "line", dash=True))
    corner = "down and to the left" if lower else "up and to the right"
    side = "below" if lower else "above"
    return Chart(
        f"plane_{measure}",
        f"Learned new against kept old: {UNITS[measure]}",
        f"Each point is a run; {corner} is better. A smaller learning rate also forgets less: a method is better only "
        f"if it keeps more at the same learning, that is {side} the line that the others make."
        + (" The dashed front joins the runs that none surpasses in both." if drawn else ""),
        f"Scatter of {len(everything)} runs: new data after its stage against the change of the old since its own.",
        [Panel(f"old: change since its own stage, {UNITS[measure]}, {better(measure)} is better", lines, 300, level=0)],
        x_label=f"new: right after its stage, {UNITS[measure]}, {better(measure)} is better",
        scatter=True,
    )
