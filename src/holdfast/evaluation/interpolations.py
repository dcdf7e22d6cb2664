"""Interpolations between two checkpoints as figures: what each kept of the old and learned of the new.

The weights of `alpha` are (1 - alpha) times the first checkpoint's plus alpha times the second's. What the first
checkpoint had been taught is old; what only the second one had is new.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import UserError
from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell, finite
from holdfast.evaluation.statistics import pareto
from holdfast.execution.files import write_json
from holdfast.types import Json, JsonView

FILE = "average.json"
FORMAT = 1
JUDGING = ("bits_per_byte", "accuracy", "nll")  # the first that all old and new tasks have is judged by
RULE = (
    "the highest mean of kept old and learned new, each the mean score of its tasks (losses count negative); "
    "of equals the smallest alpha"
)
DEFAULT_ALPHAS = "0,0.1,...,1"


def parse_alphas(text: str) -> tuple[float, ...]:
    """The alphas of a list with commas, ascending, each once; dots stand for steps as large as the one before.

    >>> parse_alphas("0,0.25,...,1"), parse_alphas("1, 0.5")
    ((0.0, 0.25, 0.5, 0.75, 1.0), (0.5, 1.0))
    """
    found: list[float] = []
    parts = [part.strip() for part in text.replace("…", "...").split(",")]
    for index, part in enumerate(parts):
        if part != "...":
            found.append(alpha_of(part))
            continue
        step = found[-1] - found[-2] if len(found) > 1 and index + 1 < len(parts) else 0.0
        if not step > 0:
            raise UserError(
                f"--alphas {text!r}: '...' needs two ascending numbers before it and one after: 0,0.1,...,1"
            )
        end = alpha_of(parts[index + 1])
        found += [round(found[-1] + step * more, 10) for more in range(1, math.ceil((end - found[-1]) / step - 1e-9))]
    return tuple(sorted(set(found)))


def alpha_of(text: str) -> float:
    """One alpha; what is not a number from 0 to 1 is a mistake."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(
            f"alpha {text!r}: expected a number from 0 (the first checkpoint) to 1 (the second), such as 0.5; "
            f"several with commas, such as {DEFAULT_ALPHAS}"
        )
    return value + 0.0


@dataclass(frozen=True)
class Interpolation:
    """One interpolation and its scores.

    Args:
        scores: of each task, by measure.
        intervals: confidence intervals of the scores that have one.
    """

    alpha: float
    scores: Mapping[str, Mapping[str, Cell]]
    intervals: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Interpolations:
    """All interpolations between two checkpoints that were evaluated so far.

    Args:
        first, second: what is known of the checkpoints: run, checkpoint, step, stage.
        inputs: fingerprint of everything that the scores depend on besides alpha.
        old, new: tasks that the first checkpoint had been taught, and those that only the second had.
        measure: what is judged by; None takes the first of `JUDGING` that these tasks have.
        lines: scale of the first layer's step where layers take different ones (LiNeS), else None.
    """

    first: JsonView
    second: JsonView
    inputs: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    points: tuple[Interpolation, ...] = ()
    measure: str | None = None
    lines: float | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task that was measured."""
        return tuple(dict.fromkeys(task for point in self.points for task in point.scores))

    def measures(self) -> list[str]:
        """The measures that any task has, those that can be judged by first."""
        known = {name for point in self.points for each in point.scores.values() for name in each}
        return [name for name in JUDGING if name in known]

    def judged_by(self) -> str | None:
        """The measure that alphas are judged by."""
        wanted = [self.measure] if self.measure is not None else list(JUDGING)
        return next((name for name in wanted if self.points and self.judged(name)), None)

    def judged(self, measure: str) -> list[tuple[Interpolation, float, float]]:
        """Each interpolation with what it kept and learned: mean scores of old and new tasks, higher is better.

        A point without a score of one of these tasks is left out; where nothing is old, or nothing new, both means
        are over all tasks.
        """
        groups = (self.old, self.new) if self.old and self.new else (self.tasks, self.tasks)
        found = []
        for point in self.points:
            kept, learned = (self.mean(point, tasks, measure) for tasks in groups)
            if kept is not None and learned is not None:
                found.append((point, kept, learned))
        return found

    @staticmethod
    def mean(point: Interpolation, tasks: Sequence[str], measure: str) -> float | None:
        """The mean score of tasks, higher is better; None where one was not measured."""
        values = [point.scores.get(task, {}).get(measure) for task in tasks]
        known = [value for value in values if value is not None]
        if not values or len(known) < len(values):
            return None
        mean = math.fsum(known) / len(known)
        return -mean if measure in LOWER_IS_BETTER else mean

    def front(self, measure: str) -> set[float]:
        """Alphas that no other one surpasses in both what is kept and what is learned."""
        found = self.judged(measure)
        best = set(pareto([(learned, kept) for _, kept, learned in found]))
        return {point.alpha for point, kept, learned in found if (learned, kept) in best}

    def best(self, measure: str) -> float | None:
        """The best alpha by the rule; None where nothing can be judged."""
        found = self.judged(measure)
        return max(found, key=lambda each: (each[1] + each[2], -each[0].alpha))[0].alpha if found else None

    def to_dict(self) -> Json:
        """The content of `average.json`."""
        measure = self.judged_by()
        front = self.front(measure) if measure else set()
        places = {point.alpha: (kept, learned) for point, kept, learned in (self.judged(measure) if measure else ())}
        points = [
            {
                "alpha": point.alpha,
                "kept_old": places.get(point.alpha, (None, None))[0],
                "learned_new": places.get(point.alpha, (None, None))[1],
                "pareto": point.alpha in front,
                "scores": {task: {k: finite(v) for k, v in each.items()} for task, each in point.scores.items()},
                "intervals": {task: {k: list(v) for k, v in each.items()} for task, each in point.intervals.items()},
            }
            for point in self.points
        ]
        return {
            "format": FORMAT,
            **({} if self.lines is None else {"lines": self.lines}),
            "first": dict(self.first),
            "second": dict(self.second),
            "inputs": self.inputs,
            "old": list(self.old),
            "new": list(self.new),
            "measure": measure,
            "rule": RULE,
            "best": self.best(measure) if measure else None,
            "points": points,
        }

    def write(self, folder: Path) -> None:
        """Write `average.json`."""
        write_json(folder / FILE, self.to_dict())


def read_points(folder: Path, inputs: str) -> tuple[Interpolation, ...]:
    """The interpolations that a folder has of the same inputs; none where it has others or no file."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return ()
    if not isinstance(found, dict) or (found.get("format"), found.get("inputs")) != (FORMAT, inputs):
        return ()
    return tuple(Interpolation(point["alpha"], point["scores"], point["intervals"]) for point in found["points"])
