"""One run, every tracker: its losses are read back from each tracker's own local store."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.report import write_report
from holdfast.tracking import RunInfo, Tracker
from training.tiny import continual, records

pytestmark = pytest.mark.extra
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "mlflow": "mlflow", "trackio": "trackio"}


def installed() -> list[str]:
    found = []
    for name, package in PACKAGES.items():
        try:
            __import__(package)
        except ImportError:
            continue
        found.append(name)
    return found


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run that every tracker followed."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("CONFIG", "CACHE", "DATA"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / "wandb" / name))
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))  # it is read when trackio is imported
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        trainer = continual(folder, f"logging.trackers=[{','.join(installed())}]")
        trainer.run()
        write_report(trainer.spec.run_dir)
        yield trainer.spec.run_dir


def logged(run: Path, kind: str) -> dict[int, float]:
    """The losses that the run itself wrote down, by step."""
    return {record["step"]: record["loss"] for record in records(run, kind)}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format, blocks of 32 KiB, after a head of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # the whole, or the last part, of a record
            yield whole
            whole = b""


def read_wandb(run: Path, name: str) -> dict[int, float]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found = {}
    for data in wandb_records(file.read_bytes()):
        items = Record.FromString(data).history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        if name in row:
            found[row["step"]] = row[name]
    return found


def read_tensorboard(run: Path, name: str) -> dict[int, float]:
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted((run / "tensorboard").glob("events.*")):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += length + 16
            for value in event.summary.value:
                if value.tag == name:
                    found[event.step] = value.simple_value
    return found


def read_mlflow(run: Path, name: str) -> dict[int, float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("general").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["training/batch_size"] == "8"
    assert {each.path for each in client.list_artifacts(found.info.run_id)} >= {"matrix"}
    return {each.step: each.value for each in client.get_metric_history(found.info.run_id, name)}


def read_trackio(run: Path, name: str) -> dict[int, float]:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("general", "default-run")
    return {row["step"]: row[name] for row in rows if name in row}


READERS: dict[str, Any] = {
    "wandb": read_wandb,
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("tracker", list(READERS))
def test_the_losses_of_a_run_are_read_back_from_the_store(tracker: str, tracked: Path) -> None:
    pytest.importorskip(PACKAGES[tracker])
    for kind in ("train", "validation"):
        expected = logged(tracked, kind)
        assert expected
        found = READERS[tracker](tracked, f"{kind}/loss")
        assert found.keys() == expected.keys()
        for step, loss in expected.items():
            # A tensorboard file holds 32 bits of a number.
            exact = struct.unpack("f", struct.pack("f", loss))[0] if tracker == "tensorboard" else loss
            assert found[step] == exact


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_a_resumed_run_goes_on_in_its_store(tracker: str, tmp_path: Path, tracked: Path) -> None:
    pytest.importorskip(PACKAGES[tracker])
    for start in (0, 2):
        with Tracker.open([tracker], RunInfo(tmp_path, name="again", project="resumed", start_step=start)) as sinks:
            sinks.log("train", start + 1, 8, {"loss": float(start)})
            assert sinks.sink(tracker) is not None
    if tracker == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        (run,) = client.search_runs([client.get_experiment_by_name("resumed").experiment_id])
        found = [each.value for each in client.get_metric_history(run.info.run_id, "train/loss")]
    else:
        from trackio.sqlite_storage import SQLiteStorage

        assert SQLiteStorage.get_runs("resumed") == ["default-again"]
        found = [row["train/loss"] for row in SQLiteStorage.get_logs("resumed", "default-again")]
    assert found == [0.0, 2.0]


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_matrix_and_pictures_reach_the_store(tracker: str, tmp_path: Path, tracked: Path) -> None:
    pytest.importorskip(PACKAGES[tracker])
    shutil.copy(tracked / "results.json", tmp_path)
    shutil.copytree(tracked / "figures", tmp_path / "figures")
    with Tracker.open([tracker], RunInfo(tmp_path, name="pictures", project="pictures")) as sinks:
        sinks.summarize(16, tmp_path)
        assert sinks.sink(tracker) is not None  # a sink that failed is dropped
    metrics = json.loads((tracked / "results.json").read_text())["metrics"]["accuracy"]
    if tracker == "mlflow":
        assert (tmp_path / "mlartifacts").is_dir()
        assert {"loss.png", "accuracy.md"} <= {path.name for path in (tmp_path / "mlartifacts").rglob("*")}
        return
    from trackio.sqlite_storage import SQLiteStorage

    (row,) = SQLiteStorage.get_logs("pictures", "default-pictures")
    assert row["results/accuracy/average"] == metrics["average"]
    assert row["report/loss"]["_type"] == "trackio.image"
    assert row["matrix/accuracy"]["_type"] == "trackio.table"
