"""Tables on the terminal, and the list of checkpoints that is shown in one."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.options import table


def lines(width: int, *arguments: object, **options: str) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table(*arguments, **options))  # type: ignore[arg-type]  # whatever the test gives
    return captured.get().splitlines()


def test_words_stand_left_and_numbers_right() -> None:
    rows = [("a", "1", "kept", "1.0 MiB"), ("longer", "1,234", "a longer word", "10.0 MiB")]
    shown = lines(80, ("name", "count", "what", "size"), rows)
    assert " a           1  kept            1.0 MiB  " in shown


def test_brackets_are_text() -> None:
    assert any("holdfast[wandb] [red]" in line for line in lines(80, ("[b]", "x"), [("holdfast[wandb] [red]", "1")]))
    assert any("[b]" in line for line in lines(80, ("[b]", "x"), [("y", "1")]))


def test_a_name_is_never_cut() -> None:
    name = "a-name-that-a-command-takes-0123456789abcdef"
    shown = lines(60, ("store", "documents", "tokenizer"), [(name, "1,234,567", "some/very/long/name")], name="store")
    assert any(name in line for line in shown), shown
    assert not any("…" in line for line in shown)


def test_a_best_checkpoint_has_its_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = {10: ["best_0"], 20: ["boundary_1", "best_0"], 30: ["best_1"], 40: ["best_1"], 50: ["final"]}
    for step, names in tags.items():
        manifest = tmp_path / "checkpoints" / str(step) / "manifest" / "metadata"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"tags": names, "tokens": step * 100, "stage": 0}))
    monkeypatch.setenv("COLUMNS", "120")
    said = CliRunner().invoke(app, ["checkpoints", str(tmp_path)], catch_exceptions=False).output
    assert said.count("best_0") == said.count("best_1") == 1
    (line,) = [line for line in said.splitlines() if "best_1" in line]
    assert line.split()[0] == "40"
    assert "boundary_1, best_0" in said
