"""What SLURM's programs print, and what happens when they are not there."""

from pathlib import Path

import pytest

from cluster import programs
from holdfast.cluster import slurm
from holdfast.errors import UserError

SCONTROL = (
    "JobId=21 ArrayJobId=20 ArrayTaskId=0 JobName=x UserId=me(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "RunTime=00:01:02 NodeList=n[1-2] Command=/a/b\n"
    "JobId=20 ArrayJobId=20 ArrayTaskId=1,3%2 JobName=x UserId=me(1) JobState=PENDING Reason=Resources Requeue=1 "
    "Restarts=0 RunTime=00:00:00 NodeList=(null)\n"
)


def test_the_jobs_of_an_array() -> None:
    found = slurm.read_scontrol(SCONTROL)
    assert sorted(index for index in found if index is not None) == [0, 1, 3]
    assert found[0] == slurm.JobState("RUNNING", "", "00:01:02", 2, "n[1-2]")
    assert found[3] == slurm.JobState("PENDING", "Resources", "00:00:00", 0, "")


def test_a_single_job() -> None:
    assert slurm.read_scontrol("JobId=5 JobState=TIMEOUT Reason=TimeLimit\n")[None].state == "TIMEOUT"
    assert slurm.read_sacct("5|CANCELLED by 0|None|00:00:09||None assigned\n")[None].state == "CANCELLED"


@pytest.mark.parametrize(("state", "live"), [("PENDING", True), ("COMPLETING", True), ("FAILED", False)])
def test_which_jobs_are_over(state: str, live: bool) -> None:
    assert slurm.JobState(state).live == live


def test_accounting_is_asked_about_what_the_controller_forgot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgot = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    programs.install(monkeypatch, tmp_path / "bin", scontrol=forgot, sacct="echo '5|COMPLETED|None|00:01:00|1|n1'")
    assert slurm.states("5") == {None: slurm.JobState("COMPLETED", "", "00:01:00", 1, "n1")}
    programs.install(monkeypatch, tmp_path / "bin", sacct="echo 'accounting storage is disabled' >&2; exit 1")
    assert slurm.states("5") == {}


def test_a_controller_that_is_down_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    programs.install(monkeypatch, tmp_path / "bin", scontrol=down)
    with pytest.raises(UserError, match="Unable to contact slurm controller"):
        slurm.states("5")


def test_a_job_is_submitted_without_the_numbers_of_the_job_that_submits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "kept")
    programs.install(monkeypatch, tmp_path / "bin", sbatch='echo "${SLURM_JOB_ID-none}$SLURM_CONF;cluster"')
    assert slurm.submit(tmp_path / "job.sh") == "nonekept"


def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.install(monkeypatch, tmp_path / "bin", sbatch="echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(slurm.RefusedError, match="refused the job: invalid partition"):
        slurm.submit(tmp_path / "job.sh")


def test_a_machine_without_slurm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no SLURM.*--dry-run"):
        slurm.submit(tmp_path / "job.sh")
