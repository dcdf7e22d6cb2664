"""trackio (extra `trackio`): its local store, which `trackio show` opens; `TRACKIO_DIR` moves it."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.registry import trackers
from holdfast.tracking.config import require_extra
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import JsonView

SIMPLE = (int, float, str)  # options that trackio keeps as they are


@trackers.register("trackio", help="trackio; needs the extra holdfast[trackio]")
class TrackioSink(Sink):
    """Logs the numbers of recorded events as `kind/name`; a resumed run goes on under its name."""

    def __init__(self, info: RunInfo) -> None:
        require_extra("trackio")
        import trackio

        with contextlib.redirect_stdout(sys.stderr):  # its greeting is no result of ours
            self._run = trackio.init(
                project=info.project,
                name=f"{info.group}-{info.name}",
                group=info.group,
                config={
                    path: value if isinstance(value, SIMPLE) else str(value) for path, value in info.config.items()
                },
                resume="allow" if info.start_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, event: Event) -> None:
        """Log the numbers of one recorded event."""
        if event.recorded:
            numbers = {f"{event.kind}/{name}": value for name, value in scalars(event.values)}
            self._run.log({"tokens": event.tokens, **numbers}, step=event.step)

    def summarize(self, step: int, results: JsonView, pictures: Mapping[str, Path]) -> None:
        """Log score matrices as tables, pictures as images, and the metrics."""
        import pandas as pd
        import trackio

        rows = ["before training", *results["stages"]]
        tables = {
            f"matrix/{measure}": trackio.Table(
                dataframe=pd.DataFrame(
                    [[name, *values] for name, values in zip(rows, matrix, strict=True)],
                    columns=["stage", *results["tasks"]],
                )
            )
            for measure, matrix in results["matrix"].items()
        }
        images = {f"report/{name}": trackio.Image(str(path)) for name, path in pictures.items()}
        metrics = {f"results/{name}": value for name, value in scalars(results["metrics"])}
        self._run.log({**metrics, **tables, **images}, step=step)

    def close(self) -> None:
        """Write what is buffered and end the run."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
