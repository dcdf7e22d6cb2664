"""Malformed run folders against `show`, `report`, `compare` and the board."""

import functools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.campaign import Outcome, Try, scratch
from benchmarks.campaign.looks import tried
from benchmarks.campaign.malformed import Damage, damaged, damages

ABOUT = "malformed run folders: `show`, `report`, `compare` and the board show them or say in one line why not"


@functools.cache
def _good() -> Path:
    """A good run, made once; the tests have what makes it."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
    from fake_runs import FakeRun

    return FakeRun(scratch() / "runs" / "good").go().path


def tries(seed: int) -> Iterator[Try]:
    """Each known damage once, then seeded ones."""
    for name, damage in damages(seed):
        yield Try(name, functools.partial(_act, name, damage))


def _act(name: str, damage: Damage) -> list[Outcome]:
    bad = _good().parent / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    damaged(_good(), bad, damage)
    what = name.rpartition(" ")[0] if name.rpartition(" ")[2].isdigit() else "known"
    return [Outcome(f"{what}: {command}", how, held) for command, how, held in tried(_good(), bad)]
