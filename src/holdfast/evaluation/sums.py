"""Sums by row and by document of one evaluation, and its answers: what every interval is made of.

They are kept as `evaluations/STEP/sums.json`, so that each interval of `results.json` can be computed again, and two
evaluations compared over the same rows and questions: a change is judged by paired differences, never by whether two
intervals overlap. Nothing here imports JAX.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from holdfast.evaluation import statistics
from holdfast.evaluation.matrix import finite
from holdfast.execution.files import read_regular, write_atomically
from holdfast.types import Json, JsonView

SUMS = "sums.json"
WEIGHTS, EMA = "tasks", "ema"  # keys of the file: what the weights scored, and what their average did
_COLUMNS = {"nll": "nll", "tokens": "tokens", "bytes": "num_bytes"}
_KL_COLUMNS = {name: name for name in ("kl_forward", "kl_reverse", "kl_tokens")}

ROW_MEASURES = ("nll", "bits_per_byte", "kl_forward", "kl_reverse")

Floats = NDArray[np.float64]


class Change(NamedTuple):
    """A paired difference, later minus earlier in the measure's own unit, over `num` of `unit`."""

    mean: float
    low: float
    high: float
    num: int
    unit: str  # documents, rows (of a single document), questions, groups (of questions)


@dataclass(frozen=True)
class HeldOut:
    """What was measured on some rows: sums by row, in the order of the rows."""

    nll: Floats
    tokens: Floats
    num_bytes: Floats  # of text that the counted targets stand for
    groups: NDArray[np.int64]  # the document in which each row begins
    kl_forward: Floats
    kl_reverse: Floats
    kl_tokens: Floats

    def _ratios(self) -> dict[str, tuple[Floats, Floats, float]]:
        """For each measure what is divided by what, and the unit of the quotient."""
        return {
            "nll": (self.nll, self.tokens, 1.0),
            "bits_per_byte": (self.nll, self.num_bytes, float(np.log(2))),
            "kl_forward": (self.kl_forward, self.kl_tokens, 1.0),
            "kl_reverse": (self.kl_reverse, self.kl_tokens, 1.0),
        }

    def measures(self) -> dict[str, float | None]:
        """The figures: token-weighted NLL, bits per byte, mean divergences; None where nothing was measured."""
        totals = {name: (tops.sum(), bottoms.sum(), unit) for name, (tops, bottoms, unit) in self._ratios().items()}
        return {name: float(top / bottom / unit) if bottom else None for name, (top, bottom, unit) in totals.items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Intervals of the figures over documents; none for fewer than two."""
        found: dict[str, tuple[float, float]] = {}
        for name, (tops, bottoms, unit) in self._ratios().items():
            counted = bottoms > 0
            if counted.any() and np.isfinite(tops).all():
                ends = statistics.ratio_interval(tops[counted], bottoms[counted], self.groups[counted])
                if ends is not None:
                    found[name] = (ends.low / unit, ends.high / unit)
        return found

    @property
    def num_documents(self) -> int:
        """Documents in which rows begin: what the intervals are over."""
        return len(np.unique(self.groups))

    def change(self, later: "HeldOut", measure: str) -> Change | None:
        """How a measure changed over the same rows; None where they are others, or too few to say.

        Where all rows are of one document they stand for themselves: that is about this document alone.
        """
        first, bottoms, unit = self._ratios()[measure]
        second, others, _ = later._ratios()[measure]
        if not (np.array_equal(bottoms, others) and np.array_equal(self.groups, later.groups)):
            return None
        counted = bottoms > 0
        if not (counted.any() and np.isfinite(first).all() and np.isfinite(second).all()):
            return None
        alone = len(np.unique(self.groups[counted])) < 2
        groups = None if alone else self.groups[counted]
        found = statistics.paired_ratio(first[counted], second[counted], bottoms[counted], groups)
        if found is None:
            return None
        mean, low, high = (value / unit for value in found[:3])
        return Change(mean, low, high, found.num, "rows" if alone else "documents")

    def to_dict(self) -> Json:
        """Columns by row, and the same summed by document; divergences where they were measured."""
        columns = _COLUMNS | (_KL_COLUMNS if self.kl_tokens.any() else {})
        values: dict[str, Floats] = {name: getattr(self, field) for name, field in columns.items()}
        documents, index = np.unique(self.groups, return_inverse=True)
        summed = {name: np.bincount(index, column, len(documents)).astype(float) for name, column in values.items()}
        return {
            "rows": {"document": self.groups.tolist(), **{name: _listed(each) for name, each in values.items()}},
            "documents": {"document": documents.tolist(), **{name: _listed(each) for name, each in summed.items()}},
        }

    @classmethod
    def from_dict(cls, rows: JsonView) -> "HeldOut":
        """From the columns by row of `to_dict`."""
        groups = np.array(rows["document"], np.int64)
        columns = {
            field: np.array(rows.get(name, np.zeros(len(groups))), float)
            for name, field in (_COLUMNS | _KL_COLUMNS).items()
        }
        assert all(len(each) == len(groups) for each in columns.values()), "a figure for each row"
        return cls(groups=groups, **columns)


def _listed(values: Floats) -> list[float | int | None]:
    """Numbers as JSON can hold them, whole ones without a point."""
    return [int(value) if np.isfinite(value) and value == int(value) else finite(value) for value in values.tolist()]


@dataclass(frozen=True)
class Answers:
    """How questions were answered; questions of one group go together, those without one stand alone.

    Args:
        right: which were answered rightly; None where an answer is scored by degrees alone.
        values: other scores of each answer, by measure (`accuracy_norm`, `rouge_l`): their means are the figures.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    right: Optional[tuple[bool, ...]]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def scores(self, measure: str) -> tuple[float, ...] | None:
        """The score of each answer in a measure, where it was taken."""
        return self.right if measure == "accuracy" else self.values.get(measure)

    def numbered(self) -> list[int]:
        """The group of each question as a number."""
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(group or index, len(numbers)) for index, group in enumerate(self.groups)]

    @property
    def num_groups(self) -> int:
        """How many groups there are, a question without one being its own."""
        return len(set(self.numbered()))

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The intervals of the accuracy and of the other scores' means."""
        groups, found = self.numbered(), {}
        for measure in ("accuracy", *self.values):
            scores = self.scores(measure)
            if scores is None:
                continue
            if all(score in (0, 1) for score in scores):  # a share: sensible also where all are right
                ends: statistics.Interval | None = statistics.accuracy_interval(scores, groups)
            else:
                ends = statistics.ratio_interval(scores, np.ones(len(scores)), groups)
            if ends is not None:
                found[measure] = (ends.low, ends.high)
        return found

    def change(self, later: "Answers", measure: str = "accuracy") -> Change | None:
        """How a score changed over the same questions; None where they are others, or one alone."""
        first, second = self.scores(measure), later.scores(measure)
        if self.ids != later.ids or first is None or second is None:
            return None
        found = statistics.paired_difference(first, second, self.numbered())
        grouped = self.num_groups < len(self.ids)
        return None if found is None else Change(*found, "groups" if grouped else "questions")

    def to_dict(self) -> Json:
        """As JSON holds it."""
        made: Json = {"id": list(self.ids), "group": list(self.groups)}
        if self.right is not None:
            made["right"] = [int(each) for each in self.right]
        if self.values:
            made["values"] = {measure: list(scores) for measure, scores in self.values.items()}
        return made

    @classmethod
    def from_dict(cls, columns: JsonView) -> "Answers":
        """From what `to_dict` made."""
        right = tuple(bool(each) for each in columns["right"]) if "right" in columns else None
        values = {str(name): tuple(map(float, scores)) for name, scores in columns.get("values", {}).items()}
        made = cls(tuple(map(str, columns["id"])), tuple(map(str, columns["group"])), right, values)
        scored = ([] if right is None else [right]) + [*values.values()]
        assert len(made.groups) == len(made.ids), "a group for each question"
        assert all(len(each) == len(made.ids) for each in scored), "a judgement for each question"
        return made


@dataclass(frozen=True)
class TaskSums:
    """What the figures of one task are made of: held-out rows, questions, or both."""

    rows: Optional[HeldOut] = None
    answers: Optional[Answers] = None

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The interval of every measure that has one."""
        found = self.rows.intervals() if self.rows is not None else {}
        return found | (self.answers.intervals() if self.answers is not None else {})

    def counts(self) -> dict[str, int]:
        """How many documents, or groups of questions, each interval is over."""
        counts = dict.fromkeys(self.rows.intervals(), self.rows.num_documents) if self.rows is not None else {}
        if self.answers is not None:
            counts |= dict.fromkeys(self.answers.intervals(), self.answers.num_groups)
        return counts

    def change(self, later: "TaskSums", measure: str) -> Change | None:
        """The paired change of a measure from this evaluation to a later one, where both hold it."""
        if self.answers is not None and self.answers.scores(measure) is not None:
            return self.answers.change(later.answers, measure) if later.answers is not None else None
        if self.rows is None or later.rows is None or measure not in ROW_MEASURES:
            return None
        return self.rows.change(later.rows, measure)

    def to_dict(self) -> Json:
        """As JSON holds it."""
        made = self.rows.to_dict() if self.rows is not None else {}
        return made | ({"questions": self.answers.to_dict()} if self.answers is not None else {})

    @classmethod
    def from_dict(cls, record: JsonView) -> "TaskSums":
        """From what `to_dict` made."""
        return cls(
            HeldOut.from_dict(record["rows"]) if "rows" in record else None,
            Answers.from_dict(record["questions"]) if "questions" in record else None,
        )


def write_sums(folder: Path, scored: Mapping[str, Mapping[str, TaskSums]]) -> None:
    """Write `sums.json` whole or not at all.

    Args:
        scored: the sums of each task, of the weights (`tasks`) and where there is one of their average (`ema`).
    """
    content = {kind: {task: sums.to_dict() for task, sums in tasks.items()} for kind, tasks in scored.items()}
    write_atomically(folder / SUMS, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def read_sums(folder: Path, kind: str = WEIGHTS) -> dict[str, TaskSums]:
    """The sums of each task; empty where there is no readable file, as in runs of earlier versions."""
    try:
        content = json.loads(read_regular(folder / SUMS))
        return {str(task): TaskSums.from_dict(record) for task, record in content.get(kind, {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return {}
