"""The quickstart: few lines, every task learned, forgotten plainly and kept with Holdfast, said in words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import UserError
from holdfast.report.run_files import open_run
from holdfast.report.verdicts import verdicts

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 60


def quickstart(folder: Path) -> list[str]:
    """All lines that `holdfast quickstart` prints where there is no terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "quickstart"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=3600,
        env={**os.environ, "XLA_FLAGS": "", "HOLDFAST_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stderr + done.stdout).splitlines()


def test_make_quickstart_is_the_command() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "\t@$(BIN)/holdfast quickstart\n"


def test_a_mistake_in_an_override_is_found_before_the_first_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quickstart", "optimization.kl.estimator=forward", "--out", str(tmp_path / "runs")])
    assert isinstance(done.exception, UserError)  # the plain run has no such option
    assert "optimization/kl" in str(done.exception)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_quickstart_learns_all_and_only_plain_training_forgets(tmp_path: Path) -> None:
    lines = quickstart(tmp_path)
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert lines[-1] == "runs/general/quickstart/compare.html"
    assert not any("leak" in line for line in lines)
    assert sum(line.startswith("after lists (step ") for line in lines) == 2
    runs = tmp_path / "runs" / "general" / "quickstart"
    plain, ours = ({each.task: each for each in verdicts(open_run(runs / name))} for name in ("plain", "holdfast"))
    assert set(plain) == set(ours) == {"docstrings", "pycode", "topics", "lists"}
    for task in ("docstrings", "pycode", "topics"):
        assert (plain[task].own, plain[task].word) == ("learned", "forgotten")
        assert ours[task].own == "learned"
    assert plain["lists"].word == ours["lists"].word == "learned"
    for task in ("docstrings", "pycode"):  # bits per byte
        assert plain[task].now > 2 * plain[task].after
        assert ours[task].now < 1.25 * ours[task].after
    assert plain["topics"].now < 0.5 < ours["topics"].now  # chance is a quarter; machines differ in the rest
    said = " ".join(lines)
    assert re.search(r"docstrings ended at [\d.]+ bits per byte with plain \([\d.]+ after its stage\) and", said)
