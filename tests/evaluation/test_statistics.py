"""Intervals cover what they should, respect groups and never change between calls."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.evaluation.statistics import (
    accuracy_interval,
    bits_per_byte,
    bootstrap_ratio,
    chance,
    churn,
    forgetting_noise_floor,
    majority,
    paired_difference,
    wilson,
)


def test_bits_per_byte():
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3.0)
    assert bits_per_byte(1.0, 0) is None


def test_chance_and_majority():
    assert chance([]) is None
    assert chance([3, 3, 3]) == pytest.approx(1 / 3)
    assert majority([]) is None
    assert majority([0, 1, 1, 2]) == 0.5


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_contains_the_share_and_stays_inside_0_and_1(successes, trials):
    successes = min(successes, trials)
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
    assert wilson(successes, trials, 0.99).low <= low


def test_wilson_of_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 5))
def test_accuracy_intervals_are_proper_and_repeatable(correct, seed):
    interval = accuracy_interval(correct, seed=seed, draws=200)
    assert interval == accuracy_interval(correct, seed=seed, draws=200)
    assert 0 <= interval.low <= interval.high <= 1
    assert interval.low - 0.08 <= np.mean(correct) <= interval.high + 0.08
    if len(set(correct)) == 1:
        assert interval.low < interval.high  # no spread seen is not certainty


def test_coverage_is_close_to_nominal():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = accuracy_interval(rng.random(150) < 0.7, draws=400, seed=trial)
        hits += low <= 0.7 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_groups_are_resampled_whole():
    rng = np.random.default_rng(1)
    per_group = rng.random(40) < 0.5
    correct = np.repeat(per_group, 25)
    groups = np.repeat([f"premise {i}" for i in range(40)], 25)
    alone = accuracy_interval(correct)
    grouped = accuracy_interval(correct, groups)
    assert (grouped.high - grouped.low) > 3 * (alone.high - alone.low)
    same = accuracy_interval(per_group)
    assert grouped.high - grouped.low == pytest.approx(same.high - same.low, abs=0.02)


def test_one_group_is_no_evidence():
    low, high = accuracy_interval([1, 1, 0, 1], groups=["x"] * 4)
    assert high - low > 0.5
    assert accuracy_interval([]) == (0.0, 1.0)


def test_ratio_of_sums_over_documents():
    rng = np.random.default_rng(2)
    lengths = rng.integers(10, 2000, 300).astype(float)
    sums = lengths * rng.normal(2.0, 0.3, 300)
    low, high = bootstrap_ratio(sums, lengths)
    assert low < sums.sum() / lengths.sum() < high
    assert high - low < 0.2


def test_chunks_do_not_change_the_numbers(monkeypatch):
    values = np.random.default_rng(3).random(50)
    whole = bootstrap_ratio(values, np.ones(50), draws=300)
    monkeypatch.setattr("holdfast.evaluation.statistics._CHUNK", 1000)
    assert bootstrap_ratio(values, np.ones(50), draws=300) == whole


def test_paired_differences_see_what_single_intervals_do_not():
    rng = np.random.default_rng(4)
    before = rng.random(400) < 0.6
    after = before.copy()
    after[np.flatnonzero(~before)[:16]] = True
    one, two = accuracy_interval(before), accuracy_interval(after)
    assert one.high > two.low  # the intervals overlap
    difference = paired_difference(before, after)
    assert difference.mean == pytest.approx(0.04)
    assert difference.real
    assert not paired_difference(before, before).real


def test_noise_floor():
    floor = forgetting_noise_floor(0.75, 500, 5, 0.1)
    assert floor == forgetting_noise_floor(0.75, 500, 5, 0.1)
    assert 0.006 < floor.mean < 0.016
    assert floor.upper > floor.mean
    assert forgetting_noise_floor(0.75, 5000, 5, 0.1).mean < floor.mean / 2
    assert abs(forgetting_noise_floor(0.75, 500, 2, 0.1).mean) < 0.002  # no maximum, no bias
    assert forgetting_noise_floor(1.0, 500, 5, 0.1) == (0.0, 0.0)
    assert forgetting_noise_floor(0.75, 500, 1, 0.1) == (0.0, 0.0)


def test_churn():
    assert churn([True, False], [True, False]) == 0
    assert churn([1, 0], [0, 1]) == 1
