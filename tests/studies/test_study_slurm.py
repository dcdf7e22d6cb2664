"""A study on a real SLURM: arrays that wait for each other, then what was chosen, and the same table."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.test_real_slurm import missing
from studies.tiny_study import write_study
from training.killing import environment

pytestmark = [pytest.mark.slow, pytest.mark.extra]
pytest.importorskip("submitit", reason="submitit is not installed (pip install 'holdfast[slurm]')")

ARMS = {
    "averaging": {"weights": "interpolated", "shares": [0.2, 0.9]},
    "replay": {"set": ["training.replay={rate: 0.25}"]},
}
SECONDS = 600


def test_a_study_on_slurm_gives_the_same_table(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    path = write_study(tmp_path, seeds={"selection": [8, 9], "judging": [0]}, arms=ARMS)
    env = environment(tmp_path / "cache")

    def holdfast(*arguments: str) -> str:
        command = [sys.executable, "-m", "holdfast", "study", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    holdfast("run", str(path), "--out", "here")
    submitted = holdfast("run", str(path), "--out", "there", "--slurm", "--time", "0:10:00")
    assert submitted.count("job ") >= 3
    again = holdfast("run", str(path), "--out", "there", "--slurm", "--time", "0:10:00")
    results = [tmp_path / place / "study" / "tiny" / "results.csv" for place in ("here", "there")]
    end = time.monotonic() + SECONDS
    while results[0].read_bytes() != (results[1].read_bytes() if results[1].exists() else b""):
        assert time.monotonic() < end, submitted + again + holdfast("status", str(path), "--out", "there")
        time.sleep(1)
    assert "none to submit" in again or "runs are finished" in holdfast("status", str(path), "--out", "there")
