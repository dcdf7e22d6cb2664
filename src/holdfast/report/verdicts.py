"""What became of each task: learned in its stage or not, forgotten since or not; in one sentence for all."""

from dataclasses import dataclass
from pathlib import Path

from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell, Interval, Point, ScoreMatrix
from holdfast.evaluation.results import FOLDER, file_name, read_examples
from holdfast.evaluation.statistics import Difference, paired_difference
from holdfast.report.chart import number
from holdfast.report.pictures.axis import told
from holdfast.report.run_files import Run

UNITS = {"accuracy": "accuracy", "bits_per_byte": "bits per byte", "nll": "nats per token"}
GUESSED = 0.02
ORDER = ("accuracy", "bits_per_byte", "nll")


@dataclass(frozen=True)
class Verdict:
    """One task in one measure.

    Args:
        before: its score before its stage began, `after` at the end of it, `now` at the latest evaluation.
        word: `learned`, `forgotten`, `not learned`, or `waiting` where its stage is still to come.
        change: now minus after, better upwards; None where nothing came after its stage yet.
        interval: of the change, paired over examples where these are kept; else None.
    """

    task: str
    measure: str
    home: str
    before: Cell
    after: Cell
    now: Cell
    word: str
    change: Cell = None
    interval: Interval | None = None

    @property
    def scores(self) -> str:
        """Its way in figures."""
        way = [number(value, 3) for value in (self.before, self.after) if value is not None]
        return f"{UNITS[self.measure]} {' → '.join(way)}"


def main_measure(matrix: ScoreMatrix, task: str) -> str | None:
    """The measure that a task is judged by: accuracy where it has one, else bits per byte, else NLL."""
    column = matrix.tasks.index(task)
    for measure in ORDER:
        if any(row[column] is not None for row in matrix.measures.get(measure, ())):
            return measure
    return None


def verdicts(run: Run) -> list[Verdict]:
    """What became of every task that has a stage of its own."""
    matrix = run.matrix
    if matrix is None:
        return []
    rows = sorted({point.row for point in run.points if point.row is not None})
    made = []
    for task, home in zip(matrix.tasks, matrix.homes, strict=True):
        measure = main_measure(matrix, task)
        if home is not None and measure is not None and rows:
            made.append(_verdict(run, matrix, task, home, measure, rows[-1]))
    return made


def _verdict(run: Run, matrix: ScoreMatrix, task: str, home: int, measure: str, last: int) -> Verdict:
    column = matrix.tasks.index(task)
    values = matrix.measures[measure]
    before, after, now = values[home - 1][column], values[home][column], values[last][column]
    stage = matrix.stages[home - 1]
    if after is None or now is None:
        return Verdict(task, measure, stage, before, after, now, "waiting")
    sign = -1.0 if measure in LOWER_IS_BETTER else 1.0
    change = sign * (now - after) if home < last else None
    if (measure == "accuracy" and task in matrix.not_learned) or not _rose(run, task, measure, home):
        return Verdict(task, measure, stage, before, after, now, "not learned", change)
    interval, worse = None, False
    if change is not None:
        difference = _paired(run, task, home, last) if measure == "accuracy" else None
        if difference is not None:
            interval, worse = (difference.low, difference.high), difference.high < 0
        else:
            worse = change < 0 and _apart(run.row_point(home), run.row_point(last), task, measure)
    return Verdict(task, measure, stage, before, after, now, "forgotten" if worse else "learned", change, interval)


def _rose(run: Run, task: str, measure: str, home: int) -> bool:
    """Whether a stage made its task better than chance alone explains."""
    first, second = run.row_point(home - 1), run.row_point(home)
    if first is None or second is None:
        return True
    old, new = first.scores.get(task, {}).get(measure), second.scores.get(task, {}).get(measure)
    if old is None or new is None:
        return True
    better = new < old if measure in LOWER_IS_BETTER else new > old
    # A task may have been learned before its stage, by transfer: then above chance is enough.
    return (better and _apart(first, second, task, measure)) or _above_chance(run, second, task, measure)


def _above_chance(run: Run, point: Point, task: str, measure: str) -> bool:
    chance = run.facts.get(task, {}).get("chance")
    interval = point.intervals.get(task, {}).get(measure)
    return measure == "accuracy" and chance is not None and interval is not None and interval[0] > chance


def _apart(first: Point | None, second: Point | None, task: str, measure: str) -> bool:
    """Whether two intervals leave each other alone; a score without one is given 2 % to each side."""
    if first is None or second is None:
        return True
    one, two = (_interval(point, task, measure) for point in (first, second))
    return one is None or two is None or one[1] < two[0] or two[1] < one[0]


def _interval(point: Point, task: str, measure: str) -> Interval | None:
    score, given = point.scores.get(task, {}).get(measure), point.intervals.get(task, {}).get(measure)
    if given is not None or score is None:
        return given
    return score * (1 - GUESSED), score * (1 + GUESSED)


def _paired(run: Run, task: str, home: int, last: int) -> Difference | None:
    """The change of a task's accuracy over the same questions, where the examples were kept."""
    points = run.row_point(home), run.row_point(last)
    if points[0] is None or points[1] is None:
        return None
    paths = [example_file(run.path, point.step, task) for point in points if point is not None]
    try:
        first, second = ({each.id: each for each in read_examples(path)} for path in paths)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ids = [name for name in first if name in second]
    if len(ids) < 2:
        return None
    groups = [first[name].group or name for name in ids]
    return paired_difference([first[name].right for name in ids], [second[name].right for name in ids], groups)


def example_file(run_dir: Path, step: int, task: str) -> Path:
    """Where the examples of a task at a step are."""
    return run_dir / FOLDER / str(step) / file_name(task)


def sentence(run: Run, found: list[Verdict] | None = None) -> str:
    """What was learned and what was forgotten, in one sentence."""
    found = verdicts(run) if found is None else found
    timeline = run.timeline
    head = {
        "finished": "Finished",
        "running": f"Still running, at {_share(run)}",
        "unfinished": f"Unfinished, stopped at {_share(run)}",
    }[run.state]
    if not found:
        stages = len(timeline.stages)
        return f"{head}: {stages or 'no'} stage{'s' if stages != 1 else ''}; nothing was evaluated."
    learned = [f"{each.task} ({each.scores})" for each in found if each.word in ("learned", "forgotten")]
    lost = [f"{each.task} ({_loss(each)})" for each in found if each.word == "forgotten"]
    missed = [f"{each.task} ({each.scores})" for each in found if each.word == "not learned"]
    waiting = [each.task for each in found if each.word == "waiting"]
    later = [each for each in found if each.change is not None]
    parts = [f"learned {told(learned)}" if learned else "learned nothing that shows"]
    if lost:
        parts.append(f"forgot {told(lost)}")
    elif later:
        parts.append("forgot nothing that shows")
    if missed:
        parts.append(f"did not learn {told(missed)}")
    if waiting:
        parts.append(f"still to come {told(waiting)}")
    return f"{head}: {'; '.join(parts)}."


def _share(run: Run) -> str:
    total = run.timeline.total_steps
    return f"step {run.step:,} of {total:,}" if total else f"step {run.step:,}"


def _loss(each: Verdict) -> str:
    return f"{UNITS[each.measure]} {number(each.after, 3)} → {number(each.now, 3)}"
