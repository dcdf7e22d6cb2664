"""The score matrix of a run, its metrics, and `results.json`.

A matrix has T + 1 rows (row 0 before training, row i after stage i) and one column per task; stages are
counted from 1 here, as on the mathematics page. A cell that was not measured is None, never 0.

Matrices hold what was measured: accuracies as they are, losses as positive numbers. Metrics are of
higher-is-better scores R: R is the accuracy, or minus the loss. So for every measure a positive forgetting
means that the model became worse, a positive transfer that it became better, and the `average` and
`learning_accuracy` of a loss are negative.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.evaluation.statistics import better_than
from holdfast.types import Json, JsonView

LOWER_IS_BETTER = frozenset({"nll", "bits_per_byte", "kl_forward", "kl_reverse", "loss", "perplexity"})
METRICS = ("average", "backward_transfer", "forward_transfer", "forgetting", "learning_accuracy")

Cell = float | None
Rows = tuple[tuple[Cell, ...], ...]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """One evaluation of the model.

    Args:
        step: optimizer steps completed.
        scores: measures of each task; what was not measured is absent or None.
        row: the row of the matrix that this is, if any.
        stage: the stage that the model is in, counted from 0.
        at: why it was measured, such as `start`, `fade_start`, `boundary`, `fade_end`, `end`, `probe`.
        tokens: tokens seen.
        intervals: confidence intervals of the scores that have one.
        counts: how many documents, or groups of questions, each interval is over.
        facts: of each task what its scores are judged by: chance, majority, number of questions.
    """

    step: int
    scores: Mapping[str, Mapping[str, Cell]]
    row: int | None = None
    stage: int | None = None
    at: str = ""
    tokens: int = 0
    intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    facts: Mapping[str, JsonView] = field(default_factory=dict)

    def to_dict(self) -> Json:
        """The point as JSON can hold it; non-finite scores are null."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "row": self.row,
            "stage": self.stage,
            "at": self.at,
            "scores": {
                task: {measure: finite(value) for measure, value in measures.items()}
                for task, measures in self.scores.items()
            },
            "intervals": {
                task: {measure: [float(low), float(high)] for measure, (low, high) in measures.items()}
                for task, measures in self.intervals.items()
            },
            "counts": {task: dict(counts) for task, counts in self.counts.items()},
            "facts": {task: dict(facts) for task, facts in self.facts.items()},
        }

    @classmethod
    def from_dict(cls, record: JsonView) -> "Point":
        """The point of a record that `to_dict` made; keys of other kinds of record are left alone."""
        intervals = {
            task: {measure: (low, high) for measure, (low, high) in measures.items()}
            for task, measures in record.get("intervals", {}).items()
        }
        return cls(
            step=record["step"],
            scores=record["scores"],
            row=record.get("row"),
            stage=record.get("stage"),
            at=record.get("at", ""),
            tokens=record.get("tokens", 0),
            intervals=intervals,
            counts=record.get("counts") or {},
            facts=record.get("facts") or {},
        )

    def above_level(self, task: str) -> bool | None:
        """Whether a task's accuracy is above both chance and the majority class, beyond luck; None where not known.

        A model that gives one answer to everything is not, whatever it scores.
        """
        facts, score = self.facts.get(task, {}), self.scores.get(task, {}).get("accuracy")
        interval, count = self.intervals.get(task, {}).get("accuracy"), facts.get("count")
        known = [level for level in (facts.get("chance"), facts.get("majority")) if level is not None]
        if score is None or interval is None or not count or not known:
            return None
        return not facts.get("one_class") and better_than(score, interval[0], int(count), max(known))


def finite(value: Any) -> Cell:
    """A number as a float, or None where there is none.

    >>> finite(1), finite(float("nan")), finite(None)
    (1.0, None, None)
    """
    return float(value) if value is not None and math.isfinite(value) else None


