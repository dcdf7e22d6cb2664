"""Starting several processes, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.execution.launching import child_environment, free_port, run_all

ENV = dict(os.environ)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_all_well_is_0_and_lines_carry_the_number_of_their_process(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    say = "import sys; print('out'); print('[Gloo] Rank 0 is connected to 1'); print('err', file=sys.stderr)"
    assert run_all([python(say), python(say)], [ENV, ENV]) == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"[0] out", b"[1] out"]
    assert sorted(err.splitlines()) == [b"[0] err", b"[1] err"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, "process 1 of 2 ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 137, "process 1 of 2 was killed by SIGKILL"),
    ],
    ids=["fails", "killed"],
)
def test_one_that_dies_ends_all(
    text: str, code: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.execution.launching.GRACE_SECONDS", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert run_all([python(stubborn), python(text)], [ENV, ENV]) == code
    assert said in capfd.readouterr().err


def test_a_signal_goes_to_all_once() -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda n, f: (print('told', flush=True), sys.exit(128 + n)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )

    launcher = (
        "import os, sys; from holdfast.execution.launching import run_all; sys.exit(run_all(%r, [os.environ] * 2))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher % ([python(polite)] * 2)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    ready = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert sorted(ready) == [b"[0] ready\n", b"[1] ready\n"]
    assert sorted(out.splitlines()) == [b"[0] told", b"[1] told"]
    assert (process.returncode, err) == (143, b"")


def test_they_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    launcher = (
        f"import os; from holdfast.execution.launching import run_all; run_all([{python(child)!r}], [os.environ])"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


def test_each_process_has_its_devices_and_its_share_of_the_processors() -> None:
    env = child_environment(
        {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8"}, index=1, count=2, devices=3
    )
    assert env["JAX_NUM_CPU_DEVICES"] == "3"
    assert env["JAX_LOCAL_DEVICE_IDS"] == "3,4,5"
    assert env["XLA_FLAGS"] == "--a=1"
    assert int(env["PJRT_NPROC"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert child_environment({"PJRT_NPROC": "7"}, 0, 2, 1)["PJRT_NPROC"] == "7"


def test_a_port_is_free() -> None:
    assert 1024 <= free_port() < 65536
