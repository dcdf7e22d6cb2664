"""Evaluation of a run: what is measured at a boundary, and the results that come of it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast import registry
from holdfast.curriculum import Stage
from holdfast.data.rows import Rows
from holdfast.evaluation.evaluator import Evaluator, TaskResult, write_examples
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.execution import processes
from holdfast.execution.files import write_json
from holdfast.execution.storage import Patience
from holdfast.models.decoder import Decoder
from holdfast.training.agenda import Measurement
from holdfast.training.resume import Progress
from holdfast.training.state import KLDivergenceTrainState

if TYPE_CHECKING:
    from holdfast.training.base import BaseTrainer

RESULTS = "results.json"
EMA = "ema"  # what the average of the weights scored, beside what the weights did


def build_evaluator(
    trainer: "BaseTrainer[Any, Any]", tasks: Sequence[str] | None = None, rows: Mapping[str, Rows] | None = None
) -> Evaluator[Any]:
    """The evaluator of a run: its evaluations, and the held-out rows of every stage's datasets, unless given."""
    settings = trainer.settings
    return Evaluator(
        Decoder(trainer.model_spec),
        trainer.model_spec,
        trainer.tokenizer,
        settings.evaluation,
        tasks=trainer.config.evaluations if tasks is None else tasks,
        rows=trainer.data.held_out() if rows is None else rows,
        max_rows=trainer.config.validation_steps,
        topology=trainer.topology,
        data=settings.data,
    )


def chosen_evaluator(trainer: "BaseTrainer[Any, Any]", names: Sequence[str] | None) -> Evaluator[Any]:
    """The evaluator of what is named: evaluations whether or not the run has them, and its datasets.

    Args:
        names: None is everything that the run has.
    """
    data, config = trainer.settings.data, trainer.config
    in_run = {sampling.name for stage in trainer.stages.stages for sampling in stage.mixture}
    asked = config.evaluations if names is None else names
    own_tasks = {name for name, source in data.sources.items() if source.prompt is not None}
    tasks = [name for name in asked if name in registry.evaluations or name in own_tasks or name not in in_run]
    datasets = in_run if names is None else in_run & set(names)
    rows = trainer.data.held_out() if datasets else {}
    return build_evaluator(trainer, tasks, {name: each for name, each in rows.items() if name in datasets})


class Meter:
    """Measures the model and keeps what was found."""

    def __init__(self, trainer: "BaseTrainer[Any, Any]", progress: Progress, patience: Patience | None = None) -> None:
        self.trainer = trainer
        self._patience = patience or Patience(0)
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
        reference = state.reference_params() if isinstance(state, KLDivergenceTrainState) else None
        if measurement is None:
            results = self.evaluator.probe(state.params, reference)
        else:
            results = self.evaluator.evaluate(state.params, reference)
            if processes.is_first():
                folder = self.trainer.spec.run_dir / "evaluations" / str(step)
                self._patience.on(str(folder), lambda: write_examples(folder, results))
        point = self.point(step, measurement, results)
        average = state.ema_params() if measurement else None
        if average is not None:
            scored = self.point(step, measurement, self.evaluator.evaluate(average, reference))
            point[EMA] = {key: scored[key] for key in ("scores", "intervals", "facts")}
        self.progress.points.append(point)
        kept = ("scores", "row", "at", "stage", "intervals", "facts", EMA)
        return {key: point[key] for key in kept if key in point}

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

    def results(self, stages: Sequence[Stage] | None = None, **extra: Any) -> dict[str, Any]:
        """The content of `results.json` from everything that is known.

        Args:
            stages: the first ones of the run, where the matrix ends with one of them; None is all.
            extra: further keys.
        """
        stages = self.trainer.stages.stages if stages is None else stages
        known = self.progress.points
        averaged = [{**point, **point[EMA]} for point in known if EMA in point]
        if averaged:
            scored = self._matrix(stages, averaged).to_results()
            kept = {name: scored[name] for name in ("matrix", "metrics", "not_learned")}
            extra[EMA] = {"decay": self.trainer.settings.run.ema, **kept}
        leaks = [asdict(leak) for leak in self.trainer.data.leaks]
        return {**self._matrix(stages, known).to_results(**extra), "points": known, "leaks": leaks}

    def _matrix(self, stages: Sequence[Stage], records: Sequence[Mapping[str, Any]]) -> ScoreMatrix:
        """The score matrix of evaluations as manifests hold them."""
        datasets = [[sampling.name for sampling in stage.mixture] for stage in stages]
        tasks = task_names(self.trainer.config.evaluations, datasets)
        points = [Point.from_dict(record) for record in records]
        chance = {task: facts["chance"] for record in records for task, facts in record["facts"].items()}
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
        """Write `results.json`, once something was measured."""
        if self.progress.points:
            path, results = self.trainer.spec.run_dir / RESULTS, self.results(finished=finished)
            self._patience.on(str(path), lambda: write_json(path, results))
