"""What runs ended with, as the rows of `results.csv`: made from the runs' folders, and read back to run nothing twice.

The columns are those that `holdfast verdict` reads, and `digest`, which says what a row was made with. What depends on
the machine (time of a step, memory) stands in `costs.csv` beside it, so that results are equal to the last bit
wherever, and however often interrupted, they were made.
"""

import csv
import io
import itertools
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

from holdfast.data.plan import DataPlan
from holdfast.errors import UserError
from holdfast.evaluation.results import FOLDER
from holdfast.evaluation.sums import EMA, WEIGHTS, TaskSums, read_sums
from holdfast.execution.files import write_atomically
from holdfast.studies import afterwards
from holdfast.studies.graph import Cell, Graph, StudyRun
from holdfast.studies.study import BEFORE, BOUNDS, PLAIN, Choice, StudyConfig
from holdfast.tracking.jsonl import FILE_NAME as METRICS
from holdfast.training.resolve import ResolvedRun

RESULTS, COSTS, FINISHED, INTERPOLATED = "results.csv", "costs.csv", "results.json", "interpolated"
COLUMNS = (
    *("arm", "seed", "learning_rate", "old", "new", "strength", "task", "steps", "document", "bytes", "role", "parent"),
    *("extra_rows", "new_tokens", "total_tokens", "digest"),
)
COST_COLUMNS = (
    *("arm", "seed", "learning_rate", "strength", "step_seconds", "memory_gib", "run"),
    *("seconds", "machine"),  # of all that a run did itself; a run stands once for each cell that it serves
)
MEASURE = "bits_per_byte"

Row = dict[str, str]


def is_finished(folder: Path) -> bool:
    """Whether a run came to its end, be it a budget's."""
    try:
        return bool(json.loads((folder / FINISHED).read_bytes()).get("finished"))
    except (OSError, ValueError, AttributeError):
        return False


def learning_rate(run: ResolvedRun) -> float:
    """The learning rate of a run's last stage before any schedule."""
    return float(f"{run.config.lr * run.curriculum.stages[-1].lr:.10g}")


def cell_key(row: Row) -> tuple[str, str, str, str]:
    """What tells the cells of a file apart."""
    return row["arm"], row["seed"], row["learning_rate"], row["strength"]


class Collector:
    """Makes the rows of finished runs; those of a run are made once.

    Args:
        graph: of the study.
        folder: of its runs.
    """

    def __init__(self, graph: Graph, folder: Path) -> None:
        self.graph = graph
        self.folder = folder
        self._made: dict[tuple[Cell, str], list[Row]] = {}

    @property
    def config(self) -> StudyConfig:
        """The study's file."""
        return self.graph.study.config

    def rows(self, run: StudyRun, role: str) -> list[Row]:
        """The rows of all cells that a finished run serves, and of what plain adds: early stops, interpolations."""
        found: list[Row] = []
        for cell in run.cells:
            key = (cell, role)
            if key not in self._made:
                self._made[key] = self._rows(cell, run, role)
            found += self._made[key]
        return found

    def _rows(self, cell: Cell, run: StudyRun, role: str) -> list[Row]:
        resolved = self.graph.resolved(cell.arm, cell.choice)
        start = resolved.curriculum.stage_start(self.config.first_stage)
        fixed: Row = {
            "arm": cell.arm,
            "seed": str(cell.seed),
            "learning_rate": "" if cell.arm in BOUNDS else repr(learning_rate(resolved)),
            "strength": strength_text(cell.choice.strength),
            "role": role if role == "selection" else "",
            "parent": run.name if run.parent is None else run.parent,
            "digest": cell_digest(cell, run.digest),
            **tokens_of(resolved, self.config.first_stage),
        }
        end = {**fixed, **afterwards.answers(self.config, self.folder / run.name, cell)}
        if cell.arm in BOUNDS:
            return self._point(fixed, self.sums(run, run.total_steps, WEIGHTS), run.total_steps)
        if cell.weights == "interpolated":
            assert cell.choice.strength is not None, "interpolated weights have a share"
            return self._point(end, self.interpolated(run, cell.choice.strength), run.total_steps - start)
        kind, found = EMA if cell.weights == "ema" else WEIGHTS, []
        for step in sorted({*resolved.options.evaluation.steps, run.total_steps}):
            if step > start:
                told = end if step == run.total_steps else fixed
                found += self._point(told, self.sums(run, step, kind), step - start)
        if cell.arm == PLAIN:
            for share in self.config.plain.interpolations:
                told = {**fixed, "strength": strength_text(share)}
                found += self._point(told, self.interpolated(run, share), run.total_steps - start)
            if cell.choice == Choice(1.0):
                none = dict.fromkeys(("learning_rate", "extra_rows", "new_tokens", "total_tokens"), "")
                before = {**fixed, **none, "arm": BEFORE}
                found += self._point(before, self.sums(run, start, WEIGHTS), 0)
        return found

    def sums(self, run: StudyRun, step: int, kind: str) -> dict[str, TaskSums]:
        """What an evaluation during a run is made of."""
        return read_sums(self.folder / run.name / FOLDER / str(step), kind)

    def interpolated(self, run: StudyRun, share: float) -> dict[str, TaskSums]:
        """What an interpolation of a run's last weights is made of."""
        return read_sums(self.folder / run.name / INTERPOLATED / f"{share:g}")

    def _point(self, fixed: Row, sums: Mapping[str, TaskSums], steps: int) -> list[Row]:
        """One measured point: a row for each old task, or for each of its documents."""
        if not sums:
            return []
        new = sum(loss_of(sums, task) for task in self.config.new_tasks) / len(self.config.new_tasks)
        found = []
        for task in self.config.old:
            told = {**fixed, "new": number(new), "task": task, "steps": str(steps)}
            documents = documents_of(sums[task])
            if not documents:
                found.append({**told, "old": number(loss_of(sums, task))})
            for name, loss, size in documents:
                found.append({**told, "old": number(loss), "document": name, "bytes": f"{size:g}"})
        return found


