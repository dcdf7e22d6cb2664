"""The batch script: what SLURM is asked for, and when a job is queued again, with programs that play SLURM."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import programs
from holdfast.cluster.resources import Resources
from holdfast.cluster.script import batch_script
from holdfast.errors import UserError

RUNNING = "JobId=7 JobState=RUNNING Reason=None PreemptEligibleTime=2026-01-01 PreemptTime=None Restarts=0"
PUSHED_OUT = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00")
COMPLETING = RUNNING.replace("JobState=RUNNING", "JobState=COMPLETING")


def script(folder: Path, *commands: list[str], **asked: Any) -> str:
    pytest.importorskip("submitit", reason="submitit is not installed (pip install 'holdfast[slurm]')")
    return batch_script("x-1", folder, folder, commands or [["true"]], Resources(time="10", **asked))


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return dict(line.partition("=")[::2] for line in lines)


@pytest.mark.extra
def test_what_is_asked_for_stands_in_the_script(tmp_path: Path) -> None:
    asked = options(
        script(
            tmp_path, nodes=2, gpus_per_node=4, cpus_per_task=8, mem="64G", partition="gpu", account="me", qos="high",
            constraint="a100", grace_seconds=90,
        )
    )  # fmt: skip
    assert asked == {
        "job-name": "x-1", "time": "10", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4",
        "cpus-per-task": "8", "mem": "64G", "partition": "gpu", "account": "me", "qos": "high", "constraint": "a100",
        "signal": "B:USR1@90", "requeue": "", "open-mode": "append", "chdir": str(tmp_path),
        "output": f"{tmp_path}/%j_0_log.out",
    }  # fmt: skip


@pytest.mark.extra
@pytest.mark.parametrize("commands", [[["true"]], [["a", "b c"], ["d"]]], ids=["one", "array"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"nodes": 2, "gpus_per_node": 4, "cpus_per_task": 8, "mem": "64G", "setup": ("module load x",), "parallel": 1},
    ],
    ids=["little", "much"],
)
def test_without_submitit_the_script_is_the_same(
    asked: dict[str, Any], commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with a blank"
    by_submitit = script(folder, *commands, **asked)
    monkeypatch.setattr("holdfast.cluster.script.has_submitit", lambda: False)
    assert script(folder, *commands, **asked) == by_submitit


@pytest.mark.extra
def test_what_is_not_asked_for_does_not(tmp_path: Path) -> None:
    assert {"mem", "partition", "gpus-per-node", "array", "wckey", "error"}.isdisjoint(options(script(tmp_path)))


@pytest.mark.extra
def test_setup_comes_before_srun_and_its_cpus_are_told_to_srun(tmp_path: Path) -> None:
    lines = script(tmp_path, setup=("module load cuda", "export A=1"), cpus_per_task=3).splitlines()
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert lines.index("module load cuda") < lines.index("export A=1") < lines.index(srun)
    assert "--cpus-per-task=3" in srun


@pytest.mark.parametrize("name", ["a%j", "a\\b"])
def test_folders_that_slurm_would_read_as_patterns_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose a folder"):
        batch_script("x", tmp_path / name, tmp_path, [["true"]], Resources(time="10"))


def played(
    monkeypatch: pytest.MonkeyPatch, folder: Path, srun: str, *commands: list[str], job: str = RUNNING, **env: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the script as SLURM would; how it ended, and the folder of the programs that it called."""
    control = f'case $1 in show) echo "{job}" ;; esac'
    folder = programs.install(monkeypatch, folder / "bin", srun=srun, scontrol=control)
    (folder / "job.sh").write_text(script(folder, *commands))
    environment = {**os.environ, "SLURM_JOB_ID": "7", **env}
    command = ["bash", folder / "job.sh"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30), folder


def requeued(folder: Path) -> list[str]:
    """What was asked to be queued again."""
    return [call for call in programs.calls(folder, "scontrol") if call.startswith("requeue")]


# SLURM signals the script, which passes it on to srun; this one ends as the run does after its checkpoint.
TIMED_OUT = "trap 'exit 138' USR1\nkill -USR1 $PPID\nwhile :; do sleep 0.05; done"


@pytest.mark.extra
@pytest.mark.parametrize(
    ("srun", "job", "code", "again"),
    [
        ("exit 0", RUNNING, 0, False),
        ("exit 2", RUNNING, 2, False),
        ("exit 1", RUNNING, 1, False),
        (TIMED_OUT, RUNNING, 0, True),
        (TIMED_OUT.replace("138", "134"), RUNNING, 0, True),
        (TIMED_OUT.replace("138", "0"), RUNNING, 0, False),
        (TIMED_OUT, COMPLETING, 138, False),
        ("exit 143", RUNNING, 143, False),
        ("exit 143", PUSHED_OUT, 0, True),
        ("kill -TERM $PPID; sleep 0.3; exit 143", COMPLETING, 143, False),  # a real step does not end at once
    ],
    ids=[
        "finished", "wrong config", "failed", "out of time", "out of time, and a peer aborted", "finished in time",
        "out of time and cancelled", "a peer failed", "pushed out with grace", "pushed out or cancelled",
    ],
)  # fmt: skip
def test_when_a_job_is_queued_again(
    srun: str, job: str, code: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, folder = played(monkeypatch, tmp_path, srun, job=job)
    assert done.returncode == code, done.stderr
    assert requeued(folder) == (["requeue 7"] if again else [])


@pytest.mark.extra
@pytest.mark.parametrize(("restarts", "again"), [(99, True), (100, False)])
def test_a_job_is_not_queued_again_for_ever(
    restarts: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, folder = played(monkeypatch, tmp_path, TIMED_OUT, SLURM_RESTART_COUNT=str(restarts))
    assert bool(requeued(folder)) == again
    assert ("--max-requeues" in done.stderr) == (not again)


@pytest.mark.extra
def test_a_job_of_an_array_runs_its_own_command_and_queues_itself_alone_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [["run", "first"], ["run", "a b", "x=[1, 2]", "$HOME"]]
    env = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "8"}
    _, folder = played(monkeypatch, tmp_path, TIMED_OUT, *commands, **env)
    assert requeued(folder) == ["requeue 7_1"]
    (called,) = programs.calls(folder, "srun")
    assert called.endswith("run a b x=[1, 2] $HOME")
    assert "%A_%a_%t_log.out" in called


@pytest.mark.extra
@pytest.mark.parametrize(("parallel", "array"), [(None, "0-2%3"), (2, "0-2%2")])
def test_an_array_may_be_held_to_some_jobs_at_once(parallel: int | None, array: str, tmp_path: Path) -> None:
    assert options(script(tmp_path, ["a"], ["b"], ["c"], parallel=parallel))["array"] == array
