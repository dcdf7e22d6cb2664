"""Methods that hold weights, hook by hook: equal to their formulas in plain NumPy, and neutral where they should be."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.batches import Batch
from holdfast.methods.active import ActiveMethods
from holdfast.methods.agem import AGEM, AGEMConfig
from holdfast.methods.ewc import EWC, EWCConfig
from holdfast.methods.osf import OSF, OSFConfig
from holdfast.methods.sfa import SFA, SFAConfig
from holdfast.methods.si import SI, SIConfig
from holdfast.methods.ssu import SSU, SSUConfig
from holdfast.models.parameters import leaves_of
from holdfast.optim import build_optimizer
from holdfast.optim.config import OptimConfig

SHAPES = {
    "embed": {"embedding": (7, 6)},
    "layers": {
        "attention": {"q": {"kernel": (2, 6, 4), "bias": (2, 4)}},
        "mlp_norm": {"scale": (2, 6)},
        "mlp": {"up": {"kernel": (2, 6, 9)}},
    },
    "unembed": {"kernel": (6, 7)},
}
KERNELS = ("layers/attention/q/kernel", "layers/mlp/up/kernel")


def tree(seed: int, scale: float = 1.0) -> Any:
    """Parameters of a small model with random values."""
    rng, is_shape = np.random.default_rng(seed), lambda node: isinstance(node, tuple)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32), SHAPES, is_leaf=is_shape
    )


def flat(params: Any) -> dict[str, Any]:
    """The leaves in double precision, by slash path."""
    return {path: np.asarray(leaf, np.float64) for path, leaf in leaves_of(params).items()}


def dot(one: Any, other: Any) -> float:
    """The inner product in double precision."""
    left, right = flat(one), flat(other)
    return float(sum((left[path] * right[path]).sum() for path in left))


def same_bits(one: Any, other: Any) -> bool:
    """Whether all numbers are equal to the bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@struct.dataclass
class Softmax:
    """A model of one matrix: the logits of the token after x are row x of it."""

    params: Any

    def trained(self) -> Any:
        return self.params

    def log_likelihoods(self, trained: Any, micro: Batch) -> Any:
        logp = jax.nn.log_softmax(trained["w"][micro.x])
        found = jnp.take_along_axis(logp, jnp.maximum(micro.y, 0)[..., None], -1)[..., 0]
        return jnp.where((micro.y >= 0) & (micro.padding_mask > 0), found, 0.0)

    def sampled(self, micro: Batch, key: Any) -> Batch:
        return micro._replace(y=jnp.where(micro.y >= 0, jax.random.categorical(key, self.params["w"][micro.x]), -1))


class Rows:
    """Data of a boundary that is given."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def old(self, num_rows: int) -> Batch:
        return self.batch

    def key(self, stream: str) -> Any:
        return jax.random.key(3)


def rows(num_rows: int, length: int, seed: int = 0) -> Batch:
    """Random rows (1, B, T) of a vocabulary of 3, whose last token has no target."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 3, (1, num_rows, length)).astype(np.int32)
    y = rng.integers(0, 3, x.shape).astype(np.int32)
    if length > 1:
        y[..., -1] = -1
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(x.shape, jnp.int8))


W = np.array([[0.3, -0.5, 0.2], [1.0, 0.1, -0.4], [-0.7, 0.6, 0.0]])


