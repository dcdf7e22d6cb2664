"""Stages, fades, betas and reference snapshots of a run on the axis of tokens."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import registry
from holdfast.config import JOB_KEY, merge
from holdfast.curriculum import Curriculum
from holdfast.training.config import config_classes
from holdfast.training.resolve import curriculum_for, read_options
from holdfast.types import JsonView


@dataclass(frozen=True)
class StageSpan:
    """One stage: where it lies, in tokens, and what it holds."""

    name: str
    start: int
    end: int
    datasets: tuple[str, ...] = ()
    beta: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What a run is made of.

    Args:
        fades: (start, end) of each blending region that is longer than nothing.
        snapshots: where the reference was taken.
        total_tokens: the end of the run; 0 when it is not known.
    """

    stages: tuple[StageSpan, ...] = ()
    fades: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[int, ...] = ()
    total_tokens: int = 0
    total_steps: int = 0
    curriculum: Curriculum | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where stages 1, 2, … begin."""
        return tuple(stage.start for stage in self.stages[1:])


def read_curriculum(job: str, config: JsonView) -> Curriculum | None:
    """The curriculum of a run's options; None when this installation does not know them."""
    if job not in registry.jobs:
        return None
    values = {key: value for key, value in config.items() if key != JOB_KEY}
    try:
        return curriculum_for(job, read_options(job, merge(config_classes(job), values)))
    except Exception:  # whatever the reason: the options are not ours to mend, and the records tell the rest
        return None


def from_curriculum(job: str, config: JsonView) -> Timeline | None:
    """The timeline that a run's options describe, if they can be read."""
    curriculum = read_curriculum(job, config)
    if curriculum is None:
        return None
    unit = curriculum.tokens_per_step
    stages = tuple(
        StageSpan(
            stage.name,
            curriculum.stage_start(index) * unit,
            curriculum.stage_end(index) * unit,
            tuple(dict.fromkeys(sampling.name for sampling in stage.mixture)),
            stage.beta,
        )
        for index, stage in enumerate(curriculum.stages)
    )
    fades = [curriculum.fade_steps(boundary) for boundary in range(len(stages) - 1)]
    return Timeline(
        stages,
        tuple((start * unit, end * unit) for start, end in fades if end > start),
        tuple(step * unit for step in sorted(curriculum.snapshot_steps())),
        curriculum.total_steps * unit,
        curriculum.total_steps,
        curriculum,
    )


def from_records(records: Sequence[JsonView]) -> Timeline:
    """The timeline as far as the records tell it: no fades, and stages only as they were entered."""
    entered = [record for record in records if record.get("kind") == "stage"]
    end = max((record.get("tokens", 0) for record in records), default=0)
    starts = [record["tokens"] for record in entered] + [end]
    datasets: list[dict[str, None]] = [{} for _ in entered]
    for row in records:
        index = bisect.bisect_left(starts, row["tokens"]) - 1  # a step belongs to the stage that it ends in
        if row.get("kind") == "train" and 0 <= index < len(entered):
            datasets[index] |= dict.fromkeys(row.get("rows", {}))
    stages = tuple(
        StageSpan(
            str(record.get("name", index)),
            record["tokens"],
            starts[index + 1],
            tuple(datasets[index]),
            record.get("beta") or 0.0,
        )
        for index, record in enumerate(entered)
    )
    taken = tuple(record["tokens"] for record in entered if record.get("reference_updated"))
    return Timeline(stages, (), taken)
