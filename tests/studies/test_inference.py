"""Standard errors over seeds and documents, Holm's correction, and what would have been seen."""

import math

import numpy as np
import pytest
from scipy import stats

from holdfast.studies.inference import Block, detectable, effect, holm, p_above, point, seeds_to_halve


def test_without_documents_it_is_students_interval_over_seeds() -> None:
    values = np.array([0.1, 0.3, 0.2, 0.5])
    found = effect([Block(values[:, None], np.ones(1))])
    known = stats.ttest_1samp(values, 0.0, alternative="greater")
    assert (found.mean, found.degrees) == (pytest.approx(values.mean()), pytest.approx(3))
    assert found.error == pytest.approx(values.std(ddof=1) / 2)
    assert p_above(found) == pytest.approx(known.pvalue)
    assert point(3, 0.025) == pytest.approx(stats.t.ppf(0.975, 3))


def test_with_documents_the_error_is_that_of_the_formula() -> None:
    values = np.random.default_rng(0).normal(size=(4, 6)) + 3 * np.random.default_rng(1).normal(size=6)
    found = effect([Block(values, np.ones(6))])
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    parts = values.mean(1).var(ddof=1) / 4, values.mean(0).var(ddof=1) / 6, (rest**2).sum() / 15 / 24
    squared = parts[0] + parts[1] - parts[2]
    assert found.error == pytest.approx(math.sqrt(squared))
    assert found.degrees == pytest.approx(squared**2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 5 + parts[2] ** 2 / 15))
    assert found.mean == pytest.approx(values.mean())


def test_an_error_is_never_below_that_of_the_seeds() -> None:
    values = np.array([[1.0, -1.0], [-1.0, 1.0], [1.2, -1.0]])
    found = effect([Block(values, np.ones(2))])
    assert found.error >= values.mean(1).std(ddof=1) / math.sqrt(3)


def test_long_documents_weigh_more() -> None:
    values, weights = np.array([[1.0, 2.0, 4.0], [1.5, 2.0, 5.0]]), np.array([1.0, 1.0, 2.0])
    assert effect([Block(values, weights)]).by_seed == pytest.approx([11 / 4, 13.5 / 4])
    # One scale of weights is as good as another.
    assert effect([Block(values, weights)]).error == pytest.approx(effect([Block(values, 7 * weights)]).error)


def test_tasks_add_up_by_what_they_count() -> None:
    one, two = np.array([[1.0], [2.0], [4.0]]), np.array([[5.0], [3.0], [1.0]])
    found = effect([Block(one, np.ones(1), 0.5), Block(two, np.ones(1), 0.25)])
    assert found.by_seed == pytest.approx([1.75, 1.75, 2.25])


def test_intervals_with_documents_cover_where_seeds_alone_do_not() -> None:
    random = np.random.default_rng(0)
    wrong = {"seeds": 0, "both": 0}
    for _ in range(300):
        values = random.normal(0, 0.01, (20, 1)) + random.normal(0, 0.06, 40) + random.normal(0, 0.04, (20, 40))
        for name, block in (("seeds", values.mean(1, keepdims=True)), ("both", values)):
            found = effect([Block(block, np.ones(block.shape[1]))])
            wrong[name] += abs(found.mean) > point(found.degrees, 0.025) * found.error
    assert wrong["seeds"] / 300 > 0.2
    assert wrong["both"] / 300 < 0.09


def test_one_seed_is_sure_of_nothing() -> None:
    found = effect([Block(np.array([[2.0]]), np.ones(1))])
    assert (found.mean, found.error, p_above(found)) == (2.0, math.inf, 1.0)
    same = effect([Block(np.full((3, 1), 2.0), np.ones(1))])
    assert (p_above(same), p_above(same._replace(mean=-1.0))) == (0.0, 1.0)


def test_holm_levels_and_p_values_agree() -> None:
    levels, adjusted = holm([0.004, 0.03, 0.011])
    assert levels == pytest.approx([0.025 / 3, 0.025, 0.0125])
    assert adjusted == pytest.approx([0.012, 0.03, 0.022])
    # The second stands at its level 0.0125, so that the third is tested at no more.
    assert holm([0.004, 0.03, 0.014])[0] == pytest.approx([0.025 / 3, 0.0125, 0.0125])
    assert holm([]) == ([], [])


def test_what_would_have_been_seen() -> None:
    found = effect([Block(np.array([[0.1], [0.6], [1.1]]), np.ones(1))])
    seen = (stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * 0.5 / 3**0.5
    assert detectable(found.error, found.degrees, 0.025) == pytest.approx(seen)
    assert seeds_to_halve(found, 0.025) == 3
    documents = np.random.default_rng(0).normal(size=(1, 5)) + np.random.default_rng(1).normal(0, 1e-3, (4, 5))
    assert seeds_to_halve(effect([Block(documents, np.ones(5))]), 0.025) is None
