"""The scripts below examples/ run to their ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_examples import SHARED
from holdfast.report.run_files import open_run

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrained.py"
MODEL = SHARED / "weights" / "stories260K"
ARMS = ("full", "full-slower", "lora", "kl", "replay", "average-half", "average-best")


def run(out: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(MODEL), "--seeds", "1", "--steps", "2", "--rows", "8", "--out", str(out)],
        env={**os.environ, "XLA_FLAGS": "", "HOLDFAST_DATA": str(SHARED / "data")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the shared weights are not here (HOLDFAST_SHARED names their folder)")
def test_the_pretrained_study_compares_all_arms_and_does_nothing_twice(tmp_path: Path) -> None:
    printed, log = run(tmp_path)
    table = printed[printed.index("| |") :]
    scores = {
        arm: [float(value) for value in values.split("|")]
        for arm, values in re.findall(r"^\| ([a-z -]+) \| (.+) \|$", table, re.MULTILINE)
    }
    assert list(scores) == ["before training", *ARMS]
    assert scores["full"][0] < scores["before training"][0]  # the new was learned
    assert scores["average-best"][2] <= scores["full"][2]
    runs = tmp_path / "pretrained" / "arms"
    assert {path.name for path in runs.iterdir()} == {f"{arm}-s0" for arm in ARMS}
    for arm in ARMS:  # stage 0 changes nothing: the first two rows are the imported model's
        first, second, _ = open_run(runs / f"{arm}-s0").results["matrix"]["nll"]
        assert first == second
    assert (tmp_path / "pretrained" / "compare.html").is_file()
    assert "before training (step 0)" in log
    again, log = run(tmp_path)
    assert again.endswith(table)
    assert "before training (step 0)" not in log