def softmax(logits: Any) -> Any:
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def test_the_empirical_fisher_is_that_of_summed_rows_by_token_and_is_decayed() -> None:
    method = EWC(EWCConfig(labels="data", gamma=0.25))
    state, batch = Softmax({"w": jnp.asarray(W, jnp.float32)}), rows(6, 5)
    older = {"fisher": {"w": jnp.full((3, 3), 0.4)}, "center": {"w": jnp.zeros((3, 3))}}
    memory = method.remember(older, state, Rows(batch))
    wanted, probability = np.zeros((3, 3)), softmax(W)
    for x, y in zip(np.asarray(batch.x)[0], np.asarray(batch.y)[0], strict=True):
        gradient = np.zeros((3, 3))
        for token, target in zip(x, y, strict=True):
            if target >= 0:
                gradient[token] += np.eye(3)[target] - probability[token]
        wanted += gradient**2
    wanted = 0.25 * 0.4 + wanted / (6 * 4)
    np.testing.assert_allclose(memory["fisher"]["w"], wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(memory["center"]["w"], np.float32(W))
    moved = {"w": jnp.asarray(W + 0.1, jnp.float32)}
    distance = np.asarray(moved["w"], np.float64) - np.float32(W)
    np.testing.assert_allclose(
        method.parameter_penalty(memory, moved, None), 0.5 * (wanted * distance**2).sum(), rtol=1e-6
    )


def test_the_sampled_fisher_is_the_closed_form_of_a_softmax() -> None:
    """With rows of one token, F of the logit k after x is the share of x times p (1 − p)."""
    batch = rows(20_000, 1)
    state = Softmax({"w": jnp.asarray(W, jnp.float32)})
    found = np.asarray(jax.jit(EWC(EWCConfig()).fisher)(state, batch, jax.random.key(5))["w"], np.float64)
    share = np.bincount(np.asarray(batch.x).ravel(), minlength=3) / 20_000
    p = softmax(W)
    wanted = share[:, None] * p * (1 - p)
    # Of one token's squared gradient, (1 − p)² with chance p and p² otherwise.
    variance = share[:, None] * (p * (1 - p) ** 4 + (1 - p) * p**4) - wanted**2
    assert (np.abs(found - wanted) < 5 * np.sqrt(variance / 20_000)).all()
    data = np.asarray(jax.jit(EWC(EWCConfig(labels="data")).fisher)(state, batch, jax.random.key(5))["w"])
    assert np.abs(data - wanted).max() > 0.02, "the data's labels, which are uniform, give another one"


def test_a_normalised_fisher_has_mean_one() -> None:
    state, batch = Softmax({"w": jnp.asarray(W, jnp.float32)}), rows(6, 5)
    plain, scaled = (
        EWC(EWCConfig(labels="data", normalise=on)).fisher(state, batch, jax.random.key(0))["w"] for on in (False, True)
    )
    np.testing.assert_allclose(scaled, plain / plain.mean(), rtol=1e-5)


def test_si_adds_up_the_way_and_holds_it() -> None:
    method, params = SI(SIConfig(xi=0.01)), tree(0)
    memory, here = method.init(params), params
    omega = {path: np.zeros(leaf.shape) for path, leaf in flat(params).items()}
    for seed in (1, 2, 3):
        gradient, step = tree(seed), tree(seed + 10, 0.1)
        memory = method.observe(memory, gradient, step, here)
        for path in omega:
            omega[path] -= flat(gradient)[path] * flat(step)[path]
        here = jax.tree.map(jnp.add, here, step)
    state = Softmax(here)
    damped = method.measure(memory, None, None, jax.tree.map(jnp.zeros_like, here), here)["damped"]
    way = {path: flat(here)[path] - flat(params)[path] for path in omega}
    every = np.concatenate([leaf.ravel() for leaf in way.values()])
    np.testing.assert_allclose(damped, (every**2 < 0.001).mean(), rtol=1e-6)
    memory = method.remember(memory, state, None)  # type: ignore[arg-type]  # it looks at no rows
    wanted = {path: omega[path] / (way[path] ** 2 + 0.01) for path in omega}
    for path, leaf in flat(memory["importance"]).items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=1e-4, atol=1e-5)
    assert not any(leaf.any() for leaf in flat(memory["path"]).values())
    assert same_bits(memory["center"], here)
    later = tree(7)
    value = sum((wanted[path] * (flat(later)[path] - flat(here)[path]) ** 2).sum() for path in wanted)
    np.testing.assert_allclose(method.parameter_penalty(memory, later, None), value, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(-3, 3))
def test_agem_never_points_against_the_old_gradient(seed: int, lean: float) -> None:
    new, old = tree(seed), tree(seed + 1)
    new = jax.tree.map(lambda g, o: g + lean * o, new, old)
    found = AGEM(AGEMConfig()).gradients(None, new, old)
    along, square = dot(new, old), dot(old, old)
    size = np.sqrt(square * dot(new, new))
    assert dot(found, old) >= -1e-6 * size
    if along > 1e-6 * size:
        assert same_bits(found, new)
    if along < -1e-6 * size:
        for path, leaf in flat(found).items():
            wanted = flat(new)[path] - along / square * flat(old)[path]
            np.testing.assert_allclose(leaf, wanted, rtol=0, atol=1e-6 * np.abs(flat(new)[path]).max())


