"""Commands that look at a run's model: eval, generate, forgotten."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.eval import eval_command
from holdfast.cli.forgotten import forgotten_command
from holdfast.cli.generate import generate_command
from holdfast.config import to_yaml
from holdfast.errors import UserError
from holdfast.training.jobs import config_classes
from training.tiny import CONTINUAL, options, trainer

JOB = "continual/train/abcd_kl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("looking")
    before = os.environ.get("HOLDFAST_CACHE")
    os.environ["HOLDFAST_CACHE"] = str(folder / "cache")
    made = trainer(JOB, CONTINUAL, folder)
    made.run()
    config = made.spec.run_dir / "config.yaml"
    if not config.exists():
        config.write_text(to_yaml(options(JOB, CONTINUAL), config_classes(JOB), JOB))
    yield made.spec.run_dir
    if before is None:
        del os.environ["HOLDFAST_CACHE"]
    else:
        os.environ["HOLDFAST_CACHE"] = before


def test_eval_gives_what_the_run_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eval_command(run, checkpoint="final", out=tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    results = json.loads((run / "results.json").read_text())
    for column, task in enumerate(results["tasks"]):
        for measure in ("accuracy", "nll", "bits_per_byte", "kl_forward"):
            assert found[task]["measures"][measure] == pytest.approx(results["matrix"][measure][-1][column], rel=1e-4)
    assert len((tmp_path / "lists.jsonl").read_text().splitlines()) == 8
    eval_command(run, ["eval.limit=3"], checkpoint="boundary_1", tasks="lists")
    table = capsys.readouterr().out
    assert "lists" in table
    assert "arithmetic" not in table
    with pytest.raises(UserError, match="no evaluation 'nothing'"):
        eval_command(run, tasks="nothing")


def test_generate_says_the_same_again_and_shows_checkpoints_side_by_side(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_command(run, "sort 1 2 ->", tokens=5, seed=1)
    first = capsys.readouterr().out
    assert first.startswith("sort 1 2 ->")
    generate_command(run, "sort 1 2 ->", tokens=5, seed=1)
    assert capsys.readouterr().out == first
    generate_command(run, "sort 1 2 ->", ["boundary_1", "final"], tokens=5)
    both = capsys.readouterr().out
    assert "boundary_1" in both
    assert "final" in both


def test_forgotten_lists_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forgotten_command(run, "lists", known="1", lost="2", as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["before"]["right"] and not line["after"]["right"] for line in lines)
    assert all(line["before"]["prompt"] == line["after"]["prompt"] for line in lines)
    forgotten_command(run, "lists")
    assert "examples that were right at step" in capsys.readouterr().out
    with pytest.raises(UserError, match="stages measured: 0"):
        forgotten_command(run, "lists", known="nothing")