def cell_digest(cell: Cell, digest: str) -> str:
    """What a cell was made with: its run's options, and which weights were measured."""
    return digest if cell.weights == "last" else f"{digest}-{cell.weights}"


def strength_text(value: float | None) -> str:
    """A strength as a cell of the file."""
    return "" if value is None else f"{value:g}"


def number(value: float) -> str:
    """A loss as a cell of the file; its digits are more than two machines agree on.

    >>> number(1.23456789012)
    '1.2345679'
    """
    return f"{value:.8g}"


def loss_of(sums: Mapping[str, TaskSums], task: str) -> float:
    """Bits per byte of a task's held-out rows."""
    rows = sums[task].rows if task in sums else None
    found = rows.measures()[MEASURE] if rows is not None else None
    if found is None or not math.isfinite(found):
        raise UserError(f"{task}: its held-out loss was not measured; old and new name datasets with held-out rows")
    return found


def documents_of(sums: TaskSums) -> list[tuple[str, float, float]]:
    """Name, bits per byte and bytes of each document; none where there is one alone, which says nothing of others."""
    assert sums.rows is not None, "loss_of has looked at them"
    columns = sums.rows.to_dict()["documents"]
    found = [
        (str(document), nll / size / math.log(2), float(size))
        for document, nll, size in zip(columns["document"], columns["nll"], columns["bytes"], strict=True)
        if size and nll is not None
    ]
    return found if len(found) > 1 else []


def tokens_of(run: ResolvedRun, first_stage: int) -> Row:
    """Rows of old data that an arm draws in the stages that arms differ in, and tokens: of new data, and of all."""
    curriculum, options = run.curriculum, run.options.run
    plan = DataPlan(curriculum, options.seed_of("data"), mixture_unit=options.mixture_unit)
    first = min(first_stage, len(curriculum.stages) - 1)
    start, end = curriculum.stage_start(first), curriculum.total_steps
    before, after = plan.drawn_before(start), plan.drawn_before(end)
    old = sum(after[source] - before[source] for source in plan.sources if curriculum.is_old(source, first))
    rows = (end - start) * curriculum.batch_size
    return {
        "extra_rows": str(old),
        "new_tokens": str((rows - old) * curriculum.block_size),
        "total_tokens": str(rows * curriculum.block_size),
    }


