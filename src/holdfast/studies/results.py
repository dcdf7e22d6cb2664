"""`results.csv`: what the runs of a study ended with. One format for our studies and for results from elsewhere.

A row is one run, or one old task of a run, or one document of an old task of a run. Columns, in any order:

    arm            what was done; see the reserved names below
    seed           a whole number; runs of one seed are paired
    learning_rate  of the stage that is judged, above 0, in any unit as long as it is one (plain's is an axis)
    old            what was kept: loss on the old task (bits per byte), or accuracy where `measure` says so
    new            what was learned: loss on the new task, the same in all rows of a run (else their mean counts)

and where there is something to say:

    strength       the arm's own setting (weight of a penalty, share of replay); for `plain` the share of the trained
                   weights in an interpolation with the snapshot, 1 or empty for the trained weights themselves
    task           name of the old task; a run has a row for each
    steps          steps of the stage at which this was measured; the largest of a run is its end. Earlier rows of
                   `plain` are early stopping and belong to its frontier, of other arms they give the worst old loss
    document       name of the document of the held-out old text that the row is about; then `old` is its loss
    bytes          of that document: its weight in the mean; all weigh the same without it
    measure        of `old`: `loss` (also where empty) or `accuracy`, from 0 to 1
    role           of the seed: `selection`, on which an arm's configuration is chosen, or `judging` (also where empty)
    parent         name of the checkpoint that the stage began with
    step_seconds, memory_gib, extra_rows, new_tokens, total_tokens
                   cost: means are shown beside the verdict
    relearn_steps, relearned
                   steps of training on the old data again, and 1 if its loss was back by then, 0 if it was given up
    new_kl         KL(before ‖ after) on new rows, nats per token

Columns with other names are left alone. `costs.csv` beside the file, or `NAME.costs.csv` beside `NAME.csv`, may give
the columns of cost for each run, by arm, seed, learning_rate and strength. Reserved names of arms:

    plain          plain training: the frontier, at 5 learning rates or more
    before         what a seed begins its last stage with; learning_rate empty. Its `new` gives the margin, its `old`
                   what plain loses. `plain` with steps 0 says the same
    joint, single  bounds: all data mixed, or each dataset alone; shown without a verdict

Losses are finite and not negative. Every run of a task has the same documents.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.config import read_yaml
from holdfast.errors import UserError
from holdfast.execution.files import write_atomically

RESULTS, COSTS_FILE = "results.csv", "costs.csv"
PLAIN, BEFORE, BOUNDS = "plain", "before", ("joint", "single")
FEWEST_SELECTION_SEEDS = 2
NEEDED = ("arm", "seed", "learning_rate", "old", "new")
NAMING = ("strength", "task", "steps", "document")
OTHER = ("bytes", "measure", "role", "parent")
COSTS = (
    *("step_seconds", "memory_gib", "extra_rows", "new_tokens", "total_tokens", "relearn_steps", "relearned", "new_kl"),
)
COLUMNS = (*NEEDED, *NAMING, *OTHER, *COSTS)
MOST_LOSS = 1e6  # means of larger ones lose the digits of the others
CHOICES = {"measure": ("loss", "accuracy"), "role": ("judging", "selection")}


@dataclass(frozen=True)
class Row:
    """One row of `results.csv`; the columns are told in the module's docstring."""

    arm: str
    seed: int
    learning_rate: float | None
    old: float
    new: float
    strength: str = ""
    task: str = ""
    steps: int | None = None
    document: str = ""
    bytes: float = 1.0
    measure: str = "loss"
    role: str = "judging"
    parent: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def run(self) -> tuple[str, int, float | None, str, int | None]:
        """What tells a measured point of a run from all others."""
        return self.arm, self.seed, self.learning_rate, self.strength, self.steps


def results_file(path: Path, out: Path = Path("runs")) -> Path:
    """The file of results that a path names: itself, or `results.csv` of a study's folder or of its YAML file.

    Args:
        out: the folder of all runs, where a study's own is `study/NAME`.
    """
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        name = read_yaml(path).get("name") or path.stem
        found = out / "study" / str(name) / RESULTS
        if not found.is_file():
            raise UserError(f"{path}: no results in {found}; run the study first, or name its runs' folder with --out")
        return found
    found = path / RESULTS if path.is_dir() else path
    if not found.is_file():
        hint = f"no {RESULTS} in this folder" if path.is_dir() else "there is no such file"
        raise UserError(f"{path}: {hint}; expected a study's folder, or a CSV file with {', '.join(NEEDED)}")
    return found


