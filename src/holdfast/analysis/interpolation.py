"""Interpolations between the weights of two checkpoints: evaluated on every task of a run, and kept as a run.

Three copies of the weights are in memory at most: the two checkpoints and the interpolation that is looked at.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.errors import UserError
from holdfast.evaluation.evaluator import TaskResult
from holdfast.evaluation.interpolations import Interpolation, Interpolations, read_points
from holdfast.evaluation.results import FOLDER as EXAMPLES
from holdfast.evaluation.sums import EMA, WEIGHTS
from holdfast.execution.checkpoints import CheckpointInfo, CheckpointStore, named_checkpoint, split_name
from holdfast.execution.files import run_lock, write_json
from holdfast.models.family import Parameter
from holdfast.models.parameters import layer_number, tree_of
from holdfast.models.pretrained.write import new_folder
from holdfast.training.initial import abstract
from holdfast.training.manifest import Progress
from holdfast.training.placement import shardings_of
from holdfast.training.restore import WEIGHTS_ALONE, model_differences
from holdfast.training.results import RESULTS, ResultsRecorder, chosen_evaluator, write_evaluation
from holdfast.training.runs import OpenRun, open_run
from holdfast.training.triggers import Measurement
from holdfast.training.weights import run_dir_of
from holdfast.types import Json

MEASURES = ("accuracy", "nll", "bits_per_byte")


def interpolate(alpha: jax.Array, first: Any, second: Any, scales: Any = None) -> Any:
    """(1 - alpha) · first + alpha · second for trees of arrays; 0 and 1 give the very bits of an end.

    Args:
        scales: of `line_scales`, by which alpha is multiplied; None: alpha is the same for all.
    """
    if scales is None:
        return jax.tree.map(functools.partial(_mix, alpha), first, second)
    return jax.tree.map(lambda one, two, scale: _mix(alpha * scale, one, two), first, second, scales)


def line_scales(parameters: Mapping[str, Parameter], lines: float) -> Any:
    """LiNeS (arXiv 2410.17146): what the step from the first checkpoint to the second is scaled by, for each parameter.

    Layer l of L by lines + (1 - lines)(l - 1)/(L - 1); what stands outside the layers (embeddings, the final norm, the
    head) by `lines`, as the first layer: so do public programs for it.

    Args:
        parameters: of the model; stacked layers are on their first axis, others have their number in their name.
        lines: scale of the first layer; at 1 all are 1.

    >>> scales = line_scales({"embed": Parameter((5, 2)), "layers/up": Parameter((3, 2, 8), 3)}, 0.5)
    >>> scales["embed"].tolist(), scales["layers"]["up"].ravel().tolist()
    (0.5, [0.5, 0.75, 1.0])
    """
    numbers = _layer_numbers(parameters)
    last = max(numbers.values(), default=0)

    def scale(path: str, parameter: Parameter) -> np.ndarray[Any, np.dtype[np.float32]]:
        if path in numbers:
            return np.array(lines + (1 - lines) * numbers[path] / max(last, 1), np.float32)
        if not parameter.num_layers:
            return np.array(lines, np.float32)
        depth = np.arange(parameter.num_layers) / max(parameter.num_layers - 1, 1)
        return (lines + (1 - lines) * depth).astype(np.float32).reshape(-1, *(1,) * (len(parameter.shape) - 1))

    return tree_of({path: scale(path, parameter) for path, parameter in parameters.items()})


def _layer_numbers(parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """The layers, from 0, of the parameters that are of one layer alone, as their names tell them (`layer_0`)."""
    found = {path: layer_number(path) for path, parameter in parameters.items() if not parameter.num_layers}
    return {path: number for path, number in found.items() if number is not None}


def _mix(alpha: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    wide = jnp.promote_types(first.dtype, jnp.float32)
    mixed = (1 - alpha) * first.astype(wide) + alpha * second.astype(wide)
    return jnp.where(alpha == 0, first, jnp.where(alpha == 1, second, mixed.astype(first.dtype)))


class Interpolator:
    """Two checkpoints of one architecture, and what is needed to evaluate what lies between them.

    Args:
        first, second: `RUN[@CHECKPOINT]`, of one run or of two; options and tasks are those of the second's run.
        overrides: `path=value` of options that do not concern the model.
        tasks: evaluations and datasets; None is everything that the run has.
        lines: scale of the first layer's step, of which deeper layers take more (`line_scales`); None: all take one.
    """

    def __init__(
        self,
        first: str,
        second: str,
        overrides: Sequence[str] = (),
        tasks: Sequence[str] | None = None,
        lines: float | None = None,
    ) -> None:
        self.texts = (first, second)
        self.overrides = list(overrides)
        self.lines = lines
        self.infos = (named_checkpoint(first), named_checkpoint(second))
        changed = model_differences(self.infos[0].manifest, self.infos[1].manifest)
        if changed:
            raise UserError(
                f"{first} and {second} are not of one model, and only equal shapes can be averaged; "
                "from the first to the second:\n" + "\n".join(changed)
            )
        self.opened = [open_run(run_dir_of(info)) for info in self.infos[:1]]
        self.opened.append(open_run(run_dir_of(self.infos[1]), self.overrides))
        self.trainer = self.opened[1].empty_trainer()
        # Shapes and places are all that is needed of the initial state; its memory goes to the checkpoints.
        self.trainer.state = jax.tree.map(abstract, self.trainer.state)
        trainer = self.trainer
        self.evaluator = chosen_evaluator(trainer.resolved, trainer.topology, tasks)
        self.ends = tuple(trainer.restorer.weights(info) for info in self.infos)
        scales = None
        if lines is not None:
            parameters = trainer.resolved.model.parameters()
            if not (any(each.num_layers for each in parameters.values()) or _layer_numbers(parameters)):
                raise UserError(
                    f"--lines {lines:g}: this model neither stacks its layers nor numbers them (layer_0, layer_1, …), "
                    "so that their depth is not known"
                )
            scales = line_scales(parameters, lines)
        mixed = interpolate if scales is None else functools.partial(interpolate, scales=scales)
        self._interpolate = jax.jit(mixed, out_shardings=shardings_of(self.ends[0]))

    def weights(self, alpha: float) -> Any:
        """The parameters of an interpolation."""
        return self._interpolate(jnp.float32(alpha), *self.ends)

    def results(self, alpha: float) -> dict[str, TaskResult]:
        """What an interpolation scores, by the evaluator of the run."""
        return self.evaluator.evaluate(self.weights(alpha))

    def evaluate(
        self, alphas: Iterable[float], folder: Path, judge: str | None = None, say: Callable[[str], None] = print
    ) -> Interpolations:
        """Evaluate the alphas that the folder does not have yet, writing `average.json` there after each.

        Args:
            judge: the measure to judge by; None takes the first that all tasks have.
            say: shows a line to the user.
        """
        with run_lock(folder):
            points = read_points(folder, self.inputs)
            found = dataclasses.replace(self.nothing, points=points, measure=judge)
            known = {point.alpha for point in points}
            for alpha in sorted(set(alphas)):
                if alpha in known:
                    say(f"alpha {alpha:g}: evaluated before")
                    continue
                point = _average(alpha, self.results(alpha))
                say(f"alpha {alpha:g}: evaluated")
                ordered = sorted([*found.points, point], key=lambda each: each.alpha)
                found = dataclasses.replace(found, points=tuple(ordered))
                found.write(folder)
            if judge is not None and found.judged_by() is None:
                raise UserError(f"--measure {judge}: not every task has it; there are {', '.join(found.measures())}")
            found.write(folder)
        return found

    @functools.cached_property
    def nothing(self) -> Interpolations:
        """What is known before anything is evaluated."""
        tasks = [*dict.fromkeys([*self.evaluator.tasks, *self.evaluator.rows])]
        old, both = (
            taught(opened, info.manifest["stage"]) for opened, info in zip(self.opened, self.infos, strict=True)
        )
        first, second = (self._end(text, info) for text, info in zip(self.texts, self.infos, strict=True))
        return Interpolations(
            first,
            second,
            inputs=self.inputs,
            old=tuple(name for name in tasks if name in old),
            new=tuple(name for name in tasks if name in both - old),
            lines=self.lines,
        )

    def _end(self, text: str, info: CheckpointInfo) -> Json:
        run, name = split_name(text)
        return {"run": str(run), "checkpoint": name, "step": info.step, "tokens": info.manifest["tokens"]}

    @functools.cached_property
    def inputs(self) -> str:
        """A fingerprint of everything that scores depend on besides alpha."""
        evaluator = self.evaluator
        questions = {name: repr(evaluator.examples(name)) for name in evaluator.tasks}
        rows = {name: [each.prepared.fingerprint, each.style.name] for name, each in evaluator.rows.items()}
        facts: Json = {
            "manifests": [info.manifest for info in self.infos],
            "model": self.trainer.resolved.model.described(),
            "evaluation": dataclasses.asdict(evaluator.config),
            "loss_on": self.trainer.resolved.options.data.loss_on,
            "rows": [rows, evaluator.max_rows],
            "questions": {name: _digest(text) for name, text in questions.items()},
        }
        if self.lines is not None:
            facts["lines"] = self.lines
        return _digest(json.dumps(facts, sort_keys=True, default=str))

    def save(self, alpha: float, folder: Path, asked: str) -> bool:
        """Write an interpolation as a finished run that can be compared, evaluated and exported.

        Args:
            asked: how alpha was chosen: a number, or `best`.

        Returns: whether anything was written; False where the folder holds this very average.
        """
        average = self._provenance(alpha, asked)
        if saved_interpolation(folder) == average:
            return False
        weights, info = self.weights(alpha), self.infos[1]
        found = self.evaluator.evaluate(weights)
        last = int(info.manifest["stage"]) + 1
        earlier = self._earlier(last)
        trainer = self.trainer
        recorder = ResultsRecorder(
            trainer.resolved, folder, lambda: self.evaluator, trainer.data.leaks, Progress(earlier)
        )
        point = recorder.point(info.step, Measurement(("average",), last), found)
        recorder.progress.points.append(point)
        source = run_dir_of(info)
        with new_folder(folder) as made:
            for name in ("tokenizer", "config.yaml"):
                copy = shutil.copytree if (source / name).is_dir() else shutil.copy
                copy(source / name, made / name)
            for step in {str(each["step"]) for each in earlier}:
                if (source / EXAMPLES / step).is_dir():
                    shutil.copytree(source / EXAMPLES / step, made / EXAMPLES / step)
            write_evaluation(made / EXAMPLES / str(info.step), {WEIGHTS: found})
            stages = trainer.resolved.curriculum.stages[:last]
            write_json(made / RESULTS, recorder.results(stages, finished=True, average=average))
            manifest = {**info.manifest, "tags": ["final"], "points": recorder.progress.points}
            manifest.pop("base", None)  # adapters are in these weights already
            store = CheckpointStore(made / "checkpoints")
            try:
                store.save(info.step, {"params": weights}, {**manifest, WEIGHTS_ALONE: average})
            finally:
                store.close()
        return True

    def _provenance(self, alpha: float, asked: str) -> Json:
        """What an average is of, as `results.json` and the checkpoint's manifest hold it."""
        first, second = (self._end(text, info) for text, info in zip(self.texts, self.infos, strict=True))
        known = {
            "alpha": alpha,
            "chosen": asked,
            "first": first["checkpoint"],
            "second": second["checkpoint"],
            "first_run": first["run"],
            "second_run": second["run"],
            "inputs": self.inputs,
        }
        known |= {} if self.lines is None else {"lines": self.lines}
        return known | ({"overrides": self.overrides} if self.overrides else {})

    def _earlier(self, last: int) -> list[Json]:
        """The rows of the matrix that the run had up to the first checkpoint."""
        past = min(self.infos[0].manifest["stage"] + 1, last - 1)
        return [
            {key: value for key, value in point.items() if key != EMA}
            for point in self.infos[1].manifest["points"]
            if (point["row"] or 0) <= past and point["row"] is not None
        ]


