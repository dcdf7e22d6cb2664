"""A run as its files tell it: finished, in progress, killed or copied elsewhere. Nothing here imports JAX."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.execution.checkpoints import MANIFEST
from holdfast.execution.files import read_regular
from holdfast.report.live import alive
from holdfast.report.records import Records, fit_results, parse_json, parse_yaml, read_records, text
from holdfast.report.timeline import Timeline, from_curriculum, from_records
from holdfast.tracking.jsonl import FILE_NAME
from holdfast.training.config import option_entries
from holdfast.types import Json, JsonView

CONFIG, RESULTS, EXAMPLES = "config.yaml", "results.json", "evaluations"
SECTIONS = (
    "architecture", "data", "eval", "logging", "methods", "optimization", "tokenizer", "topology", "training",
)  # fmt: skip


def is_run(path: Path) -> bool:
    """Whether a folder holds a run.

    >>> is_run(Path("/nonexistent"))
    False
    """
    return (path / CONFIG).is_file() or (path / FILE_NAME).is_file()


def read_config(path: Path) -> Json:
    """The options of a run as nested mappings; empty when there is no readable file."""
    return _config(path)[0]


def _config(path: Path) -> tuple[Json, list[str]]:
    """The options, and what is wrong with them."""
    try:
        data = read_regular(path / CONFIG)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{CONFIG}: {error.strerror}"]
    tree = parse_yaml(data)
    if not isinstance(tree, dict):
        return {}, [f"{CONFIG}: it is no YAML of options"]
    wrong = [
        key for key, value in tree.items() if key in SECTIONS and value is not None and not isinstance(value, dict)
    ]
    problems = [f"{CONFIG}: {key} is no section of options and left out" for key in wrong]
    return {text(key): value for key, value in tree.items() if key not in wrong}, problems


def read_results(path: Path) -> Json:
    """The content of `results.json`; empty when there is none."""
    return _results(path)[0]


def _results(path: Path) -> tuple[Json, list[str]]:
    try:
        tree = parse_json(read_regular(path / RESULTS))
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{RESULTS}: {error.strerror}"]
    return fit_results(tree) if isinstance(tree, dict) else ({}, [f"{RESULTS}: it is no JSON of results"])


def open_run(path: Path, *, curves: bool = True) -> "Run":
    """The run in a folder; a folder without one is a user's mistake.

    Args:
        curves: whether train records are wanted besides the first and the last: a long run has many.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    if not is_run(path):
        raise UserError(f"{path}: this folder holds no run ({CONFIG}, {FILE_NAME}); expected OUT/PROJECT/GROUP/NAME")
    metrics = path / FILE_NAME
    found = read_records(metrics, curves=curves) if metrics.is_file() else Records()
    (config, first), (results, second) = _config(path), _results(path)
    problems = (*first, *filter(None, [found.problem]), *second)
    return Run(path, config, found.records, results, alive(path), problems=problems, every=found.every)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around what is made of a run's files: where they contradict each other, that is a message and no traceback."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{path}: {CONFIG}, {FILE_NAME} and {RESULTS} do not fit together ({type(error).__name__}: "
            f"{text(error)[:200]}); copy them again from where the run was made, or leave this run out"
        ) from error


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that is known of one run.

    Args:
        config: the options as nested mappings, with the key `job`.
        records: the lines of `metrics.jsonl`.
        results: the content of `results.json`.
        running: a process holds the run.
        is_ema: the scores are those of the average of the weights.
        problems: what of the files could not be read, in words.
        every: of so many train records one was read; others are in the files alone.
    """

    path: Path
    config: JsonView
    records: list[Json]
    results: JsonView
    running: bool
    is_ema: bool = False
    problems: tuple[str, ...] = ()
    every: int = 1

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return text(self.path.absolute().name)

    @property
    def job(self) -> str:
        """The job that the run is of."""
        return text(self.config.get("job", ""))

    @property
    def seed(self) -> Any:
        """The seed of the run."""
        seed = (self.config.get("training") or {}).get("seed")
        return seed if seed is None or isinstance(seed, int | str) else text(seed)

    def kind(self, kind: str) -> list[Json]:
        """The records of a kind."""
        return self._by_kind.get(kind, [])

    @functools.cached_property
    def _by_kind(self) -> dict[str, list[Json]]:
        by_kind: dict[str, list[Json]] = {}
        for record in self.records:
            by_kind.setdefault(record.get("kind", ""), []).append(record)
        return by_kind

    @functools.cached_property
    def flat(self) -> Json:
        """The options as path -> value; lists are values. An average also has what it is of, under `average/`.

        Beside a `stages` section the lists that it replaces are left out: they are at defaults that nothing reads.
        """
        options = flat({key: value for key, value in self.config.items() if key != "job"})
        if options.get("stages"):
            replaced = {path for path, entry in option_entries(self.job).items() if entry.replaced_by == "stages"}
            options = {path: value for path, value in options.items() if path not in replaced}
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
    def point_records(self) -> list[Json]:
        """Every evaluation, in order of steps: those of the metrics, and those that only the results know."""
        found = {record["step"]: record for record in self.results.get("points", []) if "scores" in record}
        found |= {record["step"]: record for record in self.kind("evaluation") if "scores" in record}
        return [found[step] for step in sorted(found)]

    @functools.cached_property
    def points(self) -> list[Point]:
        """Every evaluation, in order of steps."""
        return [Point.from_dict(record) for record in self.point_records]

    @functools.cached_property
    def facts(self) -> dict[str, Json]:
        """What is known of tasks besides scores: chance, majority, count."""
        facts: dict[str, Json] = {}
        for record in self.point_records:
            if record.get("at") != "probe":
                for task, known in (record.get("facts") or {}).items():
                    facts[task] = {**facts.get(task, {}), **known}
        return facts

    @functools.cached_property
    def failures(self) -> list[str]:
        """Evaluations that failed, whose cells are empty: which, at which step and why."""
        return [
            f"{task} was not evaluated at step {record['step']}: {facts['failed']}"
            for record in self.point_records
            for task, facts in (record.get("facts") or {}).items()
            if facts.get("failed")
        ]

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
        homes = self.results.get("homes") or task_homes(tasks, datasets)
        points = [point for point in self.points if point.row is not None and point.row <= len(stages)]
        names = [stage.name for stage in stages]
        return ScoreMatrix.from_points(points, names, tasks, homes, tasks_not_learned(points, tasks, homes))

    @functools.cached_property
    def averaged(self) -> "Run | None":
        """The run as the average of its weights (`training/ema`) scored, None where it has none."""
        scored = [{**record, **record["ema"]} for record in self.point_records if "ema" in record]
        if not scored:
            return None
        others = [record for record in self.records if record.get("kind") != "evaluation"]
        results = {**self.results, **self.results.get("ema", {}), "points": scored}
        return dataclasses.replace(self, records=others, results=results, is_ema=True)

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
    def model(self) -> Json:
        """The model's specification, as the newest checkpoint's manifest has it."""
        folder = self.path / "checkpoints"
        steps = [path.name for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        for step in sorted(steps, key=lambda name: (len(name), name), reverse=True):
            try:
                manifest = parse_json(read_regular(folder / step / MANIFEST / "metadata"))
            except OSError:
                continue
            if isinstance(manifest, dict) and isinstance(manifest.get("model"), dict):
                return dict(manifest["model"])
        return {}


def flat(tree: JsonView, prefix: str = "") -> Json:
    """Nested mappings as path -> value.

    >>> flat({"training": {"seed": 1, "tokens": [1, 2]}})
    {'training/seed': 1, 'training/tokens': [1, 2]}
    """
    found: Json = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found
