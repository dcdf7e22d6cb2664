"""Runs under a real SLURM: to the end, pushed out, out of time, cancelled, failed, and as a sweep."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from training import killing

pytestmark = [pytest.mark.slow, pytest.mark.extra]
pytest.importorskip("submitit", reason="submitit is not installed (pip install 'holdfast[slurm]')")

HERE = Path(__file__).parent
CONFIG = """
job: continual/train/abcd_kl
stages:
- {tokens: 30720, data: [{name: lists, style: PADDED}]}
- {tokens: 30720, data: [{name: arithmetic, style: PADDED}], beta: 0.5, update_reference: true, overlap: 0.5}
training: {batch_size: 8, validation_steps: 8}
optimization: {kl: {estimator: forward}, lr: 0.003}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 32, n_head: 4}
logging: {report_interval: 1, checkpoint_interval: 100000, validation_interval: 100000, trackers: [slowly]}
eval: {evaluations: [arithmetic], limit: 8}
"""


def missing() -> str:
    """Why there is no SLURM to test with; empty when there is one."""
    if not shutil.which("sbatch"):
        return "SLURM is not installed (apt-get install slurm-wlm munge)"
    done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    if done.returncode:
        return "no SLURM runs here (as root: tests/cluster/start_slurm.sh FOLDER; SLURM_CONF=FOLDER/slurm.conf)"
    ours = re.search(r"^ClusterName\s*=\s*holdfast-tests$", done.stdout, re.MULTILINE)
    return "" if ours else "this SLURM is not the one of tests/cluster/start_slurm.sh"


@pytest.fixture(scope="module", autouse=True)
def _slurm() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**killing.environment(tmp_path_factory.mktemp("cache")), "PYTHONPATH": path, "COLUMNS": "300"}


@pytest.fixture(scope="module")
def unbroken(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without SLURM and without a break."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "config.yaml").write_text(CONFIG.replace("[slowly]", "[]"))
    return killing.finish(folder / "config.yaml", folder / "runs", env)


class Cluster:
    """The command line of a user who works in a folder."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env
        (folder / "tiny.yaml").write_text(CONFIG)

    def holdfast(self, *arguments: str, seconds: float = 0.0) -> str:
        command = [sys.executable, "-m", "holdfast", "--plugin", "slowly", *arguments]
        env = {**self.env, "SLOWLY_SECONDS": str(seconds)}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_dir(self, *parts: str) -> Path:
        return self.folder.joinpath("runs", "general", *(parts or ("default", "tiny")))

    def numbers(self) -> list[str]:
        """SLURM's numbers of what was submitted."""
        records = self.folder.glob("runs/.submissions/*/submission.json")
        return [json.loads(path.read_text())["job"] for path in records]

    def job(self) -> dict[str, str]:
        """What SLURM says of the one job of the submission."""
        (number,) = self.numbers()
        text = subprocess.check_output(["scontrol", "show", "job", "--oneliner", number], text=True)
        return dict(re.findall(r"(?:^| )(\w+)=(\S*)", text))

    def until(self, what: Callable[[], bool], seconds: float = 900) -> None:
        """Wait; a job that does not do it in time fails with its log."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"{self.holdfast('queue', 'status')}\n{self.holdfast('queue', 'logs')}"
            time.sleep(0.3)

    def ended(self) -> bool:
        """Whether the job will do nothing more."""
        return self.job()["JobState"] not in {
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
            "REQUEUED",
            "PREEMPTED",
        }

    def assert_finished(self, restarts: int) -> None:
        assert self.job()["JobState"] == "COMPLETED", self.holdfast("queue", "logs")
        assert int(self.job()["Restarts"]) >= restarts
        assert "finished" in self.holdfast("queue", "status")


@pytest.fixture
def cluster(tmp_path: Path, env: dict[str, str]) -> Iterator[Cluster]:
    user = Cluster(tmp_path, env)
    yield user
    for number in user.numbers():  # what a failed test left would stand in the way of the next
        subprocess.run(["scancel", number], check=True)


def test_two_tasks_run_to_the_end_as_one_process_with_two_devices_does(cluster: Cluster, env: dict[str, str]) -> None:
    """The same mesh, so the same bits; one device would differ by rounding, which training makes larger."""
    short = ["stages.0.tokens=5120", "stages.1.tokens=5120"]
    said = cluster.holdfast("submit", "tiny.yaml", *short, "--time", "10", "--tasks-per-node", "2")
    assert "processes of a run: 2" in said
    cluster.until(cluster.ended)
    cluster.assert_finished(restarts=0)
    stages = [record for record in killing.records(cluster.run_dir()) if record["kind"] == "stage"]
    assert [(stage["processes"], stage["devices"]) for stage in stages] == [(2, 2), (2, 2)]
    two = {**env, "XLA_FLAGS": env["XLA_FLAGS"].replace("device_count=1", "device_count=2")}
    one_process = killing.finish(
        cluster.folder / "tiny.yaml", cluster.folder / "one", two, *short, "logging.trackers=[]"
    )
    assert len(killing.losses(one_process)) == 40
    assert killing.losses(cluster.run_dir()) == killing.losses(one_process)


@pytest.mark.parametrize("partition", ["normal", "patient"])
def test_a_run_that_is_pushed_out_is_queued_again_and_ends_the_same(
    partition: str, cluster: Cluster, unbroken: Path
) -> None:
    """At once in the one partition; in the other SLURM gives a grace time, in which the job itself must be quick."""
    cluster.holdfast("submit", "tiny.yaml", "--time", "10", "--tasks-per-node", "1", "--cpus-per-task", "2",
                     "--partition", partition, seconds=0.5)  # fmt: skip
    cluster.until(lambda: killing.last_step(cluster.run_dir()) >= 5)
    urgent = ["sbatch", "--partition=urgent", "--cpus-per-task=2", "--output=/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, check=True, capture_output=True)
    cluster.until(cluster.ended)
    cluster.assert_finished(restarts=1)
    log = cluster.holdfast("queue", "logs")
    assert "stopped by SIGTERM at step" in log
    assert ("queued again to go on" in log) == (partition == "patient")
    killing.assert_identical(unbroken, cluster.run_dir())


def test_a_run_whose_time_is_over_is_queued_again_and_ends_the_same(cluster: Cluster, unbroken: Path) -> None:
    """SLURM counts limits in minutes and looks at them twice a minute: the signal comes after 30 to 60 seconds."""
    cluster.holdfast("submit", "tiny.yaml", "--time", "1", "--grace", "30", seconds=0.5)
    cluster.until(lambda: "stopped by SIGUSR1 at step" in cluster.holdfast("queue", "logs"))
    # Once is what is tested; on a busy machine a minute is hardly more than it takes to start.
    subprocess.run(["scontrol", "update", f"JobId={cluster.job()['JobId']}", "TimeLimit=30"], check=True)
    cluster.until(cluster.ended)
    cluster.assert_finished(restarts=1)
    killing.assert_identical(unbroken, cluster.run_dir())


def test_a_sweep_is_an_array_whose_runs_compare_groups(cluster: Cluster) -> None:
    cluster.holdfast("submit", "tiny.yaml", "--time", "10", "--cpus-per-task", "1",
                     "stages.0.tokens=2560", "stages.1.tokens=2560",
                     "--array", "stages.1.beta=0,0.5", "--array", "training/seed=1,2")  # fmt: skip
    cluster.until(lambda: cluster.holdfast("queue", "status").count("COMPLETED") == 4)
    names = sorted(path.name for path in cluster.run_dir("tiny").iterdir())
    assert names == ["tiny-beta=0-s1", "tiny-beta=0-s2", "tiny-beta=0.5-s1", "tiny-beta=0.5-s2"]
    compared = cluster.holdfast("compare", "runs/general/tiny/*")
    assert "tiny-beta=0 (2 seeds)" in compared
    assert "tiny-beta=0.5 (2 seeds)" in compared


def test_a_cancelled_run_saves_and_stays_away(cluster: Cluster) -> None:
    cluster.holdfast("submit", "tiny.yaml", "--time", "10", seconds=0.5)
    cluster.until(lambda: killing.last_step(cluster.run_dir()) >= 3)
    assert "RUNNING" in cluster.holdfast("queue", "status")
    cluster.holdfast("queue", "cancel", "tiny-1")
    cluster.until(cluster.ended)
    assert cluster.job()["JobState"] == "CANCELLED"
    assert cluster.job()["Restarts"] == "0"
    last = killing.last_step(cluster.run_dir())
    assert (cluster.run_dir() / "checkpoints" / str(last)).is_dir()
    assert "has ended already" in cluster.holdfast("queue", "cancel", "tiny-1")


def test_a_run_that_fails_is_not_queued_again(cluster: Cluster) -> None:
    """Its data is there when it is submitted and gone when it starts."""
    data = cluster.folder / "mine.jsonl"
    data.write_text('{"text": "abc"}\n' * 100)
    config = cluster.folder / "tiny.yaml"
    config.write_text(CONFIG.replace("name: lists", "name: mine") + "data: {sources: {mine: {path: mine.jsonl}}}\n")
    cluster.holdfast("submit", "tiny.yaml", "--time", "10", "--setup", f"rm {data}")
    cluster.until(cluster.ended)
    assert cluster.job()["JobState"] == "FAILED"
    assert cluster.job()["Restarts"] == "0"
    assert cluster.job()["ExitCode"] == "2:0"
    assert "mine.jsonl" in cluster.holdfast("queue", "logs")
