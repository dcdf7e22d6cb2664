"""Whole runs in which all methods that weigh tokens act at once: meshes, and exact resuming."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from holdfast.execution.checkpoints import list_checkpoints
from training import killing, tiny

pytestmark = pytest.mark.slow

VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "job": "continual/train/abcd",
    "stages": [
        {"tokens": 8 * 32 * 6, "data": [{"name": "lists", "style": "PADDED"}]},
        {"tokens": 8 * 32 * 8, "data": [{"name": "arithmetic", "style": "PACKED"}], "overlap": 0.4},
    ],
    "optimization": {"lr": 0.0003},
    "training": {
        **tiny.CONTINUAL["training"],
        "replay": {"rate": 0.25},
        "per_device_batch_size": 2,
        "methods": ["asft", "eaft", "stm", "talr", "flow"],
        "evaluate": False,
        "validation": False,
    },
    "methods": {"stm": {"quantile": 0.8}},
    "logging": {"report_interval": 1, "checkpoint_interval": 4, "validation_interval": 100},
}
MESHES: dict[int, tuple[str, ...]] = {1: (), 4: ("topology.data=2", "topology.fsdp=2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weighing")
    (made / "config.yaml").write_text(yaml.safe_dump(VALUES))
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, Path]:
    """The whole run on 1 and on 4 devices."""
    return {devices: finish(folder, folder / f"whole_{devices}", devices) for devices in MESHES}


def finish(folder: Path, out: Path, devices: int) -> Path:
    return killing.finish(folder / "config.yaml", out, killing.environment(folder / "cache", devices), *MESHES[devices])


def test_four_devices_are_one_device(whole: dict[int, Path]) -> None:
    one, four = (killing.train_records(whole[devices]) for devices in MESHES)
    for name in ("loss", "ce"):
        np.testing.assert_allclose(*([record[name] for record in records] for records in (one, four)), rtol=1e-6)
    for first, second in zip(one[6:], four[6:], strict=True):
        assert first["methods"].keys() == {"asft", "stm", "talr", "flow"}
        np.testing.assert_allclose(*(list(each["methods"].values()) for each in (first, second)), rtol=1e-4, atol=1e-6)
    assert one[-1]["loss"] < 0.9 * one[-1]["ce"], "tokens weigh less than 1"


@pytest.mark.parametrize(("devices", "step"), [(1, 6), (1, 8), (4, 6), (4, 8)])
def test_a_stopped_run_goes_on_to_the_same_end(
    devices: int, step: int, whole: dict[int, Path], folder: Path, tmp_path: Path
) -> None:
    """At the boundary, where flow's temperature is measured, and inside the stage."""
    run_dir = tmp_path / "general" / "default" / "run"
    shutil.copytree(whole[devices], run_dir)
    for info in list_checkpoints(run_dir / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)
    finish(folder, tmp_path, devices)
    killing.assert_identical(whole[devices], run_dir)
    temperature = killing.final_arrays(run_dir)["['memory']['flow']['temperature']"]
    assert 0 < temperature < np.inf
