"""Results of runs as data frames and figures, with a form of their own in a notebook. Imports pandas."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from holdfast.errors import UserError, require_package
from holdfast.report import page
from holdfast.report.drawing import heat, svg
from holdfast.report.export import BEFORE, COLUMNS, open_runs, tidy
from holdfast.report.groups import run_names
from holdfast.report.run_files import Run
from holdfast.report.verdicts import sentence
from holdfast.tracking.events import scalars
from holdfast.tracking.notebook import in_notebook

SHOWN = ("loss", "forgetting")  # curves that a notebook shows of a run


class Results(pd.DataFrame):
    """Tidy rows of some runs (run, seed, stage, task, metric, value, low, high), and what else can be made of them.

    It is a data frame and takes part in everything that pandas does; what pandas makes of it is a plain data frame.
    """

    _metadata = ["_runs"]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Results":
        """The results of runs; a run's path is its name, where several have the same."""
        named = dict(zip(run_names(list(runs)), runs, strict=True))
        made = cls([row for name, run in named.items() for row in tidy(run, name)], columns=list(COLUMNS))
        object.__setattr__(made, "_runs", named)
        return made

    @property
    def runs(self) -> list[str]:
        """The names of the runs."""
        return list(self._runs)

    def matrix(self, measure: str | None = None, run: str | None = None) -> pd.DataFrame:
        """The score matrix of one run: stages down, tasks across; what was not measured is NaN.

        Args:
            measure: accuracy, bits_per_byte, nll, …; the first that the run has unless given.
            run: which run; needed where there are several.
        """
        found = self._one(run).matrix
        if found is None:
            raise UserError(f"{run or self.runs[0]}: no evaluation was made yet")
        measures = [name for name in page.MEASURES if name in found.measures]
        if measure is not None and measure not in found.measures:
            raise UserError(f"measure: got {measure!r}, expected one of {', '.join(found.measures)}")
        rows = found.measures[measure or measures[0]]
        return pd.DataFrame(list(rows), index=[BEFORE, *found.stages], columns=list(found.tasks), dtype=float)

    def metrics(self) -> pd.DataFrame:
        """A row for each run, a column for each metric of its matrices, such as `accuracy/forgetting`."""
        whole = pd.DataFrame(self)
        return whole[whole.stage == ""].pivot_table(index="run", columns="metric", values="value", sort=False)

    def curves(self, kind: str = "train") -> pd.DataFrame:
        """All numbers of the records of a kind (train, validation): run, step, tokens, name, value."""
        rows = [
            {"run": name, "step": record["step"], "tokens": record["tokens"], "name": key, "value": value}
            for name, run in self._runs.items()
            for record in run.kind(kind)
            for key, value in scalars({k: v for k, v in record.items() if k not in ("kind", "step", "tokens")})
        ]
        return pd.DataFrame(rows, columns=["run", "step", "tokens", "name", "value"])

    def figure(self, name: str = "loss", run: str | None = None) -> Any:
        """A picture of one run as a Matplotlib figure: a curve (loss, forgetting, …) or a matrix (accuracy, nll, …)."""
        require_package("matplotlib", "figures", "figure()")
        from holdfast.report.drawing import png

        one = self._one(run)
        charts = {chart.name: chart for chart in page.charts(one)}
        heats = {each.name.removeprefix("matrix_"): each for each in page.heats(one)}
        if name not in {**charts, **heats}:
            raise UserError(f"figure: got {name!r}, expected one of {', '.join({**charts, **heats})}")
        if in_notebook():  # figures that pyplot did not make are else shown as text
            from IPython import get_ipython
            from IPython.core.pylabtools import select_figure_formats

            select_figure_formats(get_ipython(), {"png"})
        return png.chart_figure(charts[name]) if name in charts else png.heat_figure(heats[name])

    def _one(self, run: str | None) -> Run:
        runs: dict[str, Run] = self._runs
        if run is None and len(runs) == 1:
            return next(iter(runs.values()))
        if run not in runs:
            raise UserError(f"run: got {run!r}, expected one of {', '.join(runs)}")
        return runs[run]

    def _repr_html_(self) -> str:
        """What a notebook shows: what became of each run; of one also matrix and curves, of several metrics."""
        said = "".join(f"<p><b>{escape(name)}</b>: {escape(sentence(run))}</p>" for name, run in self._runs.items())
        if len(self._runs) != 1:
            return f"{said}{self.metrics().to_html(float_format='{:.4g}'.format)}"
        (run,) = self._runs.values()
        drawn = [heat.svg(each) for each in page.heats(run)[:2]]
        drawn += [svg.draw(chart, alone=True) for chart in page.charts(run) if chart.name in SHOWN]
        return said + "".join(map(_image, drawn))


def _image(drawing: str) -> str:
    """A drawing that no style of the page around it can change."""
    data = base64.b64encode(drawing.encode()).decode()
    return f'<p><img style="max-width:100%;background:#fff" src="data:image/svg+xml;base64,{data}"></p>'


def load(patterns: Sequence[Any]) -> Results:
    """The results of the runs that paths and globs name."""
    return Results.of(open_runs(patterns))
