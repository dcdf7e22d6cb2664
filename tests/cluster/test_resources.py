"""What a run asks of the cluster: times as SLURM writes them, and mistakes before anything is queued."""

from typing import Any

import pytest

from holdfast.cluster.resources import Resources, seconds_of
from holdfast.errors import UserError


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("1", 60), ("0:30", 30), ("90:00", 5400), ("1:00:00", 3600), ("2-0", 172800), ("0-0:1", 60), ("1-1:1:1", 90061)],
)
def test_times(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["", "1h", "0", "00:00", "1:2:3:4", "-5", "2 hours", "1-", "1.5", "12:00:00;rm"])
def test_bad_times_are_refused_with_the_forms_that_are_good(time: str) -> None:
    with pytest.raises(UserError, match="HOURS:MINUTES:SECONDS"):
        Resources(time=time)


@pytest.mark.parametrize("option", ["partition", "account", "qos", "mem", "constraint"])
@pytest.mark.parametrize("value", ["", "a b", "a\n#SBATCH --x", "$(id)"])
def test_values_that_are_not_one_word_are_refused(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{option}"):
        Resources(time="10", **{option: value})


def test_the_grace_time_is_shorter_than_the_limit() -> None:
    Resources(time="1", grace_seconds=59)
    with pytest.raises(UserError, match="--grace 60"):
        Resources(time="1", grace_seconds=60)


@pytest.mark.parametrize(
    ("asked", "processes"),
    [({}, 1), ({"nodes": 3}, 3), ({"nodes": 2, "gpus_per_node": 8}, 16), ({"nodes": 2, "tasks_per_node": 4}, 8)],
)
def test_one_process_for_each_gpu(asked: dict[str, Any], processes: int) -> None:
    assert Resources(time="10", **asked).processes == processes
