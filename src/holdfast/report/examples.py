"""The examples that were most surely forgotten: right with a wide margin once, wrong with a wide margin now."""

from dataclasses import dataclass

from holdfast.errors import UserError
from holdfast.evaluation.results import Example, forgotten
from holdfast.report.run_files import Run


@dataclass(frozen=True)
class LostExample:
    """An example, how sure the right answer was and how sure the wrong one is now, in nats."""

    task: str
    before: Example
    after: Example
    sureness: float


def margin(example: Example) -> float:
    """By how much the right answer is likelier than the best of the others; 0 where that is not known.

    >>> margin(Example("1", "", "a", "a", True, choices=("a", "b"), label=0, scores=(-1.0, -3.0)))
    2.0
    """
    label, scores = example.label, example.scores
    if label is None or label >= len(scores) or scores[label] is None:
        return 0.0
    others = [score for index, score in enumerate(scores) if index != label and score is not None]
    return float(scores[label] or 0.0) - max(others) if others else 0.0


def surely_forgotten(run: Run, most: int = 10) -> list[LostExample]:
    """Of all tasks those lost since the row after their own stage, the surest of both answers first."""
    matrix = run.matrix
    if matrix is None:
        return []
    found = []
    for task, home in zip(matrix.tasks, matrix.homes, strict=True):
        point = run.row_point(home) if home is not None else None
        if task not in run.facts or point is None:
            continue
        try:
            lost = forgotten(run.path, task, known_step=point.step).lost
        except (UserError, OSError, ValueError, KeyError, TypeError):
            continue  # not evaluated since, or the files were not copied along
        for before, after in lost:
            found.append(LostExample(task, before, after, min(margin(before), -margin(after))))
    ordered = sorted(found, key=lambda each: -each.sureness)
    share = max(3, most // max(len({each.task for each in found}), 1))
    # A task that lost much must not push all others out.
    kept = [each for task in dict.fromkeys(each.task for each in ordered) for each in _of(ordered, task)[:share]]
    return sorted(kept, key=lambda each: -each.sureness)[:most]


def _of(found: list[LostExample], task: str) -> list[LostExample]:
    return [each for each in found if each.task == task]
