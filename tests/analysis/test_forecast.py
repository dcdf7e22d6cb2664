"""Forecasts of planted curves: ends are found, intervals hold, and what is unlike other runs is refused."""

import dataclasses

import numpy as np
import pytest

from forecast_runs import LENGTH, changes, constant, curve
from holdfast.analysis.forecast import (
    FEWEST,
    Course,
    Curve,
    Forecast,
    Refusal,
    Share,
    cheapest_share,
    clock,
    forecast,
)

TIMES = np.arange(4.0, 41.0, 4.0)  # a quarter of the stage


def made(course: Course, new: Curve, old: Curve) -> tuple[Forecast, Forecast]:
    found = forecast(course, {"new": new}, {"old": old})
    first, second = found["new"], found["old"]
    assert isinstance(first, Forecast), first
    assert isinstance(second, Forecast), second
    return first, second


def reason(course: Course, new: Curve) -> str:
    found = forecast(course, {"new": new}, {"old": new})["new"]
    assert isinstance(found, Refusal), found
    return found.reason


@pytest.mark.parametrize(("scale", "pace"), [(0.5, 4.0), (1.3, 2.5), (1.3, 12.0)])
def test_the_end_of_a_planted_power_law_is_found(scale: float, pace: float) -> None:
    new, old = changes(TIMES, scale=scale, pace=pace)
    truth, _ = changes([LENGTH], scale=scale, pace=pace)
    found, _ = made(constant(), curve(TIMES, new), curve(TIMES, old))
    assert abs(found.change - truth[0]) < 0.25 * abs(new[-1] - truth[0])
    assert found.low < truth[0] < found.high


def test_intervals_hold_planted_ends_with_noise_and_beat_persistence() -> None:
    random, held, errors = np.random.default_rng(0), [], []
    for _ in range(30):
        scale, pace, replay = random.uniform(0.8, 1.6), random.uniform(2, 12), random.choice([0.0, 0.05])
        new, old = changes(TIMES, replay, scale, pace)
        seen = [values + random.normal(0, 0.02, len(TIMES)) for values in (new, old)]
        found = made(constant(replay=replay), *(curve(TIMES, values) for values in seen))
        for end, truth, values in zip(found, changes([LENGTH], replay, scale, pace), seen, strict=True):
            held.append(end.low <= truth[0] <= end.high)
            errors.append((abs(end.change - truth[0]), abs(values[-1] - truth[0])))
    assert np.mean(held) >= 0.85
    ours, persistence = np.mean(errors, axis=0)
    assert ours < 0.6 * persistence


def test_more_replay_forecasts_less_rise() -> None:
    new, old = changes(TIMES)
    ends = [made(constant(replay=share), curve(TIMES, new), curve(TIMES, old))[1].change for share in (0.0, 0.05, 0.25)]
    assert ends[0] > ends[1] > ends[2]


def test_a_decay_ahead_leaves_less_time_and_lowers_the_new_loss() -> None:
    new, old = changes(TIMES)
    rates = np.concatenate([np.ones(40), np.linspace(1, 0.1, LENGTH - 40)])
    decaying = Course(rates)
    assert clock(decaying, curve(TIMES, new))[1] < LENGTH
    flat, lowered = (made(course, curve(TIMES, new), curve(TIMES, old))[0] for course in (constant(), decaying))
    assert lowered.change < flat.change
    assert lowered.high - lowered.low > flat.high - flat.low  # and it is less sure


def test_full_evaluations_correct_what_probes_of_fewer_rows_see() -> None:
    new, old = changes(TIMES)
    plain = made(constant(), curve(TIMES, new), curve(TIMES, old))[1]
    full = ((16, float(old[3]) + 0.1, float(old[3])),)
    corrected = made(constant(), curve(TIMES, new), curve(TIMES, old, full=full, narrow=True))[1]
    assert corrected.change == pytest.approx(plain.change + 0.1, abs=0.01)
    unknown = made(constant(), curve(TIMES, new), curve(TIMES, old, narrow=True))[1]
    assert unknown.high - unknown.low > 1.2 * (plain.high - plain.low)


def test_only_what_was_known_by_a_step_counts() -> None:
    new, _ = changes(np.arange(4.0, 161.0, 4.0))
    whole = curve(np.arange(4.0, 161.0, 4.0), new, full=((16, -1.0, -0.9), (160, -2.0, -1.9)))
    cut = whole.until(40)
    assert cut.steps.tolist() == TIMES.tolist()
    assert cut.full == ((16, -1.0, -0.9),)


def test_refusals_say_why() -> None:
    new, _ = changes(TIMES)
    whole = curve(TIMES, new)
    few = curve(TIMES[: FEWEST - 1], new[: FEWEST - 1])
    assert "too few (at least 6)" in reason(constant(), few)
    assert "of the stage is too little" in reason(constant(400), whole)
    assert "the learning rate is 3 times" in reason(constant(rate=3.0), whole)
    assert "the learning rate is 0.001 times" in reason(constant(rate=0.001), whole)
    assert "not finite" in reason(constant(), dataclasses.replace(whole, changes=np.append(new[:-1], np.nan)))
    rising = curve(TIMES, np.linspace(0.0, 0.8, len(TIMES)))
    assert "scatter around any curve that falls" in reason(constant(), rising)


def test_an_old_loss_goes_with_a_new_one() -> None:
    _, old = changes(TIMES)
    found = forecast(constant(), {}, {"old": curve(TIMES, old)})["old"]
    assert isinstance(found, Refusal)
    assert "new data" in found.reason


def line(share: float) -> Forecast:
    change = 0.4 - 0.8 * share**0.5
    return Forecast(change, change - 0.08, change + 0.08)


def test_the_cheapest_share_lies_where_the_forecast_meets_the_budget() -> None:
    pilots = {share: line(share) for share in (0.0, 0.04, 0.16, 0.25)}
    found = cheapest_share(pilots, 0.2)
    assert isinstance(found, Share)
    assert found == pytest.approx((0.0625, 0.0225, 0.1225), abs=1e-6)  # roots 0.25, 0.15, 0.35
    wide = cheapest_share(pilots, 0.36)  # an end that no pilot reaches is the smallest share
    assert isinstance(wide, Share)
    assert wide.low == 0.0


def test_the_cheapest_share_is_refused_where_pilots_do_not_tell() -> None:
    pilots = {share: line(share) for share in (0.0, 0.04, 0.25)}
    few = cheapest_share({0.0: line(0.0), 0.04: line(0.04)}, 0.2)
    assert isinstance(few, Refusal)
    assert "2 different replay rates are too few" in few.reason
    for budget in (0.5, -0.3):
        found = cheapest_share(pilots, budget)
        assert isinstance(found, Refusal)
        assert "outside of what the pilots come to" in found.reason


def test_pilots_that_rise_with_replay_are_pooled() -> None:
    pilots = {0.0: line(0.0), 0.04: line(0.09), 0.09: line(0.04), 0.25: line(0.25)}
    found = cheapest_share(pilots, 0.1)
    assert isinstance(found, Share)
    assert 0.09 < found.share < 0.25