def default_folder(first: str, second: str, lines: float | None = None) -> Path:
    """Where the figures of a pair go: beside the second's run, named by the steps, and by `lines` if given."""
    one, two = named_checkpoint(first), named_checkpoint(second)
    same = run_dir_of(one).resolve() == run_dir_of(two).resolve()
    name = str(one.step) if same else f"{run_dir_of(one).resolve().name}@{one.step}"
    return run_dir_of(two) / "averages" / (f"{name}-{two.step}" + ("" if lines is None else f"-lines-{lines:g}"))


def taught(opened: OpenRun, stage: int) -> set[str]:
    """The datasets of a run's stages up to one, counted from 0."""
    curriculum = opened.resolved().curriculum
    return {sampling.name for index in range(stage + 1) for sampling in curriculum.datasets_of(index)}


def saved_interpolation(folder: Path) -> Json | None:
    """What the average in a run's folder is of; None where there is none."""
    try:
        found = json.loads((folder / RESULTS).read_bytes())["average"]
    except (OSError, ValueError, KeyError):
        return None
    return found if isinstance(found, dict) else None


def _average(alpha: float, results: dict[str, TaskResult]) -> Interpolation:
    scores = {
        name: {
            measure: value for measure, value in result.measures.items() if measure in MEASURES and value is not None
        }
        for name, result in results.items()
    }
    return Interpolation(alpha, scores, {name: result.intervals for name, result in results.items()})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
