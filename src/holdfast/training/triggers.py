"""When things happen, as data: what is due after every step, worked out from the curriculum and the options.

A step here means optimizer steps completed. At one step the order is: train record, validation, evaluation,
checkpoint, and only then the next stage is entered.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.curriculum import Curriculum
from holdfast.training.resolve import ResolvedRun


@dataclass(frozen=True)
class Measurement:
    """An evaluation on everything.

    Args:
        labels: what this moment is: `start`, `fade_start_1`, `boundary_1`, `fade_end_1`, `asked`, `end`.
        row: the row of the score matrix that it fills, None for a point of the curves alone.
    """

    labels: tuple[str, ...]
    row: int | None


@dataclass(frozen=True)
class Intervals:
    """How often what comes up regularly does so, in steps."""

    report: int
    validation: int | None
    checkpoint: int
    validates_first_stage: bool = True
    evaluate: bool = True
    asked: tuple[int, ...] = ()  # further steps after which everything is evaluated
    probe: int = 0  # small evaluations around boundaries
    probe_window: int = 0
    step_probe: int | None = None  # probes of steps; 0 = with every train record, None = never


@dataclass(frozen=True)
class Triggers:
    """What is due after every step of a run."""

    curriculum: Curriculum
    intervals: Intervals
    _measurements: dict[int, Measurement] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = measurements(self.curriculum, self.intervals.asked) if self.intervals.evaluate else {}
        object.__setattr__(self, "_measurements", found)

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

    def probes_step(self, step: int) -> bool:
        """Whether probes look at the step before it is taken; like `records`, counted when it is complete."""
        every = self.intervals.step_probe
        if every is None:
            return False
        return self.records(step) if every == 0 else step % every == 0

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


def triggers_of(run: ResolvedRun) -> Triggers:
    """The triggers of a run."""
    config, evaluation, options = run.config, run.options.evaluation, run.options.run
    probing = bool(options.probes) or run.options.penalty.probe
    intervals = Intervals(
        report=config.report_interval,
        validation=config.validation_interval if config.validate else None,
        checkpoint=config.checkpoint_interval,
        validates_first_stage=config.validates_first_stage,
        evaluate=config.evaluate,
        asked=tuple(evaluation.steps),
        probe=evaluation.probe_interval,
        probe_window=evaluation.probe_window,
        step_probe=options.probe_interval if probing else None,
    )
    return Triggers(run.curriculum, intervals)


def measurements(curriculum: Curriculum, asked: Sequence[int] = ()) -> dict[int, Measurement]:
    """All evaluations of a run by step.

    Row i of the matrix is measured before the first row of stage i + 1 is drawn: at the start of the fade, which
    is the boundary itself for a hard switch.

    Args:
        asked: further steps, which fill no row; those beyond the end are left out.
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
    for step in sorted({*asked} - {*labels}):
        if step < curriculum.total_steps:
            labels[step].append("asked")
    return {step: Measurement(tuple(names), rows.get(step)) for step, names in sorted(labels.items())}
