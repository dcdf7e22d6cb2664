"""One run in several processes: the same losses as in one, one writer, one end, and a resume on any mesh."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.execution.launching import free_port
from training import killing

pytestmark = pytest.mark.slow

CONFIG = """
job: continual/train/abcd_kl
stages:
- {tokens: 5120, data: [{name: lists, style: PADDED}]}
- {tokens: 7680, data: [{name: arithmetic, style: PADDED}], beta: 0.2, update_reference: true, overlap: 0.8}
training: {batch_size: 8, per_device_batch_size: 8, validation_steps: 8, evaluate: false, validation: false}
architecture: {block_size: 32, preset: tiny, n_layers: 1, n_embd: 32, n_head: 4}
optimization: {kl: {estimator: forward, target: 0.05}, lr: 0.001}
logging: {report_interval: 1, checkpoint_interval: 8, validation_interval: 25}
eval: {evaluations: [arithmetic], limit: 8}
"""
MEASURED = ["training.evaluate=true", "training.validation=true"]
MESHES = {
    "": MEASURED,
    "fsdp-tensor": ["topology.fsdp=2", "topology.tensor=2", *MEASURED],
    "fsdp": ["topology.data=1", "topology.fsdp=4"],
    "data": ["topology.data=4"],
}
TIMEOUT = 600  # of a loaded machine


class Runs:
    """Runs of the one config, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)

    def command(self, name: str, processes: int, devices: int, overrides: list[str]) -> list[str]:
        """The command line of a run in several processes, or in one."""
        rest = [str(self.config), *overrides]
        rest += ["--out", str(self.folder / "runs"), "--name", name]
        if processes == 1:
            return [*killing.COMMAND, "run", *rest]
        return [*killing.COMMAND, "launch", "--processes", str(processes), "--devices-per-process", str(devices), *rest]

    def env(self, devices: int) -> dict[str, str]:
        return killing.environment(self.folder / "cache", devices)

    def start(self, name: str, processes: int, devices: int, *overrides: str) -> "subprocess.Popen[str]":
        command = self.command(name, processes, devices, list(overrides))
        return subprocess.Popen(
            command, env=self.env(devices), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, name: str, processes: int, devices: int, *overrides: str) -> Path:
        process = self.start(name, processes, devices, *overrides)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, output[-3000:]
        return self.path(name)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / "general" / "default" / name

    def whole(self, processes: int, devices: int, mesh: str = "") -> Path:
        """A run that nothing happened to."""
        name = f"whole-{processes}x{devices}{mesh and '-'}{mesh}"
        return self.path(name) if self.path(name).exists() else self.finish(name, processes, devices, *MESHES[mesh])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("processes"))


def until(process: "subprocess.Popen[str]", run_dir: Path, step: int) -> None:
    """Wait until a run has recorded a step."""
    while killing.last_step(run_dir) < step:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.02)


