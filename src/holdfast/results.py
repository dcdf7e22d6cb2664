"""Results of runs as a pandas DataFrame.

from holdfast import results
frame = results.load("runs/general/default/*")
frame[frame.metric == "bits_per_byte"].pivot_table(index="stage", columns="task", values="value")
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.report.export import COLUMNS, open_runs, tidy

if TYPE_CHECKING:
    import pandas as pd


def load(runs: str | Path | Sequence[str | Path]) -> "pd.DataFrame":
    """Tidy rows of one run, of all runs that a glob finds, or of several of either.

    Columns: run, seed, stage, task, metric, value, low, high. Rows with an empty stage and task are metrics of the
    whole matrix, such as `accuracy/forgetting`. A run's path is its name, where several runs have the same.
    """
    import pandas as pd

    from holdfast.report.groups import run_names

    found = open_runs([runs] if isinstance(runs, str | Path) else runs)
    rows = [row for run, name in zip(found, run_names(found), strict=True) for row in tidy(run, name)]
    return pd.DataFrame(rows, columns=list(COLUMNS))
