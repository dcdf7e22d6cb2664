"""Evaluation of a run: what is measured at a boundary, and the results that come of it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.curriculum import Stage
from holdfast.data.leaks import Leak
from holdfast.data.rows import Rows
from holdfast.errors import RunError, UserError
from holdfast.evaluation.budgets import outcome
from holdfast.evaluation.evaluator import Evaluator, TaskResult, write_examples
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.evaluation.results import FOLDER
from holdfast.evaluation.sums import EMA, WEIGHTS, write_sums
from holdfast.execution import Topology, processes
from holdfast.execution.files import file_digests, write_json
from holdfast.execution.storage import Patience
from holdfast.training.data import held_out_rows
from holdfast.training.manifest import Progress
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import TrainState
from holdfast.training.triggers import Measurement
from holdfast.types import Json, JsonView

RESULTS = "results.json"
NOT_FINITE = "not_finite"  # key of a point with scores that are no numbers; they are null in it


def build_evaluator(
    run: ResolvedRun, topology: Topology, rows: Mapping[str, Rows], tasks: Sequence[str] | None = None
) -> Evaluator[Any]:
    """The evaluator of a run.

    Args:
        rows: held-out rows of its datasets.
        tasks: its own evaluations unless given.
    """
    return Evaluator(
        run.model,
        run.tokenizer,
        run.options.evaluation,
        tasks=run.config.evaluations if tasks is None else tasks,
        rows=rows,
        max_rows=run.config.validation_steps,
        topology=topology,
        data=run.options.data,
    )


def chosen_evaluator(
    run: ResolvedRun,
    topology: Topology,
    names: Sequence[str] | None,
    left_out: Callable[[str], None] | None = None,
) -> Evaluator[Any]:
    """The evaluator of what is named: evaluations whether or not the run has them, and its datasets.

    Args:
        names: None is everything that the run has.
        left_out: is told what has no data here, and why; None raises.
    """
    in_run = {source.name for source in run.curriculum.datasets} | {*run.held_out}
    asked = run.config.evaluations if names is None else names
    own_tasks = {name for name, source in run.options.data.sources.items() if source.prompt is not None}
    tasks = [name for name in asked if name in registry.evaluations or name in own_tasks or name not in in_run]
    datasets = in_run if names is None else in_run & set(names)
    data = run.options.data
    rows = held_out_rows(run.curriculum, data, run.tokenizer, datasets, measured=run.held_out, left_out=left_out)
    evaluator = build_evaluator(run, topology, rows, tasks)
    if left_out is not None:
        for name in list(evaluator.tasks):
            try:
                evaluator.examples(name)
            except UserError as error:
                left_out(f"{name}: {error}")
                del evaluator.tasks[name]
    return evaluator


def write_evaluation(folder: Path, scored: Mapping[str, Mapping[str, TaskResult]], *, examples: bool = True) -> None:
    """Write what an evaluation is made of: sums by row and document, and every question of the weights' own.

    Args:
        scored: results by task, of the weights and where there is one of their average.
        examples: whether questions are written with their texts.
    """
    if examples:
        write_examples(folder, scored[WEIGHTS])
    write_sums(folder, {kind: {task: each.sums for task, each in found.items()} for kind, found in scored.items()})


def _not_finite(scored: Mapping[str, Mapping[str, TaskResult]]) -> list[str]:
    """The scores that are infinite or no number: `TASK MEASURE`."""
    return [
        f"{task} {measure}"
        for found in scored.values()
        for task, result in found.items()
        for measure, value in result.measures.items()
        if value is not None and not math.isfinite(value)
    ]


class ResultsRecorder:
    """Measures the model at its triggers, keeps what was found, and writes `results.json`.

    Args:
        evaluator: makes the trainer's evaluator, when first needed.
        leaks: held-out rows that were found in training data.
        progress: what is known so far; grows with every measurement.
    """

    def __init__(
        self,
        run: ResolvedRun,
        run_dir: Path,
        evaluator: Callable[[], Evaluator[Any] | None],
        leaks: Sequence[Leak],
        progress: Progress,
        patience: Patience | None = None,
    ) -> None:
        self.run = run
        self.run_dir = run_dir
        self.leaks = leaks
        self.progress = progress
        self._evaluator = evaluator
        self._patience = patience or Patience(0)

    @functools.cached_property
    def evaluator(self) -> Evaluator[Any] | None:
        """The trainer's evaluator, made when first needed."""
        return self._evaluator()

    def measure(self, state: TrainState, step: int, measurement: Measurement | None) -> Json:
        """Evaluate on everything, or for a probe on small fixed sets; returns the record."""
        assert self.evaluator is not None, "triggers without evaluation measures nothing"
        reference = state.reference_params()
        if measurement is None:
            results = self.evaluator.probe(state.params, reference)
        else:
            results = self.evaluator.evaluate(state.params, reference)
        point, scored = self.point(step, measurement, results), {WEIGHTS: results}
        average = state.ema_params() if measurement else None
        if average is not None:
            scored[EMA] = self.evaluator.evaluate(average, reference)
            averaged = self.point(step, measurement, scored[EMA])
            point[EMA] = {key: averaged[key] for key in ("scores", "intervals", "counts", "facts")}
        if processes.is_first():
            folder = self.run_dir / FOLDER / str(step)
            self._patience.on(str(folder), lambda: write_evaluation(folder, scored, examples=measurement is not None))
            self.progress.files.update(file_digests(folder, self.run_dir))
        wrong = _not_finite(scored)
        if wrong:
            point[NOT_FINITE] = wrong
        self.progress.points.append(point)
        kept = ("scores", "row", "at", "stage", "intervals", "counts", "facts", EMA, NOT_FINITE)
        return {key: point[key] for key in kept if key in point}

    def point(self, step: int, measurement: Measurement | None, results: dict[str, TaskResult]) -> Json:
        """An evaluation as `results.json` and manifests hold it."""
        stages = self.run.curriculum
        point = Point(
            step=step,
            tokens=step * stages.tokens_per_step,
            row=measurement.row if measurement else None,
            stage=stages.stage_at(max(step - 1, 0)),
            at=" ".join(measurement.labels) if measurement else "probe",
            scores={task: result.measures for task, result in results.items()},
            intervals={task: result.intervals for task, result in results.items()},
            counts={task: result.sums.counts() for task, result in results.items()},
            facts={task: result.facts() for task, result in results.items()},
        )
        return point.to_dict()

    def results(self, stages: Sequence[Stage] | None = None, **extra: Any) -> Json:
        """The content of `results.json` from everything that is known.

        Args:
            stages: the first ones of the run, where the matrix ends with one of them; None is all.
            extra: further keys.
        """
        stages = self.run.curriculum.stages if stages is None else stages
        known = self.progress.points
        averaged = [{**point, **point[EMA]} for point in known if EMA in point]
        if averaged:
            scored = self._matrix(stages, averaged).to_results()
            kept = {name: scored[name] for name in ("matrix", "metrics", "not_learned")}
            extra[EMA] = {"decay": self.run.options.run.ema, **kept}
        if self.run.overrides_batch:
            extra["overrides_batch"] = True
        if self.run.curriculum.budgets:
            certificates = self.progress.certificates
            budgets = outcome(self.run.curriculum, self.run_dir, known, certificates)
            extra["keep"] = {"budgets": budgets, "certificates": certificates}
        leaks = [asdict(leak) for leak in self.leaks]
        return {**self._matrix(stages, known).to_results(**extra), "points": known, "leaks": leaks}

    def _matrix(self, stages: Sequence[Stage], records: Sequence[JsonView]) -> ScoreMatrix:
        """The score matrix of evaluations as manifests hold them."""
        datasets = [[s.name for s in self.run.curriculum.datasets_of(index)] for index in range(len(stages))]
        tasks = task_names(self.run.config.evaluations, [*datasets, self.run.held_out])
        homes = task_homes(tasks, datasets)
        points = [Point.from_dict(record) for record in records]
        return ScoreMatrix.from_points(
            points,
            [stage.name for stage in stages],
            tasks,
            homes,
            not_learned=tasks_not_learned(points, tasks, homes),
        )

    def check_finite(self) -> None:
        """Refuse to call a run finished whose last measurement has a score that is not finite."""
        measured = [point for point in self.progress.points if point.get("row") is not None]
        wrong = measured[-1].get(NOT_FINITE) if measured else None
        if wrong:
            raise RunError(
                f"step {measured[-1]['step']}: what was measured is not finite: {', '.join(wrong[:3])}; the losses in "
                "metrics.jsonl show where it began; lower optimization/lr and branch from an earlier one (--from)"
            )

    def write_results(self, *, finished: bool) -> None:
        """Write `results.json`, once something was measured."""
        if self.progress.points:
            path, results = self.run_dir / RESULTS, self.results(finished=finished)
            self._patience.on(str(path), lambda: write_json(path, results))
