"""Results of runs as tidy rows, for CSV files, LaTeX tables and data frames."""

import csv
import glob
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from holdfast.errors import UserError
from holdfast.evaluation.matrix import LOWER_IS_BETTER, Interval
from holdfast.report.drawing.chart import number
from holdfast.report.run_files import Run, is_run, open_run
from holdfast.types import Json

COLUMNS = ("run", "seed", "stage", "task", "metric", "value", "low", "high")
BEFORE = "before training"


def find_runs(patterns: Iterable[str | Path]) -> list[Path]:
    """Run folders that paths or globs name, each once, in order; `**` is allowed, and no run is a mistake."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        # A pattern may be absolute and may hold `**`, which Path.glob takes only below a folder.
        matches = sorted(glob.glob(str(pattern), recursive=True))  # noqa: PTH207
        paths = [path] if path.is_dir() else [Path(name) for name in matches]
        runs = [each for each in paths if each.is_dir() and is_run(each)]
        if not runs:
            raise UserError(f"{pattern}: no run there; expected OUT/PROJECT/GROUP/NAME, or a glob such as 'runs/*/*/*'")
        found |= dict.fromkeys(runs)
    return list(found)


def tidy(run: Run, name: str | None = None) -> Iterator[Json]:
    """One row for each number of a run: cells of its matrices, then its metrics, whose stage and task are empty."""
    matrix = run.matrix
    if matrix is None:
        return
    head = {"run": name or run.name, "seed": run.seed}
    for measure, rows in matrix.measures.items():
        for row, values in enumerate(rows):
            point = run.row_point(row)
            for task, value in zip(matrix.tasks, values, strict=True):
                if value is None:
                    continue
                interval = point.intervals.get(task, {}).get(measure) if point is not None else None
                low, high = interval if interval is not None else (None, None)
                stage = matrix.stages[row - 1] if row else BEFORE
                yield {
                    **head,
                    "stage": stage,
                    "task": task,
                    "metric": measure,
                    "value": value,
                    "low": low,
                    "high": high,
                }
    for measure in matrix.measures:
        for metric, value in metrics_of(run, measure).items():
            if value is not None:
                whole = {"stage": "", "task": "", "metric": f"{measure}/{metric}", "value": value}
                yield {**head, **whole, "low": None, "high": None}


def metrics_of(run: Run, measure: str) -> dict[str, float | None]:
    """The metrics of a run; of a finished one exactly those of its `results.json`."""
    matrix = run.matrix
    if matrix is None or measure not in matrix.measures:
        return {}
    given = run.results.get("metrics", {}).get(measure) if run.results.get("finished") else None
    return dict(given) if given else matrix.metrics(measure)


# What the metrics of a matrix are called where numbers stand in their own unit.
METRIC_NAMES = {
    "average": "at the end",
    "backward_transfer": "change since own stage",
    "forward_transfer": "change before own stage",
    "forgetting": "forgetting",
    "learning_accuracy": "after own stage",
}


def in_unit(measure: str, metric: str, value: float | None) -> float | None:
    """A metric of higher-is-better scores in the unit of its measure, so that a loss is never shown negated.

    Forgetting is a drop of the score, which for a loss is its rise: it has its unit already.

    >>> in_unit("bits_per_byte", "average", -3.5), in_unit("accuracy", "average", 0.5)
    (3.5, 0.5)
    >>> in_unit("bits_per_byte", "backward_transfer", -6.0), in_unit("bits_per_byte", "forgetting", 6.0)
    (6.0, 6.0)
    """
    turned = measure in LOWER_IS_BETTER and metric != "forgetting"
    return -value if turned and value is not None else value


def better(measure: str, metric: str = "") -> str:
    """Which direction is better for a measure, or for a metric of it in its own unit.

    >>> better("bits_per_byte"), better("accuracy"), better("accuracy", "forgetting")
    ('lower', 'higher', 'lower')
    """
    return "lower" if measure in LOWER_IS_BETTER or metric == "forgetting" else "higher"


ARROWS = {"higher": "↑", "lower": "↓"}  # which direction is better


def shown_change(change: float | None, interval: Interval | None, digits: int = 4) -> str:
    """A change with its sign, and its interval where the data gave one.

    >>> shown_change(0.25, (0.1, 0.4)), shown_change(-0.5, None), shown_change(None, None)
    ('+0.25 [0.1, 0.4]', '-0.5', '–')
    """
    text = f"{'+' if (change or 0) > 0 else ''}{number(change, digits)}"
    return text if interval is None else f"{text} [{number(interval[0], 3)}, {number(interval[1], 3)}]"


def to_csv(runs: Sequence[Run], names: Sequence[str]) -> str:
    """All rows of all runs as CSV; what was not measured has no row, what has no interval has empty cells."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run, name in zip(runs, names, strict=True):
        writer.writerows(tidy(run, name))
    return buffer.getvalue()


def latex_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table for LaTeX with booktabs; cells that begin with a backslash or a dollar sign are taken as they are."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{latex(caption)}}}",
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        " & ".join(latex(cell) for cell in head) + " \\\\",
        "\\midrule",
        # A bracket at the start of a row would be the option of the line break before it.
        *("{}" + " & ".join(latex(cell) for cell in row) + " \\\\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def latex(text: str) -> str:
    """A text with LaTeX's own signs escaped.

    >>> latex("a_b & 5 %"), latex("$1 \\\\pm 2$")
    ('a\\\\_b \\\\& 5 \\\\%', '$1 \\\\pm 2$')
    """
    if text.startswith(("\\", "$")):
        return text
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    signs |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"–": "--", "−": "$-$", "…": r"\ldots{}"}
    return "".join(signs.get(sign, sign) for sign in text)


def open_runs(patterns: Iterable[str | Path]) -> list[Run]:
    """The runs that paths or globs name."""
    return [open_run(path) for path in find_runs(patterns)]