def test_agem_measures_steps_that_oppose_old_rows() -> None:
    method, gradient, old = AGEM(AGEMConfig()), tree(0), tree(1)
    down, up = (jax.tree.map(lambda leaf, sign=sign: sign * leaf, old) for sign in (-0.1, 0.1))
    assert method.measure(None, up, old, down, None) == {"projected": 0, "opposed": 0}
    assert method.measure(None, down, old, up, None) == {"projected": 1, "opposed": 1}
    without = method.measure(None, gradient, jax.tree.map(jnp.zeros_like, old), down, None)
    assert all(np.isnan(value) for value in without.values())
    assert same_bits(method.gradients(None, gradient, jax.tree.map(jnp.zeros_like, old)), gradient)


def test_sfa_averages_in_time_and_at_the_end() -> None:
    method, start, now = SFA(SFAConfig(period=0.25, beta=0.3)), tree(0), tree(1)
    memory = method.remember(None, Softmax(start), None)  # type: ignore[arg-type]  # it looks at no rows

    def after(step: int, method: SFA = method) -> Any:
        active = ActiveMethods({"sfa": dataclasses.replace(method, edges=(0, 5, 15, 19))})
        return active.weights({"sfa": memory}, now, None, jnp.int32(step))

    due = [step for step in range(1, 20) if not same_bits(after(step), now)]
    # Stages of 5, 10 and 4 steps: the multiples of 1.25, 2.5 and 1, rounded; four averages in each.
    assert due == [1, 2, 4, 5, 7, 10, 13, 15, 16, 17, 18, 19]
    for path, leaf in flat(after(15)).items():
        np.testing.assert_allclose(leaf, 0.3 * flat(start)[path] + 0.7 * flat(now)[path], rtol=1e-6, atol=1e-6)
    third = SFA(SFAConfig(period=0.3), (0, 10))
    ends = [step for step in range(1, 11) if not same_bits(third.weights(memory, now, None, jnp.int32(step)), now)]
    assert ends == [3, 6, 9, 10]
    long = SFA(SFAConfig(period=0.25), (0, 10, 111))
    odd = [step for step in range(11, 112) if not same_bits(long.weights(memory, now, None, jnp.int32(step)), now)]
    assert odd == [35, 60, 86, 111], "no second average just before the end"
    often = SFA(SFAConfig(period=0.01), (0, 30))
    assert all(not same_bits(often.weights(memory, now, None, jnp.int32(step)), now) for step in range(1, 31))
    assert same_bits(after(15, SFA(SFAConfig(beta=0.0))), now)


def adamw(method: Any, memory: Any, params: Any, steps: int = 50) -> Any:
    """Parameters after steps of AdamW with decay, entered with non-zero moments."""
    gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree(seed + 100) for seed in range(3 + steps)))
    return run_adamw(method, memory, params, gradients)


@functools.partial(jax.jit, static_argnums=0)
def run_adamw(method: Any, memory: Any, params: Any, gradients: Any) -> Any:
    """The parameters after all gradients, of which the first three only make moments."""
    optimizer = build_optimizer("adamw", OptimConfig(weight_decay=0.1))

    def step(carry: Any, item: Any) -> Any:
        (params, state), (index, gradient) = carry, item
        updates, state = optimizer.update(gradient, state, params, 0.01)
        moved = optax.apply_updates(params, method.updates(memory, updates, params))
        return (jax.tree.map(lambda new, old: jnp.where(index < 3, old, new), moved, params), state), None

    steps = jnp.arange(jax.tree.leaves(gradients)[0].shape[0])
    return jax.lax.scan(step, (params, optimizer.init(params)), (steps, gradients))[0][0]


