"""The A/A check of verdicts: what it swaps, and that it finds a difference where there is one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks import aa

from holdfast.studies.results import Row
from study_examples import plain_rows

SEEDS, RATE = 8, 0.003
NOISE = (0.02, -0.05, 0.07, -0.01, -0.03, 0.04, -0.06, 0.01)


def rows(*, apart: float = 0.0) -> list[Row]:
    """Plain whose fastest rate is dominated, and two names that are plain at it, but for noise and a difference."""
    plain = plain_rows(SEEDS, new=(4.0, 2.0, 2.01), old=(1.0, 4.0, 5.0))
    again = [
        Row(name, seed, RATE, 5.0 - apart + 0.1 * seed + NOISE[seed], 2.01 + 0.1 * seed)
        for name in (aa.NAME, aa.NLL)
        for seed in range(SEEDS)
    ]
    return [*plain, *again]


def test_names_are_exchanged_on_the_seeds_that_were_drawn_and_at_the_rate_alone() -> None:
    given = rows()
    found = aa.swapped(given, RATE, {2})

    def old(among: Sequence[Row], arm: str, seed: int) -> list[float]:
        return [row.old for row in among if (row.arm, row.seed, row.learning_rate) == (arm, seed, RATE)]

    assert old(found, aa.NAME, 2) == old(given, "plain", 2) != old(given, aa.NAME, 2)
    assert old(found, "plain", 2) == old(given, aa.NAME, 2)
    assert old(found, "plain", 3) == old(given, "plain", 3)
    kept = [row for row in found if row.learning_rate != RATE or row.arm == aa.NLL]
    assert kept == [row for row in given if row.learning_rate != RATE or row.arm == aa.NLL]


def test_nothing_is_found_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert aa.judged(rows(), rows(), 100) == []
    said = capsys.readouterr().out
    assert "again against plain@0.003, 8 seeds: no evidence" in said
    assert "plain at 0.003 is dominated by 0.001" in said
    assert "it is called dominated in 100 of 100 swaps, and in 0 it learns most of all rates" in said
    assert "again as an arm against plain's frontier: no evidence 100" in said


def test_two_halves_of_an_arms_seeds_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    given = [row for row in rows() if row.arm != aa.NAME]
    assert aa.split(given, aa.NLL, 10).total() == 10
    aa.judged(given, given, 10)
    said = capsys.readouterr().out
    assert "two halves of the seeds of one arm, 10 splits of each of 2" in said
    assert "as an arm" not in said


def test_an_arm_that_keeps_more_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    aa.judged(rows(apart=2.0), rows(), 4)
    assert "again against plain@0.003, 8 seeds: keeps 2.00 ± 0.05 more (better)." in capsys.readouterr().out


def test_a_rate_that_is_not_dominated_is_missed() -> None:
    given = [replace(row, old=0.5) if row.learning_rate == RATE else row for row in rows()]
    assert "plain at 0.003 is dominated by no other rate" in aa.judged(given, given, 4)


def test_a_rate_that_learns_most_with_some_names_is_not_dominated_there() -> None:
    lucky = [replace(row, new=row.new - 0.02) if row.arm == aa.NAME else row for row in rows()]
    found = aa.frontier(lucky, RATE, 20)
    assert 0 < found.fastest == 20 - found.dominated < 20
