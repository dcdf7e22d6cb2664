"""Intervals cover what they should, respect groups and never change between calls."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.evaluation.statistics import (
    accuracy_interval,
    better_than,
    bits_per_byte,
    chance,
    churn,
    forgetting_noise_floor,
    majority,
    paired_difference,
    paired_ratio,
    ratio_interval,
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
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5))
def test_accuracy_intervals_are_proper(correct, size):
    for groups in (None, np.arange(len(correct)) // size):
        interval = accuracy_interval(correct, groups)
        assert 0 <= interval.low <= np.mean(correct) <= interval.high <= 1
        assert interval.low < interval.high  # no spread seen is not certainty


@pytest.mark.parametrize("count", [8, 20, 150])
def test_an_accuracy_is_covered_as_often_as_it_should(count):
    rng = np.random.default_rng(0)
    hits = [low <= 0.7 <= high for low, high in (accuracy_interval(rng.random(count) < 0.7) for _ in range(2000))]
    assert 0.93 <= np.mean(hits) <= 0.985


@pytest.mark.parametrize("num_groups", [6, 25])
def test_an_accuracy_is_covered_where_questions_go_together(num_groups):
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(num_groups), 5)
    hits = []
    for _ in range(1000):
        skill = rng.beta(3, 2, num_groups)[groups]  # 0.6 on average
        low, high = accuracy_interval(rng.random(len(groups)) < skill, groups)
        hits.append(low <= 0.6 <= high)
    assert 0.93 <= np.mean(hits) <= 0.99


def documents(rng, count, spread):
    """Sizes and losses of documents whose lengths differ, and the loss that they are draws of."""
    sizes = 500 * np.exp(spread * rng.normal(size=count))
    return sizes, sizes * rng.normal(2.0, 0.4, count)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [3, 5, 12, 40])
def test_a_loss_is_covered_as_often_as_it_should_also_by_five_documents(count, spread):
    rng = np.random.default_rng(count)
    hits = []
    for _ in range(2000):
        sizes, sums = documents(rng, count, spread)
        low, high = ratio_interval(sums, sizes)
        hits.append(low <= 2.0 <= high)
    assert 0.93 <= np.mean(hits) <= 0.985


@pytest.mark.parametrize("count", [5, 40])
def test_a_paired_change_is_covered_as_often_as_it_should(count):
    rng = np.random.default_rng(count)
    hits = []
    for _ in range(2000):
        sizes, sums = documents(rng, count, 0.5)
        later = sums + sizes * rng.normal(0.01, 0.02, count)
        found = paired_ratio(sums, later, sizes)
        hits.append(found.low <= 0.01 <= found.high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_plain_students_interval_where_documents_are_equally_long():
    values = np.array([1.0, 2.0, 4.0, 5.0, 8.0])
    low, high = ratio_interval(values, np.ones(5))
    half = 2.776445105 * values.std(ddof=1) / np.sqrt(5)
    assert (low, high) == pytest.approx((4 - half, 4 + half))
    assert ratio_interval([1.0], [2.0]) is None
    assert ratio_interval([1.0, 2.0], [2.0, 1.0], ["one", "one"]) is None


def guessing(rng, count, majority_share, choices):
    """The answers of a model that knows nothing of the questions, and the level that it must pass."""
    rest = (1 - majority_share) / (choices - 1)
    labels = rng.choice(choices, size=count, p=[majority_share] + [rest] * (choices - 1))
    right = rng.integers(choices, size=count) == labels
    return right, max(1 / choices, np.bincount(labels).max() / count)


@pytest.mark.parametrize(("count", "share", "choices"), [(20, 0.25, 4), (40, 0.5, 2), (200, 0.5, 2), (100, 0.34, 3)])
def test_guessing_is_seldom_called_learned(count, share, choices):
    rng = np.random.default_rng(count)
    called = 0
    for _ in range(3000):
        right, level = guessing(rng, count, share, choices)
        called += better_than(right.mean(), accuracy_interval(right).low, count, level)
    assert called / 3000 <= 0.025
    # At chance alone, without the help of the majority, the rate is at most the nominal one too.
    called = 0
    for _ in range(3000):
        right = rng.random(count) < 1 / choices
        called += better_than(right.mean(), accuracy_interval(right).low, count, 1 / choices)
    assert called / 3000 <= 0.025 + 2 * np.sqrt(0.025 * 0.975 / 3000)


def test_skill_is_called_learned():
    rng = np.random.default_rng(0)
    right = rng.random(100) < 0.8
    assert better_than(right.mean(), accuracy_interval(right).low, 100, 0.6)


def test_groups_count_as_wholes():
    rng = np.random.default_rng(1)
    per_group = rng.random(40) < 0.5
    correct = np.repeat(per_group, 25)
    groups = np.repeat([f"premise {i}" for i in range(40)], 25)
    alone = accuracy_interval(correct)
    grouped = accuracy_interval(correct, groups)
    assert (grouped.high - grouped.low) > 3 * (alone.high - alone.low)
    same = accuracy_interval(per_group)
    assert grouped.high - grouped.low == pytest.approx(same.high - same.low, abs=0.03)


def test_one_group_is_no_evidence():
    low, high = accuracy_interval([1, 1, 0, 1], groups=["x"] * 4)
    assert high - low > 0.5
    assert accuracy_interval([]) == (0.0, 1.0)


def test_ratio_of_sums_over_documents():
    rng = np.random.default_rng(2)
    lengths = rng.integers(10, 2000, 300).astype(float)
    sums = lengths * rng.normal(2.0, 0.3, 300)
    low, high = ratio_interval(sums, lengths)
    assert low < sums.sum() / lengths.sum() < high
    assert high - low < 0.2


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


@pytest.mark.parametrize(("count", "churned"), [(20, 0.2), (60, 0.1), (200, 0.03), (500, 0.1)])
def test_churn_alone_is_seldom_called_a_change(count, churned):
    rng = np.random.default_rng(count)
    worse = 0
    for _ in range(2000):
        before = rng.random(count) < 0.7
        flipped = rng.random(count) < churned
        after = np.where(flipped, rng.permutation(before), before)
        worse += paired_difference(before, after).high < 0
    assert worse / 2000 <= 0.03


def test_few_changed_answers_of_many_say_little():
    before = np.ones(500)
    changes = [before.copy() for _ in range(4)]
    for after, lost in zip(changes, (0, 1, 5, 8), strict=True):
        after[:lost] = 0
    none, one, five, eight = (paired_difference(before, after) for after in changes)
    assert none.low < 0 == none.mean < none.high
    assert not one.real
    assert not five.real  # a sign test's p is 0.06
    assert eight.real
    assert eight.num == 500
    assert paired_difference([1.0], [0.0]) is None


def test_noise_floor():
    floor = forgetting_noise_floor(0.75, 500, 5, 0.1)
    assert floor == forgetting_noise_floor(0.75, 500, 5, 0.1)
    # The case of the mathematics page: 1.2 points, 1.18 at an accuracy of 0.84.
    assert forgetting_noise_floor(0.84, 500, 5, 0.1).mean == pytest.approx(0.0118, abs=2e-4)
    assert all(0.0113 < forgetting_noise_floor(share, 500, 5, 0.1).mean < 0.0125 for share in (0.5, 0.75, 0.9))
    assert floor.upper > floor.mean
    assert forgetting_noise_floor(0.75, 5000, 5, 0.1).mean < floor.mean / 2
    assert abs(forgetting_noise_floor(0.75, 500, 2, 0.1).mean) < 0.002  # no maximum, no bias
    assert forgetting_noise_floor(1.0, 500, 5, 0.1) == (0.0, 0.0)
    assert forgetting_noise_floor(0.75, 500, 1, 0.1) == (0.0, 0.0)


def test_churn():
    assert churn([True, False], [True, False]) == 0
    assert churn([1, 0], [0, 1]) == 1