def child(launcher: "subprocess.Popen[str]", index: int) -> int:
    """The process id of one of those that `launch` started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == launcher.pid and words[-3:-1] == [b"--process-id", str(index).encode()]:
            return int(path.name)
    raise AssertionError(f"process {index} is not there")


def results(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "results.json").read_text())
    return found


@pytest.mark.parametrize("mesh", [*MESHES][1:])
def test_the_same_losses_and_scores_however_many_processes(mesh: str, runs: Runs) -> None:
    """In a curriculum with fade, KL budget and padded rows: 2 x 2 and 1 x 1 devices, and on one mesh 1 x 4."""
    one = runs.whole(1, 1)
    expected = killing.losses(one)
    assert len(expected) == 50
    for processes, devices in ((1, 4), (2, 2)) if mesh == "fsdp-tensor" else ((2, 2),):
        found = runs.whole(processes, devices, mesh)
        losses = killing.losses(found)
        assert losses.keys() == expected.keys()
        assert max(abs(losses[step] - expected[step]) for step in expected) < 1e-5
        rows = [[record["rows"] for record in killing.train_records(path)] for path in (one, found)]
        assert rows[0] == rows[1]
        if mesh == "fsdp-tensor":
            for measure, matrix in results(one)["matrix"].items():
                for before, after in zip(matrix, results(found)["matrix"][measure], strict=True):
                    assert after == pytest.approx(before, abs=1e-4), measure
    lines = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    stage = next(line for line in lines if line["kind"] == "stage")
    assert (stage["processes"], stage["devices"]) == (2, 4)


def test_only_the_first_process_writes_and_speaks(runs: Runs) -> None:
    one, two = runs.whole(1, 4, "fsdp-tensor"), runs.whole(2, 2, "fsdp-tensor")
    kinds = [
        [json.loads(line)["kind"] for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (one, two)
    ]
    assert kinds[0] == kinds[1]
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
    process = runs.start("whole-2x2-fsdp-tensor", 2, 2, *MESHES["fsdp-tensor"])
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert output.count("this run is finished") == 1
    assert not [line for line in output.splitlines() if line.startswith("[1]")]


def test_one_that_is_killed_ends_all_and_the_same_command_goes_on(runs: Runs) -> None:
    whole = runs.whole(2, 2, "fsdp")
    launcher = runs.start("killed", 2, 2, *MESHES["fsdp"])
    until(launcher, runs.path("killed"), 27)
    os.kill(child(launcher, 1), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "process 1 of 2 was killed by SIGKILL" in output.splitlines()[-1]
    assert killing.last_step(runs.path("killed")) < 50
    resumed = runs.finish("killed", 2, 2, *MESHES["fsdp"])
    killing.assert_identical(whole, resumed)


def by_hand(
    runs: Runs, name: str, *overrides: str, second: tuple[str, ...] = (), started: int = 2
) -> list["subprocess.Popen[str]"]:
    """Two processes of a run that nobody looks after, as a scheduler starts them.

    Args:
        second: overrides of the second process alone.
        started: how many of the two are started.
    """
    command = [
        *runs.command(name, 1, 2, list(overrides)),
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        "2",
    ]
    return [
        subprocess.Popen(
            [*command, "--process-id", str(index), *(second if index else ())],
            env=runs.env(2),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(started)
    ]


def test_processes_with_different_configs_are_refused_before_the_first_step(runs: Runs) -> None:
    both = by_hand(runs, "differ", *MESHES["data"], second=("optimization.lr=0.3",))
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in both]
    assert [process.returncode for process in both] == [2, 2], errors
    said = "".join(errors)
    assert said.count("process 1 was started with something else than process 0") == 1
    assert "optimization/lr: 0.001 in process 0, 0.3 here" in said
    assert not runs.path("differ").exists()


def test_one_of_two_says_in_a_line_who_is_missing(runs: Runs) -> None:
    (first,) = by_hand(runs, "alone", *MESHES["data"], "topology.start_timeout=2", started=1)
    _, errors = first.communicate(timeout=TIMEOUT)
    assert first.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("failed: process 1 of 2 has not come within 2 s (topology/start_timeout)")


def test_without_a_launcher_the_others_notice_too(runs: Runs) -> None:
    first, second = by_hand(runs, "lost", *MESHES["data"])
    until(first, runs.path("lost"), 9)
    second.send_signal(signal.SIGKILL)
    _, errors = first.communicate(timeout=60)
    second.communicate()
    assert first.returncode == 1
    assert "process 1 has not answered" in errors or "connection to another process broke" in errors
    assert "Traceback" not in errors


def test_a_process_that_hangs_ends_all_with_a_message_and_the_same_command_goes_on(runs: Runs) -> None:
    # Seconds: longer than compiling beside other tests takes, shorter than processes wait for a sign of life (16).
    launcher = runs.start("hangs", 2, 2, *MESHES["data"], "topology.step_timeout=12")
    until(launcher, runs.path("hangs"), 9)
    os.kill(child(launcher, 1), signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 124
    assert "topology/step_timeout" in output
    assert "process 0 of 2 ended with exit code 124" in output.splitlines()[-1]
    assert "loop.py" in (runs.path("hangs") / "stuck-process-0.txt").read_text()
    assert "at step" in output
    resumed = runs.finish("hangs", 2, 2, *MESHES["data"])
    killing.assert_identical(runs.whole(2, 2, "data"), resumed)


def test_a_signal_to_one_process_stops_all_at_one_step(runs: Runs) -> None:
    first, second = by_hand(runs, "told", *MESHES["data"])
    until(first, runs.path("told"), 9)
    second.send_signal(signal.SIGTERM)
    for process in (first, second):
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM, errors[-3000:]
    last = killing.last_step(runs.path("told"))
    assert (runs.path("told") / "checkpoints" / str(last)).is_dir()
    resumed = runs.finish("told", 2, 2, *MESHES["data"])
    killing.assert_identical(runs.whole(2, 2, "data"), resumed)


def test_a_checkpoint_that_one_process_cannot_read_is_skipped_by_all(runs: Runs) -> None:
    launcher = runs.start("corrupt", 2, 2, *MESHES["fsdp"])
    until(launcher, runs.path("corrupt"), 27)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 128 + signal.SIGTERM
    newest = max(int(path.name) for path in (runs.path("corrupt") / "checkpoints").iterdir())
    parts = runs.path("corrupt") / "checkpoints" / str(newest) / "state" / "ocdbt.process_1"
    for file in (path for path in parts.rglob("*") if path.is_file()):
        file.write_bytes(b"\0" * file.stat().st_size)
    process = runs.start("corrupt", 2, 2, *MESHES["fsdp"])
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output[-3000:]
    assert f"checkpoint {newest} cannot be read and is skipped" in output
    assert "resumed at step 24 of 50" in output
    killing.assert_identical(runs.whole(2, 2, "fsdp"), runs.path("corrupt"))


def test_a_mistake_is_said_once_and_ends_all(runs: Runs) -> None:
    process = runs.start("mistake", 2, 3)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert output.count("training/batch_size") == 1
    assert "a multiple of 6" in output
    assert "Traceback" not in output


def test_a_run_moves_from_4_devices_to_2_to_1_and_back_to_4(runs: Runs) -> None:
    whole = runs.whole(1, 1)
    moves = [(1, 4, 2, 12), (2, 1, 2, 24), (1, 1, 1, 36), (2, 2, 4, 50)]
    for processes, devices, fsdp, step in moves:
        if step == 50:
            runs.finish("moves", processes, devices, f"topology.fsdp={fsdp}")
            break
        process = runs.start("moves", processes, devices, f"topology.fsdp={fsdp}")
        until(process, runs.path("moves"), step)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM, output[-3000:]
    moved = runs.path("moves")
    expected, found = killing.losses(whole), killing.losses(moved)
    assert expected.keys() == found.keys()
    assert max(abs(expected[step] - found[step]) for step in expected) < 1e-4
    rows = [[record["rows"] for record in killing.train_records(path)] for path in (whole, moved)]
    assert rows[0] == rows[1]


def test_old_rows_in_slots_give_the_same_losses_on_any_mesh(runs: Runs) -> None:
    """Slots depend on micro-batches and shards; which rows a step has does not, nor what comes of them."""
    old = ["optimization.kl.on=old", "training.replay.rate=0.25"]
    one = runs.finish("slots-1", 1, 1, *old)
    two = runs.finish("slots-2", 2, 2, *old, "training.per_device_batch_size=1", "topology.data=4")
    expected, found = killing.losses(one), killing.losses(two)
    assert expected.keys() == found.keys()
    assert max(abs(expected[step] - found[step]) for step in expected) < 1e-5
    penalties = [[record["penalty"] for record in killing.train_records(path)] for path in (one, two)]
    assert penalties[0][-1] == pytest.approx(penalties[1][-1], abs=1e-5)
    rows = [[record["rows"] for record in killing.train_records(path)] for path in (one, two)]
    assert rows[0] == rows[1]
