"""A run as its files tell it: finished, in progress, killed or copied elsewhere. Nothing here imports JAX."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import UserError
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.report.live import LOADER, alive
from holdfast.report.timeline import Timeline, from_curriculum, from_records
from holdfast.tracking.jsonl import FILE_NAME, read
from holdfast.training.curricula import LIST_PATHS

CONFIG, RESULTS, EXAMPLES = "config.yaml", "results.json", "evaluations"


def is_run(path: Path) -> bool:
    """Whether a folder holds a run.

    >>> is_run(Path("/nonexistent"))
    False
    """
    return (path / CONFIG).is_file() or (path / FILE_NAME).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """The options of a run as nested mappings; empty when there is no readable file."""
    try:
        tree = yaml.load((path / CONFIG).read_bytes(), Loader=LOADER)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return tree if isinstance(tree, dict) else {}


def read_results(path: Path) -> dict[str, Any]:
    """The content of `results.json`; empty when there is none."""
    try:
        results = json.loads((path / RESULTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def open_run(path: Path) -> "Run":
    """The run in a folder; a folder without one is a user's mistake."""
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    if not is_run(path):
        raise UserError(f"{path}: this folder holds no run ({CONFIG}, {FILE_NAME}); expected OUT/PROJECT/GROUP/NAME")
    metrics = path / FILE_NAME
    records = read(metrics) if metrics.is_file() else []
    return Run(path, read_config(path), records, read_results(path), alive(path))


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that is known of one run.

    Args:
        config: the options as nested mappings, with the key `job`.
        records: the lines of `metrics.jsonl`.
        results: the content of `results.json`.
        running: a process holds the run.
    """

    path: Path
    config: Mapping[str, Any]
    records: list[dict[str, Any]]
    results: Mapping[str, Any]
    running: bool

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.absolute().name

    @property
    def job(self) -> str:
        """The job that the run is of."""
        return str(self.config.get("job", ""))

    @property
    def seed(self) -> Any:
        """The seed of the run."""
        return (self.config.get("training") or {}).get("seed")

    def kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind."""
        return self._by_kind.get(kind, [])

    @functools.cached_property
    def _by_kind(self) -> dict[str, list[dict[str, Any]]]:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for record in self.records:
            by_kind.setdefault(record.get("kind", ""), []).append(record)
        return by_kind

    @functools.cached_property
    def flat(self) -> dict[str, Any]:
        """The options as path -> value; lists are values. An average also has what it is of, under `average/`.

        Beside a `stages` section the lists that it replaces are left out: they are at defaults that nothing reads.
        """
        options = flat({key: value for key, value in self.config.items() if key != "job"})
        if options.get("stages"):
            unused = (*LIST_PATHS, "optimization/kl/beta")
            options = {path: value for path, value in options.items() if path not in unused}
        average = self.results.get("average")
        return options | (flat({"average": average}) if isinstance(average, Mapping) else {})

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Stages, fades and snapshots on the axis of tokens."""
        return from_curriculum(self.job, self.config) or from_records(self.records)

    @property
    def step(self) -> int:
        """Steps done, as far as is recorded."""
        return max((record.get("step", 0) for record in self.records), default=0)

    @property
    def tokens(self) -> int:
        """Tokens seen, as far as is recorded."""
        return max((record.get("tokens", 0) for record in self.records), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        if self.results.get("finished"):
            return True
        # A stage may have been appended since a checkpoint was the last one.
        ends = [record for record in self.kind("checkpoint") if "final" in record.get("tags", ())]
        return not self.running and any(record["step"] >= self.timeline.total_steps for record in ends)

    @property
    def state(self) -> str:
        """`finished`, `running` or `unfinished`."""
        return "finished" if self.finished else "running" if self.running else "unfinished"

    @functools.cached_property
    def point_records(self) -> list[dict[str, Any]]:
        """Every evaluation, in order of steps: those of the metrics, and those that only the results know."""
        found = {record["step"]: record for record in self.results.get("points", []) if "scores" in record}
        found |= {record["step"]: record for record in self.kind("evaluation") if "scores" in record}
        return [found[step] for step in sorted(found)]

    @functools.cached_property
    def points(self) -> list[Point]:
        """Every evaluation, in order of steps."""
        return [Point.from_dict(record) for record in self.point_records]

    @functools.cached_property
    def facts(self) -> dict[str, dict[str, Any]]:
        """What is known of tasks besides scores: chance, majority, count."""
        facts: dict[str, dict[str, Any]] = {}
        for record in self.point_records:
            if record.get("at") != "probe":
                for task, known in (record.get("facts") or {}).items():
                    facts[task] = {**facts.get(task, {}), **known}
        return facts

    @functools.cached_property
    def matrix(self) -> ScoreMatrix | None:
        """The score matrix: of the results when the run is over, else of every evaluation so far."""
        if self.results.get("finished") and "matrix" in self.results:
            return ScoreMatrix.from_results(self.results)
        if not any(point.row is not None for point in self.points):
            return ScoreMatrix.from_results(self.results) if self.results.get("matrix") else None
        stages = self.timeline.stages
        datasets = [list(stage.datasets) for stage in stages]
        known = self.results.get("tasks") or [task for point in self.points for task in point.scores]
        tasks = task_names(known, [])
        chance = {task: facts["chance"] for task, facts in self.facts.items() if facts.get("chance") is not None}
        homes = self.results.get("homes") or task_homes(tasks, datasets)
        # Probes look at few examples: the best of many of them is above chance by luck alone.
        points = [point for point in self.points if point.row is not None and point.row <= len(stages)]
        names = [stage.name for stage in stages]
        return ScoreMatrix.from_points(points, names, tasks, homes, tasks_not_learned(points, chance))

    @functools.cached_property
    def averaged(self) -> "Run | None":
        """The run as the average of its weights (`training/ema`) scored, None where it has none."""
        scored = [{**record, **record["ema"]} for record in self.point_records if "ema" in record]
        if not scored:
            return None
        others = [record for record in self.records if record.get("kind") != "evaluation"]
        results = {**self.results, **self.results.get("ema", {}), "points": scored}
        return dataclasses.replace(self, records=others, results=results)

    def row_point(self, row: int) -> Point | None:
        """The evaluation that is a row of the matrix."""
        return next((point for point in reversed(self.points) if point.row == row), None)

    @functools.cached_property
    def datasets(self) -> tuple[str, ...]:
        """All names that have a colour: datasets of the stages, then other tasks, in order of appearance."""
        stages = [list(stage.datasets) for stage in self.timeline.stages]
        rows = [list(record.get("rows") or {}) for record in self.kind("train")[:1]]
        validated = [list(record.get("losses") or {}) for record in self.kind("validation")[:1]]
        tasks = [task for point in self.points for task in point.scores]
        return task_names([], [*stages, *rows, *validated, tasks])

    def color(self, name: str) -> int:
        """The number of a dataset's colour, the same in every picture."""
        return self.datasets.index(name) if name in self.datasets else len(self.datasets)

    @functools.cached_property
    def model(self) -> dict[str, Any]:
        """The model's specification, as the newest checkpoint's manifest has it."""
        infos = list_checkpoints(self.path / "checkpoints")
        return dict(infos[-1].manifest.get("model", {})) if infos else {}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as path -> value.

    >>> flat({"training": {"seed": 1, "tokens": [1, 2]}})
    {'training/seed': 1, 'training/tokens': [1, 2]}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found
