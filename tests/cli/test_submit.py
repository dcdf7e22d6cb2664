"""`holdfast submit` and `holdfast queue` without a SLURM: dry runs, mistakes, records, states; programs play SLURM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import programs
from holdfast.cli import main
from training import tiny

FORGOT = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


class User:
    """Somebody who types commands in a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path) -> None:
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, folder

    def types(self, *arguments: object) -> tuple[int, str]:
        self.capsys.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = self.capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out + said.err

    def submits(self, *arguments: object) -> tuple[int, str]:
        return self.types("submit", "x.yaml", "--time", "10", *arguments)

    def has(self, **scripts: str) -> Path:
        return programs.install(self.monkeypatch, self.folder / "bin", **scripts)

    def records(self) -> list[dict[str, Any]]:
        found = sorted(self.folder.glob("runs/.submissions/*/submission.json"))
        return [json.loads(path.read_text()) for path in found]


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> User:
    values = {"job": "continual/train/abcd_kl", **tiny.CONTINUAL}
    (tmp_path / "x.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return User(monkeypatch, capsys, tmp_path)


needs_submitit = pytest.mark.extra


@pytest.fixture
def _submitit() -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (pip install 'holdfast[slurm]')")


@needs_submitit
@pytest.mark.usefixtures("_submitit")
def test_a_dry_run_prints_the_script_and_needs_no_slurm(user: User) -> None:
    programs.hide(user.monkeypatch, user.folder / "bin")
    code, said = user.submits("--dry-run", "training.seed=3", "--nodes", "2", "--array", "stages/1/beta=0,1")
    assert code == 0
    assert said.startswith("#!/bin/bash\n")
    assert "#SBATCH --array=0-1%2\n" in said
    assert "training.seed=3 --project general --group x" in said
    assert "--name x-beta=1 stages/1/beta=1)" in said
    assert not (user.folder / "runs").exists()


@needs_submitit
@pytest.mark.usefixtures("_submitit")
def test_a_submission_leaves_its_config_script_and_record(user: User) -> None:
    user.has(sbatch="echo 42", scontrol=FORGOT)
    code, said = user.submits("--name", "first", "--partition", "gpu")
    assert code == 0
    assert "first-1: job 42" in said
    folder = user.folder / "runs" / ".submissions" / "first-1"
    assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "submission.json", "x.yaml"]
    assert (folder / "x.yaml").read_text() == (user.folder / "x.yaml").read_text()
    assert f"holdfast run {folder / 'x.yaml'} " in (folder / "job.sh").read_text()
    (record,) = user.records()
    assert record["job"] == "42"
    assert record["runs"] == [{"name": "first", "folder": "general/default/first", "overrides": []}]


def test_a_preparation_is_an_array_of_shards(user: User) -> None:
    code, said = user.submits(
        "--dry-run", "--prepare", "3", "data.workers=2", "--cpus-per-task", "8", "--parallel", "2"
    )
    assert code == 0
    assert "#SBATCH --array=0-2%2\n" in said
    assert "#SBATCH --cpus-per-task=8\n" in said
    copy = user.folder / "runs" / ".submissions" / "x-prepare-1" / "x.yaml"
    for number in (1, 2, 3):
        assert (
            f"    {number - 1}) run=({sys.executable} -m holdfast prepare {copy} data.workers=2 --shard {number}/3) ;;"
            in said
        )
    assert "--name" not in said.partition("srun")[2]
    assert not (user.folder / "runs").exists()


@needs_submitit
@pytest.mark.usefixtures("_submitit")
def test_a_preparation_is_looked_after_in_the_queue(user: User) -> None:
    user.has(
        sbatch="echo 42", scontrol="echo 'JobId=43 ArrayJobId=42 ArrayTaskId=0-1 JobState=PENDING Reason=Priority'"
    )
    code, said = user.submits("--prepare", "2")
    assert code == 0
    assert "x-prepare-1: job 42, 2 shares of the data" in said
    code, said = user.types("queue", "status")
    assert code == 0
    assert said.count("no run") == 2
    assert user.submits("--prepare", "2")[0] == 2  # they are in the queue already


