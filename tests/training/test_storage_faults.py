"""A disk that fills up, turns read-only or vanishes under a run: nothing is lost, and the same command goes on.

The disks are real: small file systems in memory, mounted for the test, so these tests need the right to mount.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from training import killing

pytestmark = pytest.mark.slow

CONFIG = """
job: continual/train/abcd_kl
stages:
- {tokens: 7680, data: [{name: pydocs}]}
- {tokens: 12800, data: [{name: arithmetic, style: PADDED}], beta: 0.2, update_reference: true, overlap: 0.8}
training: {batch_size: 8, validation_steps: 8}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 64, n_head: 4}
optimization: {kl: {estimator: forward}}
logging: {report_interval: 1, checkpoint_interval: 7, validation_interval: 40}
eval: {evaluations: [arithmetic], limit: 8}
"""
STEPS = 80
TIMEOUT = 200  # seconds; a process that waits for threads which nobody wakes takes longer


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


class Disk:
    """A small disk at `place`, which can be filled, made read-only, and taken away and brought back."""

    def __init__(self, folder: Path, size: str) -> None:
        self.backing, self.place = folder / "backing", folder / "disk"
        self.backing.mkdir()
        self.place.mkdir()
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.backing)
        mount("--bind", self.backing, self.place)

    def fill(self) -> None:
        with (self.backing / "ballast").open("wb", buffering=0) as file:
            block = b"x" * 4096
            while True:
                try:
                    file.write(block)
                except OSError:
                    return

    def empty(self) -> None:
        (self.backing / "ballast").unlink()

    def vanish(self) -> None:
        unmount(self.place)

    def come_back(self) -> None:
        mount("--bind", self.backing, self.place)

    def turn_read_only(self) -> None:
        self.vanish()
        self.come_back()
        mount("-o", "remount,bind,ro", self.place)

    def turn_writable(self) -> None:
        self.vanish()
        self.come_back()

    def remove(self) -> None:
        unmount(self.place)
        unmount(self.backing)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a disk needs root")
    try:
        made = Disk(tmp_path, "64m")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk can be mounted here: {error.stderr.decode().strip()}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "config.yaml").write_text(CONFIG)
    return killing.finish(folder / "config.yaml", folder / "out", killing.environment(cache))


class Trial:
    """One run on a disk, from the first process to the last."""

    def __init__(self, folder: Path, disk: Disk, cache: Path) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)
        self.disk, self.env = disk, killing.environment(cache)
        self.run_dir = disk.place / "general" / "default" / "run"

    def start(self, patience: float) -> "subprocess.Popen[bytes]":
        return killing.start(self.config, self.disk.place, self.env, f"training.disk_patience={patience:g}")

    def wait_for(self, step: int, process: "subprocess.Popen[bytes]") -> None:
        while process.poll() is None and killing.last_step(self.run_dir) < step:
            time.sleep(0.01)
        assert process.poll() is None, "the run was too quick for the test"

    def resume(self) -> str:
        """Run the same command to its end; what it printed."""
        command = [*killing.COMMAND, "run", str(self.config), "--out", str(self.disk.place), "--name", "run"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def trial(tmp_path: Path, disk: Disk, cache: Path) -> Trial:
    return Trial(tmp_path, disk, cache)


FAULTS: dict[str, tuple[Callable[[Disk], None], Callable[[Disk], None], str]] = {
    "full": (Disk.fill, Disk.empty, "the disk is full"),
    "read-only": (Disk.turn_read_only, Disk.turn_writable, "the disk is read-only"),
    "vanished": (Disk.vanish, Disk.come_back, "the folder is gone"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_when_its_disk_is_well_again(fault: str, trial: Trial, unbroken: Path) -> None:
    harm, mend, _ = FAULTS[fault]
    process = trial.start(patience=120)
    trial.wait_for(20, process)
    harm(trial.disk)
    time.sleep(3)
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]
    mend(trial.disk)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors.decode()[-3000:]
    assert "Traceback" not in errors.decode()
    assert len(killing.losses(trial.run_dir)) == STEPS
    killing.assert_identical(unbroken, trial.run_dir)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_its_disk_stops_says_so_in_one_line_and_resumes(fault: str, trial: Trial, unbroken: Path) -> None:
    harm, mend, reason = FAULTS[fault]
    process = trial.start(patience=0.2)
    trial.wait_for(20, process)
    harm(trial.disk)
    _, errors = process.communicate(timeout=TIMEOUT)
    mend(trial.disk)
    lines = errors.decode().splitlines()
    failed = [line for line in lines if line.startswith("failed:")]
    assert process.returncode == 1, errors.decode()[-3000:]
    assert len(failed) == 1
    assert reason in failed[0]
    assert "Traceback" not in errors.decode()
    assert "resumed at step" in trial.resume()
    killing.assert_identical(unbroken, trial.run_dir)


def test_a_run_on_a_read_only_disk_does_not_start(trial: Trial) -> None:
    trial.disk.turn_read_only()
    process = trial.start(patience=0)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1].startswith("failed: the disk is read-only")
    assert "Traceback" not in errors.decode()


def damage_arrays(checkpoint: Path) -> None:
    for file in (checkpoint / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            os.truncate(file, file.stat().st_size // 2)


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest" / "metadata").unlink()


@pytest.mark.parametrize("damage", [damage_arrays, damage_manifest])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(
    damage: Callable[[Path], None], trial: Trial, unbroken: Path
) -> None:
    process = trial.start(patience=0)
    trial.wait_for(45, process)
    process.kill()
    process.communicate()
    steps = sorted(int(path.name) for path in (trial.run_dir / "checkpoints").iterdir() if path.name.isdigit())
    damage(trial.run_dir / "checkpoints" / str(steps[-1]))
    said = trial.resume()
    assert f"checkpoint {steps[-1]} " in said
    assert "skipped: " in said
    assert f"resumed at step {steps[-2]} of {STEPS}" in said
    killing.assert_identical(unbroken, trial.run_dir)


def test_preparation_that_fills_its_disk_goes_on_where_there_is_room_again(
    tmp_path: Path, disk: Disk, cache: Path, unbroken: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    env = {**killing.environment(disk.place), "HOLDFAST_CACHE": str(disk.place)}
    mount("-o", "remount,size=256k", disk.backing)
    command = [*killing.COMMAND, "prepare", str(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "the disk is full; what was prepared of" in done.stderr.splitlines()[-1]
    mount("-o", "remount,size=64m", disk.backing)
    subprocess.run(command, env=env, capture_output=True, check=True)
    stores = {path.name: path for path in (cache / "prepared").iterdir() if not path.name.startswith(".")}
    assert stores
    for name, path in stores.items():
        for file in path.iterdir():
            assert (disk.place / "prepared" / name / file.name).read_bytes() == file.read_bytes(), file
