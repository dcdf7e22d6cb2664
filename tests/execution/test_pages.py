"""A command that computes starts itself once more with huge pages, and only where that does something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.execution import pages

PROGRAM = """
import os, sys
from holdfast.execution.pages import start_with_huge_pages
print("start", sys.argv[1:], flush=True)
start_with_huge_pages()
print("go on", os.getpid(), os.environ.get("GLIBC_TUNABLES"), flush=True)
"""


def test_nothing_is_asked_where_it_is_decided_already() -> None:
    decided = {pages.VARIABLE: f"{pages.SETTING}=0"}
    assert pages.with_huge_pages(decided) == decided
    assert not pages.wants_huge_pages(decided)


@pytest.mark.parametrize("switch", ["always madvise [never]", "[always] madvise never", None])
def test_nothing_is_asked_where_it_would_change_nothing(
    switch: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SWITCH", tmp_path / "enabled")
    if switch is not None:
        (tmp_path / "enabled").write_text(switch)
    assert pages.with_huge_pages({"HOME": "/"}) == {"HOME": "/"}


@pytest.mark.skipif(not pages.wants_huge_pages({}), reason="this machine offers no huge pages to ask for")
def test_a_process_starts_once_more_with_what_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != pages.VARIABLE}
    environment[pages.VARIABLE] = "glibc.malloc.arena_max=4"
    process = subprocess.Popen(
        [sys.executable, "program.py", "a", "b c"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    said = process.communicate(timeout=60)[0].splitlines()
    assert said == [
        "start ['a', 'b c']",
        "start ['a', 'b c']",
        f"go on {process.pid} glibc.malloc.arena_max=4:{pages.SETTING}=1",
    ]


def test_the_command_asks_only_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast import __main__ as command

    calls = []
    monkeypatch.setattr(command, "start_with_huge_pages", lambda: calls.append(sys.argv[1]))
    monkeypatch.setattr("holdfast.cli.main", lambda: None)
    for name in ("jobs", "run", "compare", "eval"):
        monkeypatch.setattr(sys, "argv", ["holdfast", name])
        command.start()
    assert calls == ["run", "eval"]