@needs_submitit
@pytest.mark.usefixtures("_submitit")
def test_what_slurm_refuses_leaves_nothing(user: User) -> None:
    user.has(sbatch="echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    code, said = user.submits("--partition", "gpu")
    assert (code, user.records()) == (2, [])
    assert "invalid partition specified: gpu" in said
    assert not list((user.folder / "runs" / ".submissions").iterdir())


@needs_submitit
@pytest.mark.usefixtures("_submitit")
def test_a_run_is_not_submitted_while_a_job_has_it(user: User) -> None:
    user.has(sbatch="echo 42", scontrol="echo 'JobId=42 JobState=PENDING Reason=Priority'")
    assert user.submits()[0] == 0
    code, said = user.submits()
    assert code == 2
    assert "submitted already as x-1 (PENDING)" in said
    assert user.submits("--name", "other")[0] == 0
    user.has(scontrol="echo 'JobId=42 JobState=TIMEOUT Reason=TimeLimit'")
    assert user.submits()[0] == 0
    assert [record["id"] for record in user.records()] == ["other-1", "x-1", "x-2"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--time", "1h"], "--time"),
        (["--grace", "600"], "--grace 600"),
        (["training.batch_sise=3"], "training/batch_size"),
        (["--array", "training/sed=1,2"], "training/seed"),
        (["--array", "stages/1/beta=0,-1"], "stages/1/beta"),
        (["--array", "stages/1/beta"], "--array stages/1/beta"),
        (["--name", "../up"], "--name"),
        (["--group", "a/b"], "--group"),
        (["--from", "nowhere@latest"], "nowhere"),
        (["--from", "a@1", "--init-from", "a@1"], "choose one"),
        (["--gpus-per-node", "4", "topology.fsdp=3"], "topology/fsdp"),
        (["--prepare", "4", "--nodes", "2"], "--prepare: every job is one process"),
        (["--prepare", "4", "--gpus-per-node", "1"], "--prepare: every job is one process"),
        (["--prepare", "4", "--array", "training/seed=1,2"], "without --array"),
        (["--prepare", "4", "training.batch_sise=3"], "training/batch_size"),
        (["--prepare", "4", "--name", "../up"], "--name"),
        (["--prepare", "1000000"], "--prepare 1000000"),
        (["--nodes", "3", "--gpus-per-node", "4", "training.batch_size=16"], "a multiple of 12, the data x"),
    ],
)
def test_mistakes_are_told_before_anything_is_queued(arguments: list[str], told: str, user: User) -> None:
    called = user.has(sbatch="echo 42")
    code, said = user.submits(*arguments)
    assert code == 2, said
    assert told in said
    assert not programs.calls(called, "sbatch")
    assert not (user.folder / "runs").exists()


def test_a_machine_without_slurm_is_told(user: User) -> None:
    programs.hide(user.monkeypatch, user.folder / "bin")
    code, said = user.submits()
    assert code == 2
    assert "sbatch: there is no such program here" in said
    assert "--dry-run" in said
    assert not (user.folder / "runs").exists()


