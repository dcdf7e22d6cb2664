"""Evaluation of a run: what is measured at a boundary, and the results that come of it."""

import functools
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast.evaluation.evaluator import Evaluator, TaskResult, write_examples
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.execution import processes
from holdfast.execution.files import write_json
from holdfast.models.decoder import Decoder
from holdfast.training.agenda import Measurement
from holdfast.training.resume import Progress
from holdfast.training.state import KLDivergenceTrainState

if TYPE_CHECKING:
    from holdfast.training.base import BaseTrainer

RESULTS = "results.json"


def build_evaluator(trainer: "BaseTrainer[Any, Any]") -> Evaluator[Any]:
    """The evaluator of a run: its evaluations, and the held-out rows of every stage's datasets."""
    settings = trainer.settings
    return Evaluator(
        Decoder(trainer.model_spec),
        trainer.model_spec,
        trainer.tokenizer,
        settings.evaluation,
        tasks=trainer.config.evaluations,
        rows=trainer.data.held_out(),
        max_rows=trainer.config.validation_steps,
        topology=trainer.topology,
        data=settings.data,
    )


class Meter:
    """Measures the model and keeps what was found."""

    def __init__(self, trainer: "BaseTrainer[Any, Any]", progress: Progress) -> None:
        self.trainer = trainer
        self.progress = progress
        self.penalty_cosine: float | None = None

    @functools.cached_property
    def evaluator(self) -> Evaluator[Any] | None:
        """The trainer's evaluator, made when first needed."""
        return self.trainer.evaluator()

    def measure(self, step: int, measurement: Measurement | None) -> dict[str, Any]:
        """Evaluate on everything, or for a probe on small fixed sets; returns the record."""
        assert self.evaluator is not None, "an agenda without evaluation measures nothing"
        state = self.trainer.state
        reference = state.reference if isinstance(state, KLDivergenceTrainState) else None
        if measurement is None:
            results = self.evaluator.probe(state.params, reference)
        else:
            results = self.evaluator.evaluate(state.params, reference)
            if processes.is_first():
                write_examples(self.trainer.spec.run_dir / "evaluations" / str(step), results)
        point = self.point(step, measurement, results)
        self.progress.points.append(point)
        return {key: point[key] for key in ("scores", "row", "at", "stage", "intervals", "facts")}

    def point(self, step: int, measurement: Measurement | None, results: dict[str, TaskResult]) -> dict[str, Any]:
        """An evaluation as `results.json` and manifests hold it."""
        stages = self.trainer.stages
        point = Point(
            step=step,
            tokens=step * stages.tokens_per_step,
            row=measurement.row if measurement else None,
            stage=stages.stage_at(max(step - 1, 0)),
            at=" ".join(measurement.labels) if measurement else "probe",
            scores={task: result.measures for task, result in results.items()},
            intervals={task: result.intervals for task, result in results.items()},
        )
        facts = {task: result.facts() for task, result in results.items() if result.accuracy is not None}
        return {**point.to_dict(), "facts": facts}

    def matrix(self) -> ScoreMatrix:
        """The score matrix of what was measured so far."""
        stages = self.trainer.stages.stages
        datasets = [[sampling.name for sampling in stage.mixture] for stage in stages]
        tasks = task_names(self.trainer.config.evaluations, datasets)
        points = [Point.from_dict(point) for point in self.progress.points]
        chance = {task: facts["chance"] for point in self.progress.points for task, facts in point["facts"].items()}
        # Small probes are too noisy to say that something was learned; so is luck before training.
        judged = [point for point in points if point.row]
        return ScoreMatrix.from_points(
            points,
            [stage.name for stage in stages],
            tasks,
            task_homes(tasks, datasets),
            not_learned=tasks_not_learned(judged, chance),
        )

    def write_results(self, *, finished: bool) -> None:
        """Write `results.json` from everything that is known."""
        if not self.progress.points:
            return
        points = [Point.from_dict(point) for point in self.progress.points]
        results = self.matrix().to_results(points, finished=finished)
        results["points"] = self.progress.points
        results["leaks"] = [asdict(leak) for leak in self.trainer.data.leaks]
        write_json(self.trainer.spec.run_dir / RESULTS, results)
