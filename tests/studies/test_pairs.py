"""Two arms with each other: one arm under two names is no evidence, a real difference is found."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.errors import UserError
from holdfast.studies.pairs import compare_pair, resampled
from holdfast.studies.results import Row
from study_examples import arm_rows, plain_rows


def twice(seeds: int = 8, gain: float = 0.0, new: float = 0.0) -> list[Row]:
    random = np.random.default_rng(3)
    rows = plain_rows(seeds)
    for name, less, later in (("one", gain, new), ("two", 0.0, 0.0)):
        rows += [
            Row(
                name,
                seed,
                0.003,
                2.0 - less + 0.1 * seed + random.normal(0, 0.02),
                3.0 + later + random.normal(0, 0.01),
            )
            for seed in range(seeds)
        ]
    return rows


def test_one_arm_under_two_names_is_no_evidence() -> None:
    assert compare_pair(twice(), "one", "two", margin=0.01).word == "no evidence"
    counts = resampled(twice(), "one", "two", times=200, margin=0.01)
    assert sum(counts.values()) == 200
    assert counts["no evidence"] >= 190


@pytest.mark.parametrize("seeds", [7, 8, 12])
def test_differences_of_one_size_in_all_seeds_are_not_taken_for_sure(seeds: int) -> None:
    rows = plain_rows(seeds)
    for seed in range(seeds):
        rows += [Row("one", seed, 0.003, 2.0 - 0.1 * (-1) ** (seed == 0), 3.0), Row("two", seed, 0.003, 2.0, 3.0)]
    counts = resampled(rows, "one", "two", times=200, margin=0.01)
    assert counts["no evidence"] >= 190


def test_a_difference_is_found_to_both_sides() -> None:
    found = compare_pair(twice(gain=0.2), "one", "two")
    assert (found.word, compare_pair(twice(gain=0.2), "two", "one").word) == ("better", "worse")
    assert found.delta == pytest.approx(0.2, abs=0.03)
    assert found.words().startswith("one against two, 8 seeds: keeps 0.2")
    assert found.to_json()["verdict"] == "better"


def test_what_learns_less_is_not_better() -> None:
    assert compare_pair(twice(gain=0.2, new=0.5), "one", "two").word == "learns less"
    assert compare_pair(twice(gain=0.2, new=-0.5), "one", "two").word == "learns more"


def test_equal_is_who_surely_keeps_and_learns_as_much() -> None:
    rows = [*plain_rows(5), *arm_rows("a", 2.0, 6.0, seeds=5), *arm_rows("b", 2.0, 6.0, seeds=5)]
    assert compare_pair(rows, "a", "b", margin=0.01).word == "equal"
    assert compare_pair(rows, "a", "a", margin=0.0).word == "equal"
    noisy = [replace(row, new=row.new + 0.02 * (-1) ** row.seed) if row.arm == "a" else row for row in rows]
    assert compare_pair(noisy, "a", "b", margin=0.01).word == "no evidence"
    assert compare_pair(noisy, "a", "b", margin=0.1).word == "equal"


def test_accuracies_have_a_margin_of_their_own() -> None:
    rows = [*plain_rows(5), *arm_rows("a", 2.0, 6.0, seeds=5), *arm_rows("b", 2.0, 6.0, seeds=5)]
    tried = [replace(row, old=row.old / 10 + 0.03 * (row.arm == "a"), measure="accuracy") for row in rows]
    # The given margin is one of new losses: 3 points of accuracy are more than 1.
    assert compare_pair(tried, "a", "b", margin=0.1).word == "better"
    noisy = [replace(row, old=row.old + 0.03 * (row.seed - 2)) if row.arm == "a" else row for row in tried]
    assert compare_pair(noisy, "a", "b", margin=0.5).word == "no evidence"


def test_plain_is_named_with_its_rate() -> None:
    rows = [*plain_rows(5), *arm_rows("a", 2.0, 6.0, seeds=5, noise=0.1)]
    assert compare_pair(rows, "a", "plain@3e-3").word == "no evidence"
    assert compare_pair(rows, "a", "plain@0.001").word == "learns more"
    assert compare_pair([*plain_rows(2), *arm_rows("a", 2.0, 6.0, seeds=2)], "a", "plain@0.003").word == "too few seeds"


@pytest.mark.parametrize("name", ["plain", "plain@x", "plain@7", "b"])
def test_unknown_names_are_refused_with_those_that_are_there(name: str) -> None:
    with pytest.raises(UserError, match=r"--pair: got .*expected"):
        compare_pair([*plain_rows(), *arm_rows("a", 2.0, 6.0)], "a", name)
