"""The penalties' identities on the mathematics page, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import registry
from holdfast.objectives import ParameterPenalty, TokenPenalty
from holdfast.objectives.token_loss import Penalised, token_loss

N, D, V = 12, 8, 19
EXACT = ("forward", "reverse")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


TARGETS = jnp.asarray(np.random.default_rng(3).integers(0, V, N))
WEIGHTS = jnp.full(N, 1 / N)


def loss(hidden, matrix, name, reference=None, beta=1.0, ce=1.0):
    """ce · CE + beta · penalty; the reference is (hidden, matrix)."""
    states = {} if reference is None else {"reference_hidden": reference[0], "reference_unembedding_DV": reference[1]}
    penalties = () if name is None else (Penalised(registry.penalties.get(name), beta, WEIGHTS),)
    return token_loss(hidden, matrix, TARGETS, ce * WEIGHTS, penalties=penalties, **states)


def gradients(*args, **options):
    return jax.jit(jax.grad(lambda h, m: loss(h, m, *args, **options)[0], (0, 1)))(normal(N, D), normal(D, V, seed=1))


REFERENCES = [(normal(N, D, seed=seed), normal(D, V, seed=seed + 1)) for seed in (10, 20)]


def test_all_are_registered_with_help():
    assert registry.penalties.names() == ["forward", "l2_reference", "nll_difference", "reverse"]
    for name in registry.penalties:
        assert registry.penalties.help(name)
        kind = ParameterPenalty if name == "l2_reference" else TokenPenalty
        assert isinstance(registry.penalties.get(name), kind)


@pytest.mark.parametrize("name", EXACT)
def test_zero_value_and_gradient_at_the_reference(name):
    hidden, matrix = normal(N, D), normal(D, V, seed=1)
    _, aux = jax.jit(lambda h, m: loss(h, m, name, (h, m)))(hidden, matrix)
    assert float(aux.penalty) == 0
    # The reference is an argument, as in training: a constant would be folded by other arithmetic.
    slope = jax.jit(
        lambda h, m, *reference: jax.grad(lambda h, m: loss(h, m, name, reference, ce=0.0)[0], (0, 1))(h, m)
    )
    for gradient in slope(hidden, matrix, hidden, matrix):
        assert not gradient.any()


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=60)
@given(
    scale=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 20.0]),
    noise=st.sampled_from([0.0, 1e-7, 1e-4, 1.0]),
    seed=st.integers(0, 1000),
)
def test_never_below_zero(name, scale, noise, seed):
    logits = scale * normal(7, 501, seed=seed)
    policy, reference = logits, logits + noise * normal(7, 501, seed=seed + 1)
    value = registry.penalties.get(name).value(
        jax.nn.log_softmax(policy), jax.nn.log_softmax(reference), jnp.zeros(7, jnp.int32)
    )
    assert float(value.min()) >= -1e-6


@pytest.mark.parametrize(("name", "expected"), [("forward", [0.1438410, 0.0]), ("reverse", [0.1308121, 0.0])])
def test_golden_values(name, expected):
    policy = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    reference = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    value = registry.penalties.get(name).value(policy, reference, jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(value, expected, atol=1e-6)


@pytest.mark.parametrize("name", [*EXACT, "nll_difference"])
def test_the_gradient_formula_is_the_derivative_of_the_value(name):
    penalty = registry.penalties.get(name)
    logits, reference = normal(N, V), jax.nn.log_softmax(normal(N, V, seed=1))
    policy = jax.nn.log_softmax(logits)
    formula = penalty.gradient(policy, reference, TARGETS, penalty.value(policy, reference, TARGETS))
    derived = jax.grad(lambda x: penalty.value(jax.nn.log_softmax(x), reference, TARGETS).sum())(logits)
    np.testing.assert_allclose(formula, derived, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_depends_on_the_reference(name):
    first, second = (gradients(name, reference) for reference in REFERENCES)
    assert not jnp.allclose(first[0], second[0], atol=1e-3)


@pytest.mark.parametrize("beta", [0.1, 3.0])
def test_nll_difference_only_scales_the_cross_entropy(beta):
    """CE + β·penalty has the gradient (1 + β)∇CE whatever the reference is: it cannot hold anything."""
    plain = gradients(None)
    for reference in REFERENCES:
        for got, expected in zip(gradients("nll_difference", reference, beta=beta), plain, strict=True):
            np.testing.assert_allclose(got, (1 + beta) * expected, atol=1e-6)


def test_nll_difference_is_the_specs_difference_and_goes_negative():
    hidden, matrix = normal(N, D), normal(D, V, seed=1)
    _, aux = loss(hidden, matrix, "nll_difference", REFERENCES[0])
    _, reference = loss(*REFERENCES[0], None)
    np.testing.assert_allclose(aux.penalty, aux.ce - reference.ce, atol=1e-6)
    _, swapped = loss(*REFERENCES[0], "nll_difference", (hidden, matrix))
    assert float(aux.penalty) * float(swapped.penalty) < 0


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_forward_is_cross_entropy_on_a_soft_target(beta):
    """CE + β·KL(r ‖ π) = (1 + β) × CE on (onehot + β·r)/(1 + β) − β·H(r)."""
    reference = REFERENCES[0]
    target = jax.nn.softmax(reference[0] @ reference[1])
    soft = (jax.nn.one_hot(TARGETS, V) + beta * target) / (1 + beta)
    entropy = -(target * jnp.log(target)).sum(-1).mean()

    def soft_loss(hidden, matrix):
        return (1 + beta) * -(soft * jax.nn.log_softmax(hidden @ matrix)).sum(-1).mean() - beta * entropy

    arguments = (normal(N, D), normal(D, V, seed=1))
    value, expected = jax.value_and_grad(soft_loss, (0, 1))(*arguments)
    np.testing.assert_allclose(loss(*arguments, "forward", reference, beta=beta)[0], value, rtol=1e-5)
    for got, wanted in zip(gradients("forward", reference, beta=beta), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_a_larger_beta_ends_nearer_to_the_reference(name):
    hidden, start = normal(N, D), normal(D, V, seed=1)
    distances = []
    for beta in (0.0, 0.5, 5.0):
        step = jax.jit(
            lambda m, b=beta: m - 0.1 * jax.grad(lambda m: loss(hidden, m, name, (hidden, start), beta=b)[0])(m)
        )
        matrix = start
        for _ in range(60):
            matrix = step(matrix)
        distances.append(float(loss(hidden, matrix, name, (hidden, start))[1].penalty))
    assert distances[0] > distances[1] > distances[2] > 0


def test_l2_reference():
    penalty = registry.penalties.get("l2_reference")
    params = {"a": normal(3, 4), "b": {"c": normal(5).astype(jnp.bfloat16)}}
    reference = jax.tree.map(lambda leaf: leaf * 0.5, params)
    value, gradient = jax.value_and_grad(penalty.value)(params, reference)
    squares = sum(float(jnp.square((leaf * 0.5).astype(jnp.float32)).sum()) for leaf in jax.tree.leaves(params))
    assert float(value) == pytest.approx(squares / 2, rel=1e-3)
    np.testing.assert_allclose(gradient["a"], params["a"] * 0.5, rtol=1e-6)
    assert float(penalty.value(params, params)) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(jax.grad(penalty.value)(params, params)))
