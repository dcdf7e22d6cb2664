"""Optimizers with the learning rate outside equal Optax's own with a schedule inside."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from holdfast import registry
from holdfast.errors import ConfigError
from holdfast.optim import (
    OptimConfig,
    ScheduleContext,
    build_optimizer,
    build_schedule,
    decay_mask,
    state_shardings,
)
from holdfast.optim.optimizers import AdafactorConfig, AdamWConfig, MuonConfig, SGDConfig, matrix_axes

NAMES = ["adafactor", "adamw", "lion", "muon", "sgd"]
STEPS = 20


def parameters():
    # numpy draws, because compiling random numbers would take longer than all that is tested here
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "embed": {"embedding": normal(12, 6)},
        "mlp": {"kernel": normal(6, 8), "bias": jnp.full((8,), 0.1)},
        "out": {"kernel": normal(8, 6) * 0.1},
        "norm": {"scale": jnp.ones((6,))},
    }


def noise():
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(STEPS, *p.shape)), jnp.float32), parameters())


def gradients(params, at_step):
    return jax.tree.map(jnp.add, params, at_step)


def first_gradients(params):
    return gradients(params, jax.tree.map(lambda leaf: leaf[0], noise()))


def schedule():
    return build_schedule("wsds", ScheduleContext(0.02, STEPS, warmup_pct=0.2, decay_pct=0.2, constant_pct=0.2))


def train(init, update):
    """Parameters after some steps; `update(gradients, state, params, step)` gives updates and the next state."""

    def one(carry, inputs):
        params, state = carry
        step, at_step = inputs
        updates, state = update(gradients(params, at_step), state, params, step)
        return (optax.apply_updates(params, updates), state), None

    params = parameters()
    inputs = (jnp.arange(STEPS), noise())
    (params, _), _ = jax.jit(lambda carry, xs: jax.lax.scan(one, carry, xs))((params, init(params)), inputs)
    return params


def references(config):
    rates, decay = schedule(), config.weight_decay
    mask = decay_mask(parameters())
    muon = contrib.muon(
        rates,
        adam_b2=0.95,
        consistent_rms=0.2,
        nesterov=False,
        weight_decay=decay,
        muon_weight_dimension_numbers=matrix_axes,
    )
    return {
        "adamw": optax.adamw(rates, 0.9, 0.95, weight_decay=decay, mask=mask),
        "lion": optax.lion(rates, weight_decay=decay, mask=mask),
        "adafactor": optax.adafactor(rates, min_dim_size_to_factor=4),
        "sgd": optax.sgd(rates, momentum=0.9, nesterov=True),
        "muon": muon,
    }


def test_the_adam_part_of_muon_is_plain_adam():
    optimizer, rates = build_optimizer("muon", OptimConfig(weight_decay=0.0, clip_norm=0.0)), schedule()
    ours = train(optimizer.init, lambda grads, state, params, step: optimizer.update(grads, state, params, rates(step)))
    adam = optax.adam(rates, 0.9, 0.95)

    # Gradients of a parameter depend on that parameter alone, so that Adam may be run on all of them.
    theirs = train(adam.init, lambda grads, state, params, _: adam.update(grads, state, params))
    for name, leaf in (("embed", "embedding"), ("mlp", "bias"), ("norm", "scale")):
        np.testing.assert_allclose(ours[name][leaf], theirs[name][leaf], rtol=1e-6, atol=1e-7)
    assert np.abs(ours["mlp"]["kernel"] - theirs["mlp"]["kernel"]).max() > 1e-3


def test_muon_keeps_the_state_of_optax_so_that_older_checkpoints_restore():
    params = jax.eval_shape(parameters)
    ours = build_optimizer("muon", OptimConfig(weight_decay=0.0, clip_norm=0.0)).transformation
    theirs = optax.chain(contrib.muon(1.0, muon_weight_dimension_numbers=matrix_axes))
    assert jax.tree.structure(jax.eval_shape(ours.init, params)) == jax.tree.structure(
        jax.eval_shape(theirs.init, params)
    )


PLUGIN = {
    "sgd": SGDConfig(momentum=0.9, nesterov=True),
    "adafactor": AdafactorConfig(min_dim_size_to_factor=4),
    "muon": MuonConfig(nesterov=False),  # Optax's muon has Nesterov's Adam beside Nesterov's momentum
    "adamw": AdamWConfig(),
}


@pytest.mark.parametrize(("name", "clip_norm"), [("adamw", 0.0), *((name, 1.0) for name in NAMES)])
def test_equal_to_optax_with_a_schedule_inside(name, clip_norm):
    # Optax couples Adafactor's decay to no learning rate, has none for SGD and does not decay Muon's embeddings.
    decay = 0.1 if name in ("adamw", "lion") else 0.0
    config = OptimConfig(weight_decay=decay, clip_norm=clip_norm)
    optimizer, rates = build_optimizer(name, config, PLUGIN.get(name)), schedule()
    ours = train(optimizer.init, lambda grads, state, params, step: optimizer.update(grads, state, params, rates(step)))
    reference = references(config)[name]
    if clip_norm:
        reference = optax.chain(optax.clip_by_global_norm(clip_norm), reference)
    theirs = train(reference.init, lambda grads, state, params, _: reference.update(grads, state, params))
    # Lion's sign flips on a last-bit difference, so equality here means equality all the way.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), ours, theirs)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), ours, parameters())
    assert min(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_lr_times_decay_times_parameter_on_kernels_and_embeddings_only(name):
    params = parameters()
    grads = first_gradients(params)
    plain = build_optimizer(name, OptimConfig(weight_decay=0.0))
    decayed = build_optimizer(name, OptimConfig(weight_decay=0.5))
    without, _ = jax.jit(plain.update)(grads, plain.init(params), params, 0.1)
    with_decay, _ = jax.jit(decayed.update)(grads, decayed.init(params), params, 0.1)
    difference = jax.tree.map(lambda a, b: a - b, with_decay, without)
    for decaying in (("embed", "embedding"), ("mlp", "kernel"), ("out", "kernel")):
        np.testing.assert_allclose(
            difference[decaying[0]][decaying[1]], -0.05 * params[decaying[0]][decaying[1]], atol=1e-6
        )
    assert not difference["mlp"]["bias"].any()
    assert not difference["norm"]["scale"].any()


def test_mask_knows_scanned_layers_by_name():
    params = {
        "wte": {"embedding": jnp.ones((5, 4))},
        "layers": {
            "attention": {"q": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.ones((3, 4))}},
            "ln_1": {"scale": jnp.ones((3, 4)), "weight": jnp.ones((3, 4))},
            "q_norm": {"scale": jnp.ones((3, 2, 4))},
            "mlp": {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.ones((3, 8))},
        },
        "ln_f": {"scale": jnp.ones((4,)), "bias": jnp.ones((4,))},
    }
    mask = decay_mask(params)
    kept = {jax.tree_util.keystr(path) for path, decays in jax.tree_util.tree_leaves_with_path(mask) if decays}
    assert kept == {
        "['wte']['embedding']",
        "['layers']['attention']['q']['kernel']",
        "['layers']['mlp']['kernel']",
    }


def test_mask_sees_through_flax_boxes():
    boxed = {"norm": {"scale": nn.LogicallyPartitioned(jnp.ones((3, 4)), ("layers", "embed"))}}
    assert jax.tree.leaves(decay_mask(boxed)) == [False]
    boxed = {"dense": {"kernel": nn.LogicallyPartitioned(jnp.ones((3, 4)), ("embed", "mlp"))}}
    assert jax.tree.leaves(decay_mask(boxed)) == [True]


def test_muon_orthogonalises_each_scanned_layer_alone():
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6, 8)), jnp.float32)
    optimizer = build_optimizer("muon", OptimConfig(weight_decay=0.0, clip_norm=0.0))

    @jax.jit
    def direction(params):
        return optimizer.update(params, optimizer.init(params), params, 1.0)[0]

    stacked = direction({"mlp": {"kernel": kernel}})["mlp"]["kernel"]
    alone = [direction({"mlp": {"kernel": layer}})["mlp"]["kernel"] for layer in kernel]
    np.testing.assert_allclose(stacked, jnp.stack(alone), atol=1e-5)
    assert matrix_axes(parameters())["embed"]["embedding"] is None


def test_learning_rate_follows_the_global_step_after_a_reset():
    optimizer = build_optimizer("adamw", OptimConfig(weight_decay=0.0, clip_norm=0.0))
    params = parameters()
    fresh = optimizer.init(params)
    rates = schedule()
    update = jax.jit(optimizer.update)
    early, _ = update(first_gradients(params), fresh, params, rates(0))
    late, _ = update(first_gradients(params), fresh, params, rates(STEPS - 1))
    ratio = rates(STEPS - 1) / rates(0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a * ratio, b, rtol=1e-5), early, late)


def test_own_transformation_is_used_as_it_is():
    own = optax.sgd(0.25)
    optimizer = build_optimizer(own, OptimConfig())
    assert optimizer.transformation is own
    grads = {"w": jnp.full((2, 2), 100.0)}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads, 7.0)
    np.testing.assert_array_equal(updates["w"], jnp.full((2, 2), -25.0))
    assert build_optimizer(own, OptimConfig(optimizer="lion")).scale_by_schedule


@pytest.mark.parametrize("name", NAMES)
def test_state_shards_like_the_parameters(name):
    optimizer = build_optimizer(name, OptimConfig(), PLUGIN.get(name))
    params = jax.eval_shape(parameters)
    shardings = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    placed = state_shardings(optimizer, params, shardings, "replicated")
    state = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    found = set(jax.tree.leaves(placed))
    assert found <= {"replicated", *jax.tree.leaves(shardings)}
    if name in ("adamw", "lion", "sgd", "muon"):
        assert set(jax.tree.leaves(shardings)) <= found
        pairs = zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True)
        shapes = {jax.tree_util.keystr(p): leaf.shape for p, leaf in jax.tree_util.tree_leaves_with_path(params)}
        assert all(shapes.get(where, leaf.shape) == leaf.shape for where, leaf in pairs)


def test_all_are_registered_with_their_configs():
    assert registry.optimizers.names() == NAMES
    assert all(registry.optimizers.config(name) is not None for name in NAMES)


def test_a_second_moment_in_bfloat16_is_held_so_and_follows_adam():
    optimizer, plain = (
        build_optimizer("adamw", OptimConfig(), AdamWConfig(second_moment_dtype=dtype)) for dtype in ("bfloat16", None)
    )
    params = parameters()
    state = optimizer.init(params)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "nu"))}
    assert kinds == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype("float32")}
    first = first_gradients(params)
    ours, stepped = optimizer.update(first, state, params, 1.0)
    theirs, exact = plain.update(first, plain.init(params), params, 1.0)
    # A step computes with the moment before it is rounded, so the first one is exact.
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    rounded, whole = (optax.tree.get(each, "nu") for each in (stepped, exact))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), rounded, whole)
    rates, ends = schedule(), []
    for each in (optimizer, plain):
        ends.append(train(each.init, lambda g, s, p, step, own=each: own.update(g, s, p, rates(step))))
    moved = jax.tree.map(lambda a, b: np.abs(a - b), ends[1], params)
    off = jax.tree.map(lambda a, b: np.abs(a - b), *ends)
    jax.tree.map(lambda error, way: np.testing.assert_array_less(error.max(), 0.02 * way.max()), off, moved)


def test_a_second_moment_in_bfloat16_lies_as_its_parameter_does():
    optimizer = build_optimizer("adamw", OptimConfig(), AdamWConfig(second_moment_dtype="bfloat16"))
    params = jax.eval_shape(parameters)
    places = state_shardings(optimizer, params, jax.tree.map(lambda leaf: leaf.shape, params), "replicated")
    assert optax.tree.get(places, "nu") == jax.tree.map(lambda leaf: leaf.shape, params)


def test_a_second_moment_that_bfloat16_cannot_follow_is_refused():
    with pytest.raises(ConfigError, match=r"second_moment_dtype.*beta2"):
        AdamWConfig(beta2=0.999, second_moment_dtype="bfloat16")


@pytest.mark.parametrize(("beta2", "held"), [(0.95, jnp.bfloat16), (0.999, jnp.float32)])
def test_parameters_in_bfloat16_have_a_second_moment_that_can_follow(beta2, held):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    optimizer = build_optimizer("adamw", OptimConfig(), AdamWConfig(beta2=beta2))
    state = optimizer.init(params)
    for _ in range(2):
        _, state = optimizer.update({"w": jnp.full((4, 4), 0.125, jnp.bfloat16)}, state, params, jnp.float32(0.1))
        nu = optax.tree.get(state, "nu")["w"]
        assert nu.dtype == held
    np.testing.assert_allclose(nu.astype(jnp.float32), 0.125**2 * (1 - beta2**2), rtol=1e-2)


def test_a_second_moment_in_float32_is_adam_itself_whatever_its_rate():
    plain, params = optax.adam(1.0, 0.9, 0.999, 1e-8), parameters()
    ours = registry.optimizers.get("adamw")(AdamWConfig(beta2=0.999))
    states = [each.init(params) for each in (plain, ours)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    gradients = jax.tree.map(lambda leaf: 0.1 * leaf + 0.01, params)
    found = [jax.jit(each.update)(gradients, state) for each, state in zip((plain, ours), states, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *found)
