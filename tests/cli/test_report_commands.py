"""`report`, `show`, `compare` and `board` on the command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_runs import FakeRun
from holdfast.cli.app import app
from holdfast.cli.look import board_command
from holdfast.errors import UserError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        FakeRun(root / f"a-s{seed}", seed=seed, stages=2, probes=False).go()
    return root


def called(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_report_writes_a_page_and_says_where(runs: Path) -> None:
    assert str(runs / "a-s0" / "report.html") in called("report", runs / "a-s0", "--no-pictures").replace("\n", "")
    assert (runs / "a-s0" / "report.html").is_file()
    assert not (runs / "a-s0" / "figures").exists()


def test_show_tells_the_state_of_a_run(runs: Path, tmp_path: Path) -> None:
    assert "Finished: learned" in called("show", runs / "a-s0")
    cut = FakeRun(tmp_path / "cut", stages=2).go(33)
    said = called("show", cut.path)
    assert "Unfinished, stopped at step 32 of 80" in said
    assert "stage stories stage · step 32" in said


def test_compare_writes_all_that_is_asked_for(runs: Path, tmp_path: Path) -> None:
    FakeRun(tmp_path / "other", stages=2, lr=0.5, probes=False).go()
    outputs = [tmp_path / name for name in ("out.html", "out.csv", "out.tex")]
    options = [part for pair in zip(("--html", "--csv", "--latex"), outputs, strict=True) for part in pair]
    said = called("compare", runs / "*", tmp_path / "other", *options)
    assert "optimization/lr" in said
    assert all(path.stat().st_size > 200 for path in outputs)


@pytest.mark.parametrize(
    "arguments", [("report", "nowhere"), ("show", "nowhere"), ("compare", "nowhere*")], ids=" ".join
)
def test_a_run_that_is_not_there_is_a_users_mistake(arguments: tuple[str, ...], tmp_path: Path) -> None:
    name, path = arguments
    with pytest.raises(UserError, match="nowhere"):
        CliRunner().invoke(app, [name, str(tmp_path / path)], catch_exceptions=False)


def test_a_board_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        board_command(tmp_path / "nowhere", 0)
