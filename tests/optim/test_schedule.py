"""Schedules at every join: the step before, the step, the step after; numpy and JAX agree."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast import registry
from holdfast.config import build, configure
from holdfast.errors import ConfigError, UserError
from holdfast.optim import OptimConfig, PiecewiseSchedule, ScheduleContext, build_schedule, learning_rates
from holdfast.optim.schedules import InfiniteConfig

NAMES = ["constant", "cosine", "cosine_rewarm", "infinite", "linear", "wsd", "wsds"]


def context(**changes) -> ScheduleContext:
    values = {"lr": 1.0, "total_steps": 100, "warmup_pct": 0.1, "decay_pct": 0.1, "constant_pct": 0.3}
    return ScheduleContext(**{**values, **changes})


def rates(name: str, steps: list[int], **changes) -> list[float]:
    return learning_rates(build_schedule(name, context(**changes)), steps).tolist()


def test_all_are_registered():
    assert registry.schedules.names() == NAMES


def test_constant():
    assert rates("constant", [0, 50, 99, 1000]) == [1.0] * 4
    assert learning_rates(build_schedule(None, context()), [0, 99]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "wsds", "cosine_rewarm", "infinite"])
def test_warm_up(name):
    np.testing.assert_allclose(rates(name, [0, 1, 9, 10]), [1 / 11, 2 / 11, 10 / 11, 1.0], rtol=1e-6)
    assert rates(name, [10])[0] == 1.0


def test_wsd_joins():
    np.testing.assert_allclose(
        rates("wsd", [10, 11, 88, 89, 90, 91, 98, 99, 100]), [1, 1, 1, 1, 0.91, 0.82, 0.19, 0.1, 0.1], rtol=1e-6
    )
    to_zero = context(optim=OptimConfig(final_lr_ratio=0.0))
    np.testing.assert_allclose(learning_rates(build_schedule("wsd", to_zero), [89, 98, 99]), [1, 0.1, 0], atol=1e-7)


def test_wsds_joins():
    steps = [10, 58, 59, 60, 61, 68, 69, 70, 71, 99, 500]
    want = [1, 1, 1, 0.91, 0.82, 0.19, 0.1, 0.1, 0.1, 0.1, 0.1]
    np.testing.assert_allclose(rates("wsds", steps), want, rtol=1e-6)


def test_cosine_and_linear():
    for name in ("cosine", "linear"):
        # From step 10 to the last one, step 100, over 90 steps.
        np.testing.assert_allclose(rates(name, [10, 55, 100, 101], total_steps=101), [1, 0.55, 0.1, 0.1], rtol=1e-6)
    assert rates("cosine", [20])[0] > rates("linear", [20])[0]


def test_cosine_rewarm_joins():
    steps = [0, 5, 58, 59, 60, 61, 62, 64, 98, 99]
    got = rates("cosine_rewarm", steps, stage_starts=(0, 60), warmup_pct=0.1)
    tail = lambda u: 0.1 + 0.9 * (1 + np.cos(np.pi * u)) / 2  # noqa: E731
    want = [1 / 7, 1 / 7 + (6 / 7) * 5 / 6, tail(52 / 53), 0.1, 0.1, 0.325, 0.55, 1.0, tail(34 / 35), 0.1]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_infinite_joins():
    steps = [10, 28, 29, 30, 31, 88, 89, 90, 95, 98, 99]
    near = 0.5 + 0.5 * (1 + np.cos(np.pi * 18 / 19)) / 2
    want = [1, near, 0.5, 0.5, 0.5, 0.5, 0.5, 0.46, 0.26, 0.14, 0.1]
    np.testing.assert_allclose(rates("infinite", steps), want, rtol=1e-5)


DECAYING = ["cosine", "cosine_rewarm", "infinite", "linear", "wsd", "wsds"]


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(DECAYING),
    total=st.integers(2, 3000),
    lr=st.floats(1e-6, 10),
    ratio=st.floats(0, 1),
    warmup=st.floats(0, 0.3),
    tail=st.floats(0, 0.3),
    decay_steps=st.integers(1, 500),
    data=st.data(),
)
def test_the_last_step_has_exactly_the_final_learning_rate(name, total, lr, ratio, warmup, tail, decay_steps, data):
    decay = min(decay_steps / total, 0.3)
    assume(round(decay * total) >= 1)
    cut = data.draw(st.integers(0, total - 1))
    optim = OptimConfig(final_lr_ratio=ratio)
    ctx = ScheduleContext(lr, total, tuple(sorted({0, cut})), warmup, decay, tail, optim)
    lengths = ctx.steps("warmup_pct", "decay_pct", "constant_pct")
    assume(lengths[1] >= 1 and lengths[0] < total)
    options = InfiniteConfig(cooldown_pct=0.2, constant_lr_ratio=1.0)
    assume(lengths[0] + lengths[1] + round(0.2 * total) <= total)
    assume(total - cut > round(warmup * (total - cut)))  # the last stage has more than its warm-up
    schedule = build_schedule(name, ctx, options if name == "infinite" else None)
    values = learning_rates(schedule, np.arange(total + 2))
    final = np.float32(lr * ratio)
    assert values[total - 1] == values[total] == values[total + 1] == final
    assert np.asarray(jax.jit(schedule)(np.int32(total - 1))) == final


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("decay", [1, 2, 3])
def test_short_decays_do_something(name, decay):
    """In a run of 20 steps: each step of the decay is lower than the one before it, and the last one is final."""
    shares = {"warmup_pct": 0.0, "decay_pct": decay / 20, "constant_pct": 0.0}
    if name in ("cosine", "linear", "cosine_rewarm"):  # these decay all the way
        got = rates(name, list(range(decay + 1)), total_steps=decay + 1, **shares)
    else:
        options = InfiniteConfig(cooldown_pct=0.0, constant_lr_ratio=1.0)
        schedule = build_schedule(name, context(total_steps=20, **shares), options if name == "infinite" else None)
        got = learning_rates(schedule, np.arange(20 - decay - 1, 20)).tolist()
    assert got[0] == 1.0
    np.testing.assert_allclose(np.diff(got) < 0, True)
    assert got[-1] == np.float32(0.1)


def test_a_schedule_of_one_step_is_its_end():
    assert rates("cosine", [0], total_steps=1, warmup_pct=0.0) == [np.float32(0.1)]
    assert rates("wsd", [0], total_steps=1, warmup_pct=0.0, decay_pct=1.0) == [np.float32(0.1)]


def test_plugin_config_reaches_the_schedule():
    flat = build_schedule("infinite", context(), InfiniteConfig(constant_lr_ratio=0.25))
    assert float(flat(60)) == 0.25


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    total=st.integers(1, 5000),
    warmup=st.floats(0, 0.3),
    decay=st.floats(0, 0.3),
    tail=st.floats(0, 0.3),
    data=st.data(),
)
def test_any_shares_give_a_schedule_within_bounds(name, total, warmup, decay, tail, data):
    cut = data.draw(st.integers(0, total - 1))
    ctx = ScheduleContext(3e-4, total, tuple(sorted({0, cut})), warmup, decay, tail)
    values = learning_rates(build_schedule(name, ctx), np.arange(total + 3))
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert (values > 0).all()
    assert values.max() <= np.float32(3e-4) * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_jax_agree(name):
    schedule = build_schedule(name, context(lr=3e-4, stage_starts=(0, 30, 60)))
    steps = np.arange(105)
    eager = learning_rates(schedule, steps)
    traced = jax.jit(jax.vmap(schedule))(steps)
    assert traced.dtype == np.float32
    np.testing.assert_allclose(eager, traced, rtol=3e-6)
    one = jax.jit(schedule)(np.int32(17))
    np.testing.assert_allclose(one, schedule(17), rtol=3e-6)


def test_shares_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"training/warmup_pct \+ training/decay_pct: got 1\.2"):
        build_schedule("wsd", context(warmup_pct=0.6, decay_pct=0.6, section="training"))
    with pytest.raises(ConfigError, match="optimization/warmup_pct: got 2"):
        build_schedule("cosine", context(warmup_pct=2.0))
    with pytest.raises(ConfigError, match="optimization/infinite/cooldown_pct"):
        build_schedule("infinite", context(), InfiniteConfig(cooldown_pct=0.9))


def test_choice_of_the_config_wins_and_own_functions_pass_through():
    own = lambda step: 0.5  # noqa: E731
    assert build_schedule(own, context()) is own
    assert learning_rates(own, [0, 1]).tolist() == [0.5, 0.5]
    chosen = build_schedule(own, context(optim=OptimConfig(schedule="cosine")))
    assert isinstance(chosen, PiecewiseSchedule)


def test_unknown_names_are_config_errors():
    tree = build(OptimConfig)
    tree.optimization.schedule = "cosin"
    with pytest.raises(UserError, match=r"optimization/schedule: there is no schedule 'cosin'; did you mean 'cosine'"):
        configure(OptimConfig, tree)
    tree = build(OptimConfig)
    tree.optimization.optimizer = "adam"
    with pytest.raises(UserError, match="optimization/optimizer"):
        configure(OptimConfig, tree)


def test_schedules_and_registration_need_no_jax():
    code = (
        "import sys; from holdfast import registry; from holdfast.optim import *; "
        "c = ScheduleContext(1.0, 10); [build_schedule(n, c)(3) for n in registry.schedules]; "
        "registry.optimizers.configs(); "
        "sys.exit(any(m in sys.modules for m in ('jax', 'optax', 'flax')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