def without_submitit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("submitit.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "submitit", None)


def test_a_missing_extra_is_told(user: User) -> None:
    user.has(sbatch="echo 42")
    without_submitit(user.monkeypatch)
    code, said = user.submits()
    assert code == 2
    assert "pip install 'holdfast[slurm]'" in said
    assert not (user.folder / "runs").exists()


def test_a_dry_run_needs_no_extra(user: User) -> None:
    without_submitit(user.monkeypatch)
    code, said = user.submits("--dry-run", "--array", "stages/1/beta=0,1")
    assert code == 0, said
    assert said.startswith("#!/bin/bash\n")
    assert "#SBATCH --array=0-1%2\n" in said
    assert "--name x-beta=1 stages/1/beta=1)" in said
    assert not (user.folder / "runs").exists()


def submitted(user: User, *names: str, job: str | None = "42", processes: int = 1) -> Path:
    """A submission as `submit` leaves it."""
    folder = user.folder / "runs" / ".submissions" / "x-1"
    folder.mkdir(parents=True)
    runs = [{"name": name, "folder": f"general/x/{name}", "overrides": []} for name in names]
    record = {"id": "x-1", "job": job, "submitted": "2026-01-01T00:00:00+00:00", "config": "x.yaml", "runs": runs}
    (folder / "submission.json").write_text(json.dumps({**record, "processes": processes}))
    return folder


def test_the_table_of_a_queue(user: User) -> None:
    submitted(user, "a", "b")
    user.has(
        scontrol="echo 'JobId=43 ArrayJobId=42 ArrayTaskId=0 JobState=RUNNING Restarts=3 RunTime=00:05:00'\n"
        "echo 'JobId=42 ArrayJobId=42 ArrayTaskId=1%1 JobState=PENDING Reason=JobArrayTaskLimit Restarts=0'"
    )
    code, said = user.types("queue", "status")
    first, second = [line for line in said.splitlines() if "x-1" in line]
    assert code == 0
    assert [text in first for text in ("42_0", "RUNNING", "00:05:00", " 3 ", "general/x/a")] == [True] * 5
    assert [text in second for text in ("42_1", "PENDING (JobArrayTaskLimit)", "not started")] == [True] * 3
    assert "42_0" not in user.types("queue", "status", "b")[1]


def test_a_job_that_slurm_forgot_is_known_by_its_run(user: User) -> None:
    submitted(user, "a")
    user.has(scontrol=FORGOT, sacct="exit 1")
    assert "unknown (SLURM knows it no more; the run is unfinished)" in user.types("queue", "status", "x-1")[1]
    folder = user.folder / "runs/general/x/a"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text('{"finished": true}')
    assert "COMPLETED (by its results)" in user.types("queue", "status", "42")[1]


def test_a_submission_that_was_cut_off_is_told(user: User) -> None:
    submitted(user, "a", job=None)
    user.has(scontrol=FORGOT, scancel="")
    assert "not submitted" in user.types("queue", "status")[1]
    for command in ("logs", "cancel"):
        code, said = user.types("queue", command, "x-1")
        assert code == 2
        assert "cut off" in said


def test_logs_of_tasks_and_of_arrays(user: User) -> None:
    folder = submitted(user, "a", "b", processes=2)
    (folder / "42_0_0_log.out").write_text("one\ntwo\n")
    (folder / "42_1_1_log.out").write_text("three\n")
    assert user.types("queue", "logs", "a", "--lines", "1") == (0, "two\n")
    assert user.types("queue", "logs", "42_1", "--task", "1") == (0, "three\n")
    code, said = user.types("queue", "logs")
    assert said == f"==> {folder}/42_0_0_log.out <==\none\ntwo\n==> {folder}/42_1_0_log.out <==\n(nothing yet)\n"
    code, said = user.types("queue", "logs", "--task", "2")
    assert code == 2
    assert "--task 2" in said


def test_logs_are_followed_until_the_job_ends(user: User) -> None:
    folder = submitted(user, "a")
    log = folder / "42_0_log.out"
    log.write_text("one\n")
    # Each time SLURM is asked, the job has said something more; the third time it is over.
    user.has(
        scontrol=f'echo line >>"{log}"; state=RUNNING\n'
        f'(($(grep -c line "{log}") < 3)) || state=COMPLETED\necho "JobId=42 JobState=$state"'
    )
    assert user.types("queue", "logs", "--follow") == (0, "one\nline\nline\nline\n")


def test_cancelling(user: User) -> None:
    submitted(user, "a", "b")
    called = user.has(scancel="", scontrol="echo 'JobId=42 ArrayJobId=42 ArrayTaskId=0-1 JobState=PENDING'")
    assert user.types("queue", "cancel", "b")[1] == "x-1: cancelled 42_1\n"
    assert user.types("queue", "cancel", "x-1")[1] == "x-1: cancelled 42_0, 42_1\n"
    assert programs.calls(called, "scancel") == ["42_1", "42"]
    user.has(scontrol=FORGOT)
    assert "has ended already" in user.types("queue", "cancel", "x-1")[1]
    assert len(programs.calls(called, "scancel")) == 2


def test_names_that_nothing_has_are_told(user: User) -> None:
    code, said = user.types("queue", "logs", "x-1")
    assert code == 2
    assert "nothing was submitted here" in said
    submitted(user, "a")
    code, said = user.types("queue", "cancel", "y")
    assert code == 2
    assert "there is x-1" in said
