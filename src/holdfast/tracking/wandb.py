"""Weights & Biases (extra `wandb`); `WANDB_MODE=offline` keeps everything in the run directory."""

import re
from collections.abc import Mapping
from pathlib import Path

from holdfast.registry import trackers
from holdfast.tracking.config import require_extra
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import JsonView


@trackers.register("wandb", help="Weights & Biases; needs the extra holdfast[wandb]")
class WandbSink(Sink):
    """Logs the numbers of recorded events as `kind/name`; the same run id goes on after a resume."""

    def __init__(self, info: RunInfo) -> None:
        require_extra("wandb")
        import wandb

        info.directory.mkdir(parents=True, exist_ok=True)
        identity = info.id or f"{info.project}-{info.group}-{info.name}"
        self._run = wandb.init(
            project=info.project,
            group=info.group,
            name=info.name,
            id=re.sub(r"[^\w-]", "-", identity)[-64:],
            dir=str(info.directory),
            resume="allow",
            config=dict(info.config),
            # Without the facts that wandb collects by itself: paths, user, host, program and repository.
            settings=wandb.Settings(
                console="off", silent=True, x_disable_meta=True, disable_git=True, save_code=False, host="-"
            ),
        )
        # A resumed run may log a step again; an own step axis accepts what wandb's counter would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, event: Event) -> None:
        """Log the numbers of one recorded event."""
        if event.recorded:
            numbers = {f"{event.kind}/{name}": value for name, value in scalars(event.values)}
            self._run.log({"step": event.step, "tokens": event.tokens, **numbers})

    def summarize(self, step: int, results: JsonView, pictures: Mapping[str, Path]) -> None:
        """Log score matrices as tables and pictures as images; the metrics stand in the run's summary."""
        import wandb

        rows = ["before training", *results["stages"]]
        tables = {
            f"matrix/{measure}": wandb.Table(
                columns=["stage", *results["tasks"]],
                data=[[name, *values] for name, values in zip(rows, matrix, strict=True)],
            )
            for measure, matrix in results["matrix"].items()
        }
        images = {f"report/{name}": wandb.Image(str(path)) for name, path in pictures.items()}
        self._run.log({"step": step, **tables, **images})
        self._run.summary.update({f"results/{name}": value for name, value in scalars(results["metrics"])})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
