"""When things happen: every step's duties as data, worked out from the curriculum and the options.

A step here means optimizer steps completed. At one step the order is: train record, validation, evaluation,
checkpoint, and only then the next stage is entered.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from holdfast.curriculum import Curriculum


@dataclass(frozen=True)
class Measurement:
    """An evaluation on everything.

    Args:
        labels: what this moment is: `start`, `fade_start_1`, `boundary_1`, `fade_end_1`, `end`.
        row: the row of the score matrix that it fills, None for a point of the curves alone.
    """

    labels: tuple[str, ...]
    row: int | None


@dataclass(frozen=True)
class Intervals:
    """How often the regular duties come up, in steps."""

    report: int
    validation: int | None
    checkpoint: int
    validates_first_stage: bool = True
    evaluate: bool = True
    probe: int = 0
    probe_window: int = 0


@dataclass(frozen=True)
class Agenda:
    """The duties of every step of a run."""

    curriculum: Curriculum
    intervals: Intervals
    _measurements: dict[int, Measurement] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_measurements", measurements(self.curriculum) if self.intervals.evaluate else {})

    def records(self, step: int) -> bool:
        """Whether the step gets a train record."""
        return step > 0 and (step % self.intervals.report == 0 or step == self.curriculum.total_steps)

    def validates(self, step: int) -> bool:
        """Whether validation losses are measured after the step."""
        every = self.intervals.validation
        if every is None or step == 0:
            return False
        if not self.intervals.validates_first_stage and self.curriculum.stage_at(step - 1) == 0:
            return False
        return step % every == 0 or step == self.curriculum.total_steps

    def measures(self, step: int) -> Measurement | None:
        """The evaluation after the step, if there is one."""
        return self._measurements.get(step)

    def probes(self, step: int) -> bool:
        """Whether a small evaluation around a boundary comes up after the step."""
        every, window = self.intervals.probe, self.intervals.probe_window
        if not every or step in self._measurements:
            return False
        return any(abs(step - b) <= window and (step - b) % every == 0 for b in self.curriculum.boundaries())

    def tags(self, step: int) -> tuple[str, ...]:
        """Lasting names of the checkpoint after the step: every boundary and the end have one."""
        names = [
            f"boundary_{index}"
            for index in range(len(self.curriculum.stages))
            if self.curriculum.stage_start(index) == step
        ]
        return (*names, "final") if step == self.curriculum.total_steps else tuple(names)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after the step, whatever validation finds."""
        return bool(self.tags(step)) or (step > 0 and step % self.intervals.checkpoint == 0)


def measurements(curriculum: Curriculum) -> dict[int, Measurement]:
    """All evaluations of a run by step.

    Row i of the matrix is measured before the first row of stage i + 1 is drawn: at the start of the fade, which
    is the boundary itself for a hard switch.
    """
    labels: dict[int, list[str]] = defaultdict(list)
    rows: dict[int, int] = {0: 0, curriculum.total_steps: len(curriculum.stages)}
    labels[0].append("start")
    for boundary in range(len(curriculum.stages) - 1):
        start_step, end_step = curriculum.fade_steps(boundary)
        boundary_step = curriculum.stage_start(boundary + 1)
        rows[start_step] = boundary + 1
        if start_step != boundary_step:
            labels[start_step].append(f"fade_start_{boundary + 1}")
        labels[boundary_step].append(f"boundary_{boundary + 1}")
        if end_step != boundary_step:
            labels[end_step].append(f"fade_end_{boundary + 1}")
    labels[curriculum.total_steps].append("end")
    return {step: Measurement(tuple(names), rows.get(step)) for step, names in sorted(labels.items())}
