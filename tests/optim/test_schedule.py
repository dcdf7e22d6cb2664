"""Schedules at every join: the step before, the step, the step after; numpy and JAX agree."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import registry
from holdfast.config import build, configure
from holdfast.errors import ConfigError, UserError
from holdfast.optim import OptimConfig, PiecewiseSchedule, ScheduleContext, build_schedule, learning_rates
from holdfast.optim.schedules.infinite import InfiniteConfig

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
    np.testing.assert_allclose(rates("wsd", [10, 11, 89, 90, 91, 99]), [1, 1, 1, 1, 0.91, 0.19], rtol=1e-6)
    to_zero = context(optim=OptimConfig(final_lr_ratio=0.0))
    np.testing.assert_allclose(learning_rates(build_schedule("wsd", to_zero), [90, 99, 100]), [1, 0.1, 0], atol=1e-7)


def test_wsds_joins():
    steps = [10, 59, 60, 61, 69, 70, 71, 99, 500]
    np.testing.assert_allclose(rates("wsds", steps), [1, 1, 1, 0.91, 0.19, 0.1, 0.1, 0.1, 0.1], rtol=1e-6)


def test_cosine_and_linear():
    np.testing.assert_allclose(rates("cosine", [10, 55, 100]), [1, 0.55, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates("linear", [10, 55, 100]), [1, 0.55, 0.1], rtol=1e-6)
    assert rates("cosine", [20])[0] > rates("linear", [20])[0]


def test_cosine_rewarm_joins():
    steps = [0, 5, 59, 60, 61, 62, 64, 99]
    got = rates("cosine_rewarm", steps, stage_starts=(0, 60), warmup_pct=0.1)
    tail = lambda u: 0.1 + 0.9 * (1 + np.cos(np.pi * u)) / 2  # noqa: E731
    want = [1 / 7, 1 / 7 + (6 / 7) * 5 / 6, tail(53 / 54), 0.1, 0.325, 0.55, 1.0, tail(35 / 36)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_infinite_joins():
    steps = [10, 20, 29, 30, 31, 89, 90, 95, 100]
    half = (1 + 0.5) / 2
    near = 0.5 + 0.5 * (1 + np.cos(np.pi * 19 / 20)) / 2
    np.testing.assert_allclose(rates("infinite", steps), [1, half, near, 0.5, 0.5, 0.5, 0.5, 0.3, 0.1], rtol=1e-5)


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
