"""A wait that takes too long ends the process with a message and the stacks; anything else does not."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from pathlib import Path
from holdfast.execution.watchdog import Watchdog
with Watchdog(float(sys.argv[1]), Path(sys.argv[2])) as watchdog:
    for _ in range(20):
        with watchdog.waiting("a short thing"):
            time.sleep(0.05)
    time.sleep(1)  # not watched: compiling, evaluation
    if sys.argv[3] == "hang":
        with watchdog.waiting("a thing that never comes"):
            with watchdog.waiting("a short thing"):
                pass
            time.sleep(600)
print("through")
"""


def run(seconds: float, folder: Path, *, hang: bool) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, str(seconds), str(folder), "hang" if hang else "go on"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_wait_without_end_is_ended(tmp_path: Path) -> None:
    done = run(0.4, tmp_path, hang=True)
    assert done.returncode == 124
    report = tmp_path / "stuck-process-0.txt"
    assert "a thing that never comes" in done.stderr
    assert str(report) in done.stderr
    assert "<module>" in report.read_text()


def test_many_short_waits_and_long_other_work_are_no_hang(tmp_path: Path) -> None:
    done = run(0.4, tmp_path, hang=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")
    assert not list(tmp_path.iterdir())


def test_0_watches_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("600", "1"), "0", str(tmp_path), "hang"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "through\n")
