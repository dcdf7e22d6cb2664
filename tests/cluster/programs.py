"""Programs that stand in for SLURM's in tests without one: small shell scripts in a folder of the PATH."""

import os
from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, **scripts: str) -> Path:
    """Make programs of these names; what they were called with is in NAME.log of the folder."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        program = folder / name
        program.write_text(f'#!/bin/bash\necho "$@" >>"{folder}/{name}.log"\n{script}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A PATH on which there is no SLURM, but a shell."""
    folder.mkdir(exist_ok=True)
    for name in ("bash", "sleep", "kill"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))


def calls(folder: Path, name: str) -> list[str]:
    """The arguments of each call of a program."""
    log = folder / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []
