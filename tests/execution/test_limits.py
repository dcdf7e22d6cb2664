"""Limits of memory and open files: one line that says so, exit code 1, and a run that goes on without the limit."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.execution import limits
from training import tiny


def limited(folder: Path, kind: int, most: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        resource.setrlimit(kind, (most, most))

    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        cwd=folder, preexec_fn=limit, capture_output=True, text=True, timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_too_little_address_space_is_one_line_and_no_hang(tmp_path: Path) -> None:
    """With 230 MB OpenBLAS waited for ever while NumPy was imported."""
    done = limited(tmp_path, resource.RLIMIT_AS, 230 << 20, "prepare", "nothing.yaml")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("failed: there is too little memory: this process may have 230 MB, and needs 384 MB")


def test_few_open_files_are_one_line(tmp_path: Path) -> None:
    done = limited(tmp_path, resource.RLIMIT_NOFILE, 20, "run", "nothing.yaml")
    assert done.returncode == 1
    assert done.stderr == "failed: this process may open 20 files, and needs 64: raise the limit (`ulimit -n 64`)\n"


def test_a_soft_limit_of_files_is_raised_as_far_as_it_may(tmp_path: Path) -> None:
    program = "import resource; from holdfast.execution.limits import check_files; check_files(); "
    program += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 500))

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True
    )
    assert done.stdout.split() == ["500", "500"], done.stderr


@pytest.mark.parametrize("program", ["import os; os.abort()", "import os; os._exit(127)"])
def test_a_library_that_ends_the_process_is_one_line(program: str, tmp_path: Path) -> None:
    said = "import sys; print('a warning', file=sys.stderr); print('terminate called', file=sys.stderr); "
    said += "print('  @ 0x7f', file=sys.stderr, flush=True); "
    path = tmp_path / "program.py"
    path.write_text(f"from holdfast.execution.limits import watch_memory; watch_memory(); {said}{program}")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    done = subprocess.run([sys.executable, str(path)], preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 1
    warning, line = done.stderr.splitlines()
    assert warning == "a warning"
    assert line.startswith("failed: there is too little memory: this process may have 4096 MB")
    assert "`ulimit -v`" in line


def test_the_exit_code_and_what_is_said_are_those_of_the_child(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import sys; from holdfast.execution.limits import watch_memory; watch_memory(); "
        "print('out'); print('*** no crash', file=sys.stderr); sys.exit(3)"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    done = subprocess.run([sys.executable, str(path)], preexec_fn=limit, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "out\n")


def test_without_a_limit_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "address_space", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", None)
    limits.watch_memory()


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [450, 900, 1300, 1700])
def test_a_run_in_little_memory_ends_in_a_line_and_goes_on_with_more(megabytes: int, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"job": "continual/train/abcd_kl", **tiny.CONTINUAL}))
    arguments = ("run", "x.json", "--name", "run", "--quiet", "training.disk_patience=1")
    done = limited(tmp_path, resource.RLIMIT_AS, megabytes << 20, *arguments)
    assert done.returncode in (0, 1)  # what is enough depends on the machine
    assert "Traceback" not in done.stderr
    assert " @ 0x" not in done.stderr
    if done.returncode:
        assert done.stderr.splitlines()[-1].startswith("failed: ")
    assert limited(tmp_path, resource.RLIMIT_CORE, 0, *arguments).returncode == 0