def test_ssu_freezes_the_features_with_the_highest_scores() -> None:
    params, rng = tree(0), np.random.default_rng(1)
    params["layers"]["mlp_norm"]["scale"] = params["layers"]["mlp_norm"]["scale"].at[0, 0].set(-0.0)
    moments = {path: jnp.asarray(rng.uniform(0.1, 2, (2, 6)), jnp.float32) for path in KERNELS}
    method = SSU(SSUConfig(ratio=0.5))
    frozen = leaves_of(method.frozen(params, moments))
    for path in KERNELS:
        scores = np.linalg.norm(flat(params)[path], axis=-1) * np.asarray(moments[path], np.float64)
        wanted = scores >= np.sort(scores, axis=-1)[:, 3:4]
        np.testing.assert_array_equal(frozen[path][..., 0], wanted)
        assert frozen[path].shape == (2, 6, 1)
    for path in ("layers/attention/q/bias", "layers/mlp_norm/scale"):
        size = np.abs(flat(params)[path])
        np.testing.assert_array_equal(frozen[path], size >= np.sort(size, axis=-1)[:, size.shape[-1] // 2][:, None])
    assert not frozen["embed/embedding"].any()
    assert not frozen["unembed/kernel"].any()
    shapes = jax.tree.map(jnp.shape, method.init(params))
    assert shapes == jax.tree.map(jnp.shape, method.frozen(params, moments))


def test_what_ssu_freezes_is_unchanged_to_the_bit_after_adamw_and_the_rest_is_plain() -> None:
    params = tree(0)
    moments = {path: jnp.asarray(np.random.default_rng(1).uniform(0.1, 2, (2, 6)), jnp.float32) for path in KERNELS}
    method = SSU(SSUConfig(ratio=0.5))
    memory = method.frozen(params, moments)
    ended, plain = adamw(method, memory, params), adamw(method, method.init(params), params)
    held, before, free = leaves_of(memory), leaves_of(params), leaves_of(plain)
    for path, leaf in leaves_of(ended).items():
        mask = np.broadcast_to(held[path], leaf.shape)
        assert np.asarray(leaf)[mask].tobytes() == np.asarray(before[path])[mask].tobytes(), path
        np.testing.assert_array_equal(np.asarray(leaf)[~mask], np.asarray(free[path])[~mask])
        assert not mask.any() or (np.asarray(leaf)[~mask] != np.asarray(before[path])[~mask]).all()
    nothing = SSU(SSUConfig(ratio=0.0))
    updates = tree(4)
    assert same_bits(nothing.updates(nothing.frozen(params, moments), updates, params), updates)


def test_osf_keeps_the_top_singular_directions() -> None:
    params, method = tree(0), OSF(OSFConfig(rank=0.5))
    memory = method.remember(method.init(params), Softmax(params), None)  # type: ignore[arg-type]  # no rows
    updates = tree(1)
    found = flat(method.updates(memory, updates, params))
    for path in KERNELS:
        rank = min(flat(params)[path].shape[-2:]) // 2
        for layer in range(2):
            u, _, vt = np.linalg.svd(flat(params)[path][layer])
            left, right = np.eye(6) - u[:, :rank] @ u[:, :rank].T, np.eye(vt.shape[0]) - vt[:rank].T @ vt[:rank]
            np.testing.assert_allclose(found[path][layer], left @ flat(updates)[path][layer] @ right, atol=1e-5)
    for path in ("embed/embedding", "unembed/kernel", "layers/mlp_norm/scale"):
        np.testing.assert_array_equal(found[path], flat(updates)[path])
    nothing = OSF(OSFConfig(rank=0.0))
    empty = nothing.remember(nothing.init(params), Softmax(params), None)  # type: ignore[arg-type]  # no rows
    assert same_bits(nothing.updates(empty, updates, params), updates)
    assert jax.tree.map(jnp.shape, memory) == jax.tree.map(jnp.shape, method.init(params))


def test_what_osf_holds_does_not_move_under_adamw() -> None:
    params, method = tree(0, 0.1), OSF(OSFConfig(rank=0.5))
    memory = method.remember(method.init(params), Softmax(params), None)  # type: ignore[arg-type]  # no rows
    ended = adamw(method, memory, params)
    left, right = flat(memory["left"]), flat(memory["right"])
    for path in KERNELS:
        moved = flat(ended)[path] - flat(params)[path]
        assert np.abs(moved).max() > 0.01
        assert np.abs(np.einsum("lir,lio->lro", left[path], moved)).max() < 1e-6
        assert np.abs(np.einsum("lio,lor->lir", moved, right[path])).max() < 1e-6


@pytest.mark.parametrize("method", [EWC(EWCConfig()), SI(SIConfig())])
def test_a_penalty_with_weight_zero_changes_no_gradient(method: Any) -> None:
    neutral = type(method)(dataclasses.replace(method.config, weight=0.0))
    params, gradients = tree(0), tree(1)
    memory = {"m": jax.tree.map(lambda leaf: leaf + 1.0, neutral.init(params))}
    found, added, values = ActiveMethods({"m": neutral}).penalise(memory, params, None, gradients)
    assert same_bits(found, gradients)
    assert added == 0
    assert values["m"] > 0