def task_names(evaluations: Sequence[str], stage_datasets: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All tasks of a run: its evaluations and the datasets of its stages, each once, in order of first appearance.

    >>> task_names(["sst2"], [["fineweb"], ["sst2", "fineweb"]])
    ('sst2', 'fineweb')
    """
    return tuple(dict.fromkeys([*evaluations, *(name for names in stage_datasets for name in names)]))


def task_homes(tasks: Sequence[str], stage_datasets: Sequence[Sequence[str]]) -> tuple[int | None, ...]:
    """For each task the first stage, counted from 1, whose mixture holds the dataset of its name.

    >>> task_homes(["sst2", "fineweb", "siqa"], [["fineweb"], ["sst2", "fineweb"]])
    (2, 1, None)
    """
    stages = list(enumerate(stage_datasets, start=1))
    return tuple(next((i for i, names in stages if task in names), None) for task in tasks)


def tasks_not_learned(points: Iterable[Point], tasks: Sequence[str], homes: Sequence[int | None]) -> frozenset[str]:
    """Tasks whose accuracy is not above chance and majority after their own stage, and was not before it either.

    What was known before its stage can be forgotten. Without intervals nothing is said of a task.
    """
    rows = {point.row: point for point in points if point.row is not None}

    def above(row: int, task: str) -> bool | None:
        return rows[row].above_level(task) if row in rows else None

    return frozenset(
        task
        for task, home in zip(tasks, homes, strict=True)
        if home is not None and above(home, task) is False and not above(home - 1, task)
    )


@dataclass(frozen=True)
class ScoreMatrix:
    """Scores of all tasks after each stage, and the metrics of continual learning made from them.

    Args:
        stages: names of the T stages.
        tasks: names of the columns.
        homes: for each task its stage, counted from 1, or None.
        measures: for each measure T + 1 rows of raw values.
        not_learned: tasks that did not rise above chance and majority in their stage; they are left out of the mean
            forgetting of accuracy.
        baseline: raw scores b_j by measure and task, for forward transfer; row 0 where not given.
    """

    stages: tuple[str, ...]
    tasks: tuple[str, ...]
    homes: tuple[int | None, ...]
    measures: Mapping[str, Rows]
    not_learned: frozenset[str] = frozenset()
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.homes) == len(self.tasks), "one home for each task"
        assert all(home is None or 1 <= home <= len(self.stages) for home in self.homes), "homes are stages"
        for rows in self.measures.values():
            assert len(rows) == len(self.stages) + 1, "one row before training and one after each stage"
            assert all(len(row) == len(self.tasks) for row in rows), "one column for each task"

    @classmethod
    def from_points(
        cls,
        points: Iterable[Point],
        stages: Sequence[str],
        tasks: Sequence[str],
        homes: Sequence[int | None],
        not_learned: Iterable[str] = (),
        baseline: Mapping[str, Mapping[str, float]] | None = None,
    ) -> "ScoreMatrix":
        """The matrix of the points that are rows; of two points of one row the later one counts."""
        by_row = {point.row: point.scores for point in points if point.row is not None}
        assert all(0 <= row <= len(stages) for row in by_row), f"rows 0 to {len(stages)}"
        names = dict.fromkeys(name for scores in by_row.values() for task in scores.values() for name in task)
        measures = {
            name: tuple(
                tuple(finite(by_row.get(row, {}).get(task, {}).get(name)) for task in tasks)
                for row in range(len(stages) + 1)
            )
            for name in names
        }
        return cls(tuple(stages), tuple(tasks), tuple(homes), measures, frozenset(not_learned), dict(baseline or {}))

    def per_task(self, measure: str) -> dict[str, dict[str, Cell]]:
        """For each task the terms whose means are the metrics; None where a term is not defined or not measured."""
        return {task: self._terms(measure, column) for column, task in enumerate(self.tasks)}

    def metrics(self, measure: str) -> dict[str, Cell]:
        """The metrics of one measure, over higher-is-better scores; a mean over nothing is None."""
        terms = self.per_task(measure)
        if measure == "accuracy":
            for task in self.not_learned & terms.keys():
                terms[task] = {**terms[task], "forgetting": None}
        return {name: _mean(task[name] for task in terms.values()) for name in METRICS}

    def _terms(self, measure: str, column: int) -> dict[str, Cell]:
        last, home = len(self.stages), self.homes[column]
        score = self._scores(measure, column)
        terms: dict[str, Cell] = dict.fromkeys(METRICS)
        terms["average"] = score(last)
        if home is None:
            return terms
        terms["learning_accuracy"] = score(home)
        if home >= 2:
            terms["forward_transfer"] = _minus(score(home - 1), self._baseline(measure, column))
        if home < last:
            seen = [value for row in range(1, last) if (value := score(row)) is not None]
            terms["backward_transfer"] = _minus(score(last), score(home))
            terms["forgetting"] = _minus(max(seen, default=None), score(last))
        return terms

    def _scores(self, measure: str, column: int) -> Callable[[int], Cell]:
        """The higher-is-better score of a task as a function of the row."""
        sign = -1.0 if measure in LOWER_IS_BETTER else 1.0
        rows = self.measures[measure]

        def score(row: int) -> Cell:
            value = rows[row][column]
            return None if value is None else sign * value

        return score

    def _baseline(self, measure: str, column: int) -> Cell:
        given = self.baseline.get(measure, {}).get(self.tasks[column])
        if given is None:
            return self._scores(measure, column)(0)
        return -given if measure in LOWER_IS_BETTER else given

    def to_results(self, points: Iterable[Point] = (), **extra: Any) -> Json:
        """The content of `results.json`.

        Args:
            points: every evaluation of the run, rows of the matrix and others, for curves.
            extra: further keys, such as a noise floor.
        """
        return {
            "stages": list(self.stages),
            "tasks": list(self.tasks),
            "homes": list(self.homes),
            "not_learned": [task for task in self.tasks if task in self.not_learned],
            "baseline": {name: dict(scores) for name, scores in self.baseline.items()},
            "matrix": {name: [list(row) for row in rows] for name, rows in self.measures.items()},
            "metrics": {name: self.metrics(name) for name in self.measures},
            "points": [point.to_dict() for point in points],
            **extra,
        }

    @classmethod
    def from_results(cls, results: JsonView) -> "ScoreMatrix":
        """The matrix in the content of a `results.json`."""
        return cls(
            stages=tuple(results["stages"]),
            tasks=tuple(results["tasks"]),
            homes=tuple(results.get("homes", [None] * len(results["tasks"]))),
            measures={name: tuple(map(tuple, rows)) for name, rows in results["matrix"].items()},
            not_learned=frozenset(results.get("not_learned", ())),
            baseline=results.get("baseline", {}),
        )


def _minus(first: Cell, second: Cell) -> Cell:
    return None if first is None or second is None else first - second


def _mean(values: Iterable[Cell]) -> Cell:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
