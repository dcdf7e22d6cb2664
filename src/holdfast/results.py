"""Results of runs as data frames and figures.

from holdfast import results
found = results.load("runs/general/default/*")
found[found.metric == "bits_per_byte"].pivot_table(index="stage", columns="task", values="value")
found.matrix(run="first")
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.report.frames import Results


def load(runs: str | Path | Sequence[str | Path]) -> "Results":
    """Results of one run, of all runs that a glob finds, or of several of either: a pandas DataFrame of tidy rows.

    Columns: run, seed, stage, task, metric, value, low, high. Rows with an empty stage and task are metrics of the
    whole matrix, such as `accuracy/forgetting`. A run's path is its name, where several runs have the same. Beside what
    every DataFrame has: `matrix()`, `metrics()`, `curves()`, `figure()`, and a form of its own in a notebook.
    """
    from holdfast.report import frames

    return frames.load([runs] if isinstance(runs, str | Path) else runs)
