"""MLflow (extra `mlflow`): `MLFLOW_TRACKING_URI` names a store; without it the run's own `mlflow.db` is one."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.registry import trackers
from holdfast.tracking.config import require_extra
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tensorboard import markdown
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import JsonView

STORE, ARTIFACTS = "mlflow.db", "mlartifacts"
IDENTITY = "holdfast.run"  # the tag by which a resumed run finds itself
LONGEST_PARAM = 6000  # characters that MLflow keeps of an option
PARAMS_AT_ONCE = 100


@trackers.register("mlflow", help="MLflow; needs the extra holdfast[mlflow]")
class MlflowSink(Sink):
    """Logs the numbers of recorded events as `kind/name`; the project is the experiment, a resumed run goes on."""

    def __init__(self, info: RunInfo) -> None:
        require_extra("mlflow")
        from mlflow import MlflowClient

        info.directory.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("MLFLOW_TRACKING_URI")
        folder = info.directory.absolute()
        self._client = MlflowClient(given or f"sqlite:///{folder / STORE}")
        experiment = self._experiment(info.project, None if given else (folder / ARTIFACTS).as_uri())
        self._run = self._find(experiment, info) or self._begin(experiment, info)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifacts))

    def _find(self, experiment: str, info: RunInfo) -> str | None:
        """The id of the run that this one goes on with, running again; None for a new one."""
        if not info.start_step:
            return None
        named = f"tags.`{IDENTITY}` = '{_identity(info)}'"
        found = self._client.search_runs([experiment], named, max_results=1)
        if not found:
            return None
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)

    def _begin(self, experiment: str, info: RunInfo) -> str:
        from mlflow.entities import Param

        tags = {IDENTITY: _identity(info), "group": info.group}
        run = str(self._client.create_run(experiment, tags=tags, run_name=info.name).info.run_id)
        params = [Param(path, str(value)[:LONGEST_PARAM]) for path, value in info.config.items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(run, params=params[start : start + PARAMS_AT_ONCE])
        return run

    def log(self, event: Event) -> None:
        """Log the numbers of one recorded event."""
        if event.recorded:
            self._log({f"{event.kind}/{name}": value for name, value in scalars(event.values)}, event.step)

    def summarize(self, step: int, results: JsonView, pictures: Mapping[str, Path]) -> None:
        """Log metrics, and as artifacts score matrices in text and pictures."""
        self._log({f"results/{name}": value for name, value in scalars(results["metrics"])}, step)
        for measure, matrix in results["matrix"].items():
            text = markdown(results["stages"], results["tasks"], matrix)
            self._client.log_text(self._run, text, f"matrix/{measure}.md")
        for path in pictures.values():
            self._client.log_artifact(self._run, str(path), "report")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])


def _identity(info: RunInfo) -> str:
    return (info.id or f"{info.project}/{info.group}/{info.name}").replace("'", "")
