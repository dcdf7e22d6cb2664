"""Every method may be switched on in a branch of a plain run, at any of its boundaries."""

from pathlib import Path
from typing import Any

import pytest

from holdfast import registry
from training import tiny

JOB = "continual/train/abcd"
PACKED = {"name": "lists", "style": "PACKED"}
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32, "data": [PACKED]},
        {"tokens": 8 * 32, "data": [{"name": "arithmetic", "style": "PADDED"}]},
        {"tokens": 8 * 32, "data": [{"name": "topics", "style": "PADDED"}]},
    ],
    "architecture": {**tiny.PRETRAIN["architecture"], "n_layers": 1, "n_embd": 16},
    "training": {**tiny.CONTINUAL["training"], "replay": {"rate": 0.25}, "evaluate": False, "validation": False},
    "optimization": {"lr": 0.003},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("plain"))
    made.run()
    found: Path = made.spec.run_dir
    return found


@pytest.mark.parametrize("boundary", [1, 2])
@pytest.mark.parametrize("name", [*registry.methods, "sam"])
def test_it_is_switched_on(name: str, boundary: int, plain: Path, tmp_path: Path) -> None:
    """The branch has the parent's past, and what the method needs for its next stage; it goes on with the same."""
    on = "optimization.sam.rho=0.05" if name == "sam" else f"training.methods=[{name}]"
    made = tiny.trainer(JOB, VALUES, tmp_path, on, parent=f"{plain}@boundary_{boundary}")
    told: list[str] = []
    tiny.resume(made, told.append)
    assert int(made.state.step) == boundary
    assert any(line.startswith("branched from") for line in told)
    assert any("Ω = 0" in line for line in told) == (name == "si")
    if name in ("asft", "stm", "flow"):
        assert made.resolved.curriculum.snapshot_steps() == {boundary: boundary}
        made.save(Path("begun"))  # as if killed at once
        again = tiny.trainer(JOB, VALUES, tmp_path, on, parent=f"{plain}@boundary_{boundary}")
        tiny.resume(again, told.append)
        assert again.resolved.curriculum.snapshot_steps() == {boundary: boundary}
