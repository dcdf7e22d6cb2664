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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stages without any replay."""
    training = {**VALUES["training"], "replay": None}
    made = tiny.trainer(JOB, {**VALUES, "training": training}, tmp_path_factory.mktemp("alone"))
    made.run()
    found: Path = made.spec.run_dir
    return found


@pytest.mark.parametrize("boundary", [1, 2])
@pytest.mark.parametrize("source", ["data", "self"])
def test_replay_is_switched_on(source: str, boundary: int, alone: Path, tmp_path: Path) -> None:
    """Replay, of own samples too, and A-GEM that needs it, begin with the branch: the past has no replayed rows."""
    on = (f"training.replay={{rate: 0.25, source: {source}}}", "training.methods=[agem]", "training.batch_size=8")
    parent = f"{alone}@boundary_{boundary}"
    made = tiny.trainer(JOB, VALUES, tmp_path, *on, parent=parent)
    tiny.resume(made, lambda _: None)
    assert int(made.state.step) == boundary
    curriculum = made.resolved.curriculum
    old = [any(s.rate < 0.5 for s in curriculum.stages[index].mixture) for index in range(3)]
    assert old == [False, boundary == 1, True]
    if boundary == 2:
        assert made.resolved.options.stages.replay.stages == [2]
    made.run()
    again = tiny.trainer(JOB, VALUES, tmp_path, *on, parent=parent)
    tiny.resume(again, lambda _: None)
    assert again.resolved.curriculum == curriculum
    tiny.same_state(made, again)
