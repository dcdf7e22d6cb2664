"""The examples that were most surely forgotten: right with a wide margin once, wrong with a wide margin now."""

from dataclasses import dataclass

from holdfast.errors import UserError
from holdfast.evaluation.harness_tasks import is_harness
from holdfast.evaluation.results import Example, forgotten
from holdfast.report.run_files import Run


@dataclass(frozen=True)
class LostExample:
    """An example, how sure the right answer was and how sure the wrong one is now, in nats."""

    task: str
    before: Example
    after: Example
    sureness: float


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
    kept = [each for task in dict.fromkeys(each.task for each in ordered) for each in _of(ordered, task)[:share]]
    return sorted(kept, key=lambda each: -each.sureness)[:most]


def _of(found: list[LostExample], task: str) -> list[LostExample]:
    return [each for each in found if each.task == task]
