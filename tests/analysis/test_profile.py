"""Profiles: what is measured, whose scopes are named, and that a run is left alone."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.analysis import profile as profiling
from holdfast.analysis.rehearsal import Rehearsal
from holdfast.errors import UserError
from training import tiny

JOB = "continual/train/abcd_kl"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The profile of the stage with a penalty, and its folder."""
    out = tmp_path_factory.mktemp("profile") / "deeper"
    return profiling.profile(tiny.resolved(JOB, tiny.CONTINUAL), out, steps=3, stage=1), out


def test_a_profile_adds_up(profiled: Any) -> None:
    found, _ = profiled
    assert found.wall > 0
    assert found.compute > 0
    assert found.compute + found.data + found.host == pytest.approx(found.wall, rel=0.5)
    assert 0 < found.share_of_peak < 1.5
    assert found.tokens_per_second == pytest.approx(8 * 32 / found.wall)
    assert found.start >= found.compile > 0


def test_the_references_forward_pass_counts(profiled: Any, tmp_path: Path) -> None:
    found, _ = profiled
    spec = Rehearsal(tiny.resolved(JOB, tiny.CONTINUAL), tmp_path).trainer.resolved.model
    assert found.flops_per_step == pytest.approx(spec.flops_per_token() * 8 * 32 * 4 / 3)


def test_operations_name_places_of_the_model(profiled: Any) -> None:
    found, _ = profiled
    origins = [operation.origin for operation in found.operations]
    assert any(origin.startswith("backward mlp/") for origin in origins)
    assert any(origin.startswith("attention") for origin in origins)
    seconds = [operation.seconds for operation in found.operations]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trace_and_the_figures_are_written(profiled: Any) -> None:
    found, out = profiled
    with gzip.open(out / profiling.TRACE, "rt") as file:
        trace = json.load(file)
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "step" in names
    assert json.loads((out / profiling.FIGURES).read_text()) == found.to_dict()
    assert sorted(path.name for path in out.iterdir()) == [profiling.TRACE, profiling.FIGURES]


def test_a_rehearsal_takes_the_runs_own_steps(tmp_path: Path) -> None:
    """The losses are those that the run itself records."""
    job, values = "gpt/train/pretrain", tiny.PRETRAIN
    trainer = tiny.trainer(job, values, tmp_path / "run")
    trainer.run()
    lines = (trainer.spec.run_dir / "metrics.jsonl").read_text().splitlines()
    recorded = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    rehearsal = Rehearsal(tiny.resolved(job, values), tmp_path / "rehearsal")
    rehearsal.take(4)
    rehearsal.take(2)
    assert rehearsal.losses.found == recorded[:6]


def test_a_stage_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage 2: expected one of 0 to 1"):
        Rehearsal(tiny.resolved(JOB, tiny.CONTINUAL), tmp_path, stage=2)