def read_results(path: Path) -> list[Row]:
    """The rows of a file, checked; the first mistake is named with its line and column."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8 text") from error
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        head = _head(path, next(reader, []))
        places = {name: head.index(name) for name in COLUMNS if name in head}
        rows: list[Row] = []
        lines: dict[tuple[object, ...], int] = {}
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            row = _row(_Line(path, reader.line_num, head, places, cells))
            key = (*row.run, row.task, row.document)
            if key in lines:
                raise UserError(
                    f"{path}:{reader.line_num}: column arm: {row.arm!r}, seed {row.seed} stands in line {lines[key]} "
                    f"already; tell the two apart by {', '.join(('learning_rate', *NAMING))}, or remove one"
                )
            lines[key] = reader.line_num
            rows.append(row)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV ({error}); quote cells with commas or quotes") from error
    if not rows:
        raise UserError(f"{path}: no rows below the header; expected one for each run")
    own = path.with_suffix(f".{COSTS_FILE}")
    return _with_costs(rows, own if own.is_file() else path.with_name(COSTS_FILE))


def rows_of(records: Sequence[Mapping[str, str]]) -> list[Row]:
    """The rows of a table in memory, as they would be read from its file."""
    head = [*dict.fromkeys(name for record in records for name in record)]
    places = {name: head.index(name) for name in COLUMNS if name in head}
    cells = ([record.get(name, "") for name in head] for record in records)
    lines = (_Line(Path(RESULTS), 2 + index, head, places, told) for index, told in enumerate(cells))
    return [_row(line) for line in lines]


def _with_costs(rows: list[Row], path: Path) -> list[Row]:
    """Rows with what `costs.csv` beside them says of their runs: what depends on the machine stands there."""
    if not path.is_file():
        return rows
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for line in table:
        try:
            rate = f"{float(line['learning_rate']):.10g}" if line["learning_rate"] else ""
            costs = {name: float(line[name]) for name in COSTS if line.get(name)}
            found[line["arm"], line["seed"], rate, line["strength"]] = costs
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not the costs of a study ({error}); remove it, or run the study again") from None
    made = []
    for row in rows:
        rate = "" if row.learning_rate is None else f"{row.learning_rate:.10g}"
        costs = {
            k: v for k, v in found.get((row.arm, str(row.seed), rate, row.strength), {}).items() if math.isfinite(v)
        }
        made.append(replace(row, costs={**row.costs, **costs}) if costs else row)
    return made


def _head(path: Path, cells: list[str]) -> list[str]:
    head = [cell.strip() for cell in cells]
    missing = [name for name in NEEDED if name not in head]
    if missing:
        found = ", ".join(head) or "nothing"
        fix = "; put commas between the cells" if len(head) == 1 and head[0] else ""
        raise UserError(f"{path}:1: column {missing[0]} is missing; expected {', '.join(NEEDED)}, found {found}{fix}")
    twice = [name for name in COLUMNS if head.count(name) > 1]
    if twice:
        raise UserError(f"{path}:1: column {twice[0]} stands there twice; remove or rename one")
    return head


@dataclass(frozen=True)
class _Line:
    """One line of the file, with what a message about it needs."""

    path: Path
    number: int
    head: list[str]
    places: Mapping[str, int]
    cells: list[str]

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.head):
            short = len(self.cells) < len(self.head)
            name = self.head[len(self.cells)] if short else self.head[-1]
            told = f"{len(self.cells)} cells for {len(self.head)} columns"
            raise UserError(f"{self.path}:{self.number}: column {name}: {told}; one cell for each column, empty or not")

    def text(self, name: str) -> str:
        return self.cells[self.places[name]].strip() if name in self.places else ""

    def wrong(self, name: str, expected: str, fix: str = "") -> UserError:
        told = f"; {fix}" if fix else ""
        return UserError(
            f"{self.path}:{self.number}: column {name}: got {self.text(name)!r}, expected {expected}{told}"
        )

    def number_of(self, name: str, expected: str = "a number", fix: str = "") -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            raise self.wrong(name, expected, fix) from None
        if not math.isfinite(value) or "_" in self.text(name):  # Python's own way to write 1_000
            raise self.wrong(name, expected, fix)
        return value

    def whole(self, name: str) -> int:
        expected = "a whole number of at least 0"
        value = self.number_of(name, expected)
        if value != int(value) or value < 0:
            raise self.wrong(name, expected)
        return int(value)

    def choice(self, name: str) -> str:
        found, allowed = self.text(name) or CHOICES[name][0], CHOICES[name]
        if found not in allowed:
            raise self.wrong(name, " or ".join(allowed))
        return found


def _row(line: _Line) -> Row:
    arm = line.text("arm")
    if not arm:
        raise line.wrong("arm", "a name")
    measure = line.choice("measure")
    return Row(
        arm,
        line.whole("seed"),
        _learning_rate(line, arm),
        _score(line, "old", measure),
        _score(line, "new", "loss"),
        _strength(line, arm),
        line.text("task"),
        line.whole("steps") if line.text("steps") else None,
        line.text("document"),
        _positive(line, "bytes") if line.text("bytes") else 1.0,
        measure,
        line.choice("role"),
        line.text("parent"),
        {name: line.number_of(name) for name in COSTS if line.text(name)},
    )


def _learning_rate(line: _Line, arm: str) -> float | None:
    if arm in (BEFORE, *BOUNDS):
        return None
    if not line.text("learning_rate"):
        raise line.wrong("learning_rate", "a number above 0", f"only {', '.join((BEFORE, *BOUNDS))} may leave it empty")
    # Two ways to compute one rate differ in the last bits.
    return float(f"{_positive(line, 'learning_rate'):.10g}")


def _positive(line: _Line, name: str) -> float:
    value = line.number_of(name, "a number above 0")
    if value <= 0:
        raise line.wrong(name, "a number above 0")
    return value


def _score(line: _Line, name: str, measure: str) -> float:
    if measure == "accuracy":
        value = line.number_of(name, "an accuracy from 0 to 1")
        if not 0 <= value <= 1:
            raise line.wrong(name, "an accuracy from 0 to 1", "divide percents by 100")
        return value
    fix = "a run that diverged has no loss: leave its arm out, or give the loss of guessing"
    value = line.number_of(name, "a finite loss", fix)
    if value < 0:
        raise line.wrong(name, "a loss of at least 0", "lower is better: a log-likelihood has its sign turned")
    if value > MOST_LOSS:
        raise line.wrong(name, f"a loss of at most {MOST_LOSS:g}", fix)
    return value


def _strength(line: _Line, arm: str) -> str:
    """As it is written; of plain the share of the trained weights, whose usual value needs no name."""
    text = line.text("strength")
    if arm != PLAIN or not text:
        return text
    share = line.number_of("strength", "a share from 0 to 1")
    if not 0 <= share <= 1:
        raise line.wrong("strength", "a share from 0 to 1", "of plain it is the share of the trained weights")
    return "" if share == 1 else f"{share:g}"


def to_csv(rows: Iterable[Row]) -> str:
    """Rows as the text of a file: the needed columns and those that are used, exact to the last bit."""
    told = [_cells(row) for row in rows]
    used = [name for name in COLUMNS if name in NEEDED or any(cells.get(name) for cells in told)]
    text = io.StringIO()
    writer = csv.DictWriter(text, used, extrasaction="ignore", restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(told)
    return text.getvalue()


def _cells(row: Row) -> dict[str, str]:
    return {
        "arm": row.arm,
        "seed": str(row.seed),
        "learning_rate": "" if row.learning_rate is None else repr(row.learning_rate),
        "old": repr(row.old),
        "new": repr(row.new),
        "strength": row.strength,
        "task": row.task,
        "steps": "" if row.steps is None else str(row.steps),
        "document": row.document,
        "bytes": "" if row.bytes == 1.0 else repr(row.bytes),
        "measure": "" if row.measure == CHOICES["measure"][0] else row.measure,
        "role": "" if row.role == CHOICES["role"][0] else row.role,
        "parent": row.parent,
        **{name: repr(value) for name, value in row.costs.items()},
    }


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Write `results.csv`, whole or not at all."""
    write_atomically(path, to_csv(rows))
