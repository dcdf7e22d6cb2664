"""Plain's frontier: linear in what was set, ranges and lines decided on means, no seed dropped."""

import numpy as np
import pytest

from holdfast.studies.frontier import Frontier, PlainPoint, lines_of, lowest

RATES = (0.01, 0.1, 1.0)


def one(new: list[float], old: list[float], limit: float) -> tuple[float, float]:
    found, place = lowest(np.array([new]), np.array([old]), np.array([limit]))
    return float(found[0]), float(place[0])


def frontier(new: np.ndarray, old: np.ndarray, points: tuple[PlainPoint, ...] | None = None) -> Frontier:
    made = points or tuple(PlainPoint(rate) for rate in RATES)
    return Frontier(made, tuple(lines_of(made)), new, old)


def test_it_is_linear_in_the_logarithm_of_the_rate() -> None:
    new, old = [4.0, 3.0, 2.0], [1.0, 2.0, 6.0]
    assert one(new, old, 4.5) == (1.0, 0.0)
    assert one(new, old, 4.0) == (1.0, 0.0)
    assert one(new, old, 2.75) == (3.0, 1.25)
    assert one(new, old, 2.0) == (6.0, 2.0)
    # A quarter of the way from 0.1 to 1 is 10^-0.75, not 0.1 + 0.9 / 4.
    line = lines_of([PlainPoint(rate) for rate in RATES])[0]
    assert line.setting(1.25) == pytest.approx(10**-0.75)
    assert line.setting(2.0) == pytest.approx(1.0)


def test_a_line_above_the_limit_says_so_and_where_it_is_lowest() -> None:
    assert one([4.0, 2.0, 3.0], [1.0, 2.0, 6.0], 1.9) == (np.inf, 1.0)


def test_a_faster_rate_that_keeps_more_is_the_frontier_too() -> None:
    # The new loss rises again at the end: both ends of what is allowed count.
    assert one([4.0, 2.0, 3.0], [5.0, 4.0, 3.0], 2.5)[0] == pytest.approx(3.5)


def test_a_seed_that_does_not_reach_the_limit_is_compared_where_the_means_are() -> None:
    shift = 0.1 * np.arange(3)[:, None]
    made = frontier(np.array([4.0, 3.0, 2.0]) + shift, np.array([1.0, 2.0, 6.0]) + shift)
    limits = np.array([1.95, 2.25, 2.35])  # the first is below its whole curve, the mean is not
    found = made.reference(limits)
    assert found.reached
    assert found.places == pytest.approx([found.mean_place, 1.85, 1.85])
    assert found.old(made.old[:, :, None])[0, 0] == pytest.approx(2 + 4 * (found.mean_place - 1))


def test_where_plain_never_learns_as_much_all_seeds_are_where_it_learns_most() -> None:
    new = np.array([[4.0, 2.0, 3.0], [4.0, 2.2, 2.1]])
    found = frontier(new, np.zeros((2, 3))).reference(np.array([1.0, 1.0]))
    assert not found.reached
    assert found.places == pytest.approx([1.0, 1.0])


def test_early_stops_and_interpolations_are_lines_of_their_own() -> None:
    points = (
        *(PlainPoint(rate, 100) for rate in RATES),
        *(PlainPoint(rate, 10) for rate in RATES),
        PlainPoint(1.0, 100, 0.5),
    )
    lines = lines_of(points)
    assert sorted((line.along, tuple(line.points)) for line in lines) == [
        ("rate", (0, 1, 2)), ("rate", (3, 4, 5)),
        ("share", (6, 2)), ("steps", (3, 0)), ("steps", (4, 1)), ("steps", (5, 2)),
    ]  # fmt: skip
    # Stopped early at the fastest rate, plain keeps more than at any rate that runs to the end.
    new = np.array([[4.0, 3.0, 2.0, 4.5, 4.0, 2.5, 3.0]])
    old = np.array([[1.0, 2.0, 6.0, 0.9, 1.0, 1.5, 4.0]])
    found = frontier(new, old, points).reference(np.array([2.5]))
    assert (found.line.along, found.line.setting(found.mean_place)) == ("rate", pytest.approx(1.0))
    assert found.old(old[:, :, None])[0, 0] == pytest.approx(1.5)


def test_dominated_points_are_named_with_the_one_that_beats_them() -> None:
    assert frontier(np.array([[4.0, 2.0, 3.0]]), np.array([[1.0, 4.0, 5.0]])).dominated(range(3)) == {2: 1}
    assert frontier(np.array([[4.0, 3.0, 2.0]]), np.array([[1.0, 2.0, 3.0]])).dominated(range(3)) == {}


def test_the_slope_is_that_of_the_means() -> None:
    made = frontier(np.array([[4.0, 3.0, 2.0]]), np.array([[1.0, 2.0, 6.0]]))
    assert made.slope(2.5) == pytest.approx(4.0, rel=1e-4)
    assert made.slope(3.5) == pytest.approx(1.0, rel=1e-4)
    assert made.slope(1.0) == 0.0


def test_a_smooth_frontier_is_straight_where_plain_is_and_low_where_plain_is_bowed() -> None:
    straight = frontier(np.array([[4.0, 3.0, 2.0]]), np.array([[1.0, 2.0, 3.0]]))
    assert straight.bowed(2.5) == pytest.approx(2.5)
    bowed = frontier(np.array([[4.0, 2.0, 1.8]]), np.array([[1.0, 2.0, 6.0]]))
    assert bowed.bowed(3.0) < 1.4 < bowed.lowest_mean(3.0)
    assert bowed.bowed(2.0) == pytest.approx(2.0)
    # Two rates say nothing of a bow.
    two = (PlainPoint(0.01), PlainPoint(0.1))
    assert frontier(np.array([[4.0, 2.0]]), np.array([[1.0, 2.0]]), two).bowed(3.0) == pytest.approx(1.5)