def machine(lines: Iterable[Mapping[str, object]]) -> str:
    """The machine in a few words; how many cores a run could use is in its records."""
    cores = next((line["cores"] for line in lines if line.get("cores")), None)
    told = "" if cores is None else f"{cores} core{'s' if cores != 1 else ''}, "
    return f"{platform.machine()}, {told}Python {platform.python_version()}, JAX {version('jax')}"


def costs_of(folder: Path, start: int, shared_steps: int = 0) -> Row | None:
    """What the steps of a run took; None where nothing was recorded.

    Args:
        start: steps after it count for the time of a step and for memory.
        shared_steps: that another run trained.
    """
    try:
        lines = [json.loads(line) for line in (folder / METRICS).read_bytes().splitlines()]
    except (OSError, ValueError):
        return None
    train = [line for line in lines if line.get("kind") == "train" and line["step"] > start]
    spans = [
        (later["seconds"].get("compute", 0.0) + later["seconds"].get("data", 0.0)) / (later["step"] - earlier["step"])
        for earlier, later in itertools.pairwise(train)
    ]
    if not train:
        return None
    own = [line for line in lines if line.get("kind") == "train" and line["step"] > shared_steps]
    return {
        "step_seconds": f"{median(spans) if spans else float('nan'):.5g}",
        "memory_gib": f"{max(line['memory'] for line in train) / 2**30:.4g}",
        "seconds": f"{sum(sum(line['seconds'].values()) for line in own):.1f}",
        "machine": machine(reversed(lines)),
    }


def to_csv(rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> str:
    """Rows as the text of a file, each once, in an order that does not depend on when they were made.

    What runs were asked afterwards has columns where there are answers.
    """
    text = io.StringIO()
    ordered: list[Row] = sorted(rows, key=_order)
    asked = [name for name in afterwards.COLUMNS if any(row.get(name) for row in ordered)]
    writer = csv.DictWriter(text, [*columns, *asked], restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(ordered)
    return text.getvalue()


def _order(row: Row) -> tuple[int, str, int, float, str, str, int, int, str]:
    arm = row["arm"]
    return (
        {BEFORE: 0, PLAIN: 1}.get(arm, 2),
        arm,
        int(row["seed"]),
        float(row["learning_rate"] or 0),
        row["strength"],
        row.get("task", ""),
        int(row.get("steps") or 0),
        len(row.get("document", "")),
        row.get("document", ""),
    )


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV file by the names of its columns; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: cell or "" for name, cell in row.items()} for row in csv.DictReader(file)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that a study wrote; none where there is none."""
    rows = read_table(path)
    if rows and not {*COLUMNS} <= {*rows[0]}:
        raise UserError(f"{path}: these are not the results of a study: expected the columns {', '.join(COLUMNS)}")
    return rows


def write_rows(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> None:
    """Write rows, the file whole or not at all, unless it says the same already."""
    text = to_csv(rows, columns)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def costs_file(results: Path) -> Path:
    """Where the costs of a file of results stand.

    >>> costs_file(Path("a/results.csv")).name, costs_file(Path("a/stories.csv")).name
    ('costs.csv', 'stories.costs.csv')
    """
    return results.with_name(COSTS) if results.name == RESULTS else results.with_suffix(f".{COSTS}")


def cost_rows(graph: Graph, folder: Path, runs: Iterable[StudyRun], known: Iterable[Row] = ()) -> list[Row]:
    """What the steps of finished runs took, one row for each cell.

    Args:
        known: of earlier files; what they say is not read from the runs' folders again.
    """
    found = {cell_key(row): row for row in known if {*COST_COLUMNS} <= {*row}}
    for run in runs:
        cells = {_cost_key(graph, cell): cell for cell in run.cells}
        if all(key in found and found[key]["run"] == run.name for key in cells):
            continue
        start = graph.configuration(run.cell.arm, run.cell.choice).starts[graph.study.config.first_stage]
        costs = costs_of(folder / run.name, start, run.shared_steps)
        for key in cells if costs is not None else ():
            found[key] = {**dict(zip(COST_COLUMNS, key, strict=False)), **(costs or {}), "run": run.name}
    return [*found.values()]


def _cost_key(graph: Graph, cell: Cell) -> tuple[str, str, str, str]:
    rate = repr(learning_rate(graph.resolved(cell.arm, cell.choice)))
    return cell.arm, str(cell.seed), rate, strength_text(cell.choice.strength)
