"""The campaign: counts that can be taken up again, and a short fixed slice of its parts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.campaign.__main__ import details, table
from benchmarks.campaign.framework import ROOT, Counts, Outcome, Try, part, part_names, run_tries


def three(seed: int) -> Iterator[Try]:
    """Three tries: one that holds, one with two outcomes of which one is a finding, one that raises."""
    yield Try("a", lambda: Outcome("file", f"noticed {seed}"))
    yield Try("b", lambda: [Outcome("file", f"noticed {seed}"), Outcome("other", "silent", held=False)])
    yield Try("c", lambda: 1 / 0)  # type: ignore[arg-type, return-value]  # what a broken part does


def test_counts_go_on_where_they_were(tmp_path: Path) -> None:
    path, said = tmp_path / "part.csv", []
    for _ in range(4):
        run_tries(three(7), Counts.read(path), 7, most=1, say=said.append)
    counts = Counts.read(path)
    assert counts.position == {7: 3}
    assert counts.totals() == (4, 2)
    assert counts.outcomes[7, "file", "noticed 7", True] == 2
    assert any("ZeroDivisionError" in line for line in said)
    assert sum(line.startswith("FINDING: ") for line in said) == 2
    run_tries(three(8), counts, 8, say=said.append)
    assert Counts.read(path).position == {7: 3, 8: 3}


def test_every_part_says_what_it_does_and_yields_the_same_tries_for_a_seed() -> None:
    names = ("disks", "flips", "kills", "limits", "manifests", "processes", "scripts")
    assert {*names} <= {*part_names()}
    for name in names:
        if name == "disks" and os.geteuid():
            continue  # mounting a disk needs root
        module = part(name)
        first, again = ([each.name for each, _ in zip(module.tries(3), range(40), strict=False)] for _ in range(2))
        assert first == again
        assert len(set(first)) == 40
        assert module.ABOUT


def test_the_table_has_what_was_tried_and_what_held(tmp_path: Path) -> None:
    counts = Counts.read(tmp_path / "kills.csv")
    counts.add(0, [Outcome("start", "resumed exactly"), Outcome("end", "lost", held=False)])
    counts.write()
    assert table(tmp_path).splitlines()[-1].endswith("| 2 | 1 |")
    assert "| kills | end | **lost** | 1 |" in details(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("flips", 60), ("manifests", 40), ("kills", 1), ("scripts", 60), ("limits", 2)]
)
def test_a_short_fixed_slice_holds(name: str, count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.campaign", name, "--tries", str(count), "--results", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    tried, held = Counts.read(tmp_path / f"{name}.csv").totals()
    assert tried == held > 0, done.stderr[-3000:]
