"""How processes find each other, and what they do alone."""

import threading

import pytest

from holdfast.errors import RunError, UserError
from holdfast.execution import processes
from holdfast.execution.launching import free_port
from holdfast.execution.processes import Membership, membership

SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (SLURM_STEP, Membership(count=2)),
        ({**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({key: value for key, value in SLURM_STEP.items() if key != "SLURM_STEP_NODELIST"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, Membership()),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Membership()),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
    ids=["nothing", "srun", "one-task", "sbatch-script", "mpi", "mpi-one", "tpu", "tpu-one", "pod"],
)
def test_the_environment_says_whether_there_are_others(environ: dict[str, str], found: Membership | None) -> None:
    assert membership(None, None, None, environ) == found


def test_options_come_before_the_environment() -> None:
    assert membership("10.0.0.1:4000", 3, 2, SLURM_STEP) == Membership("10.0.0.1:4000", 3, 2)
    assert membership(None, 1, None, SLURM_STEP) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("10.0.0.1:4000", None, None), "all three"),
        ((None, 2, 0), "all three"),
        (("10.0.0.1", 2, 0), "--coordinator"),
        (("10.0.0.1:x", 2, 0), "--coordinator"),
        (("10.0.0.1:4000", 2, 2), "--process-id"),
        (("10.0.0.1:4000", 2, -1), "--process-id"),
        (("10.0.0.1:4000", 0, 0), "--processes"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[str | None, int | None, int | None], named: str) -> None:
    with pytest.raises(UserError, match=named):
        membership(*options, {})


def test_processes_that_cannot_be_found_are_not_left_alone() -> None:
    """Each of them would train by itself otherwise."""
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_RANK"):
        membership(None, None, None, {"OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="JOB_COMPLETION_INDEX"):
        membership(None, None, None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"})


def test_alone_everything_answers_at_once() -> None:
    assert (processes.count(), processes.index(), processes.is_first()) == (1, 0, True)
    assert processes.gather({"a": 1}) == [{"a": 1}]
    assert processes.agreed([3]) == [3]
    processes.barrier("nothing")
    with pytest.raises(UserError, match="as it was"), processes.together():
        raise UserError("as it was")
    with processes.joined(None):
        pass


def test_a_broken_network_is_told_from_a_broken_program() -> None:
    link = type("JaxRuntimeError", (RuntimeError,), {})
    assert "another process" in str(processes._broken_link(link("UNKNOWN: Gloo AllGather failed: Connection closed")))
    assert processes._broken_link(link("RESOURCE_EXHAUSTED: Out of memory")) is None
    assert "another process" in str(processes._broken_link(ValueError("UNKNOWN: Gloo AllGather failed: Read error")))
    assert processes._broken_link(ValueError("Gloo")) is None


def roll(count: int, present: list[int], seconds: float) -> dict[int, str]:
    """What each process that is there says of the others; an empty text where all have come."""
    said: dict[int, str] = {}
    coordinator = f"127.0.0.1:{free_port()}"

    def come(index: int) -> None:
        try:
            processes.call_roll(coordinator, count, index, seconds)
            said[index] = ""
        except RunError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=come, args=(index,)) for index in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_all_processes_go_on_when_the_last_has_come() -> None:
    assert roll(3, [2, 0, 1], 60) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(("present", "missing"), [([0, 2], "1"), ([0], "1, 2"), ([1], "0")])
def test_who_has_not_come_is_named_by_everybody(present: list[int], missing: str) -> None:
    said = roll(3, present, 0.5)
    assert sorted(said) == present
    for line in said.values():
        assert line.startswith(f"process {missing} of 3 has not come within 0.5 s (topology/start_timeout); ")
