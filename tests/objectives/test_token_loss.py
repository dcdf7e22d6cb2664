"""token_loss against the plain formulas, in values and gradients, whole and in chunks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import registry
from holdfast.methods import TokenPenalty
from holdfast.models.kernels import lowering_for
from holdfast.objectives.token_loss import Penalised, token_kl, token_loss, token_nll

R, T, D, V = 3, 10, 8, 17
Z_LOSS, BETA = 0.1, 0.7


@pytest.fixture(scope="module")
def case():
    """Random states, weights and a reference; some targets ignored, some tokens masked."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    targets = random.integers(0, V, (R, T))
    targets[0, 3:6] = -1
    return {
        "hidden": normal(R, T, D),
        "matrix": normal(D, V),
        "targets": jnp.asarray(targets, jnp.int32),
        "ce_weights": jnp.asarray(random.random((R, T)) / 20, jnp.float32),
        "reference_hidden": normal(R, T, D),
        "reference_matrix": normal(D, V),
        "penalty_weights": jnp.asarray((random.random((R, T)) < 0.7) / 15, jnp.float32),
    }


def penalty_of(name):
    return name if isinstance(name, TokenPenalty) else registry.penalties.get(name)


def loss(case, hidden, matrix, name=None, *, beta=BETA, z_loss=0.0, chunk_tokens=None, softcap=None, **changes):
    case = {**case, **changes}
    return token_loss(
        hidden,
        matrix,
        case["targets"],
        case["ce_weights"],
        z_loss=z_loss,
        penalties=() if name is None else (Penalised(penalty_of(name), beta, case["penalty_weights"]),),
        reference_hidden=case["reference_hidden"],
        reference_unembedding_DV=case["reference_matrix"],
        chunk_tokens=chunk_tokens,
        softcap=softcap,
    )


def plain(case, hidden, matrix, name=None, *, beta=BETA, z_loss=0.0):
    """The same by the textbook, differentiated by JAX."""
    logits = hidden @ matrix
    logp = jax.nn.log_softmax(logits)
    reference = jax.nn.log_softmax(case["reference_hidden"] @ case["reference_matrix"])
    index = jnp.maximum(case["targets"], 0)[..., None]
    nll = -jnp.take_along_axis(logp, index, -1)[..., 0]
    reference_nll = -jnp.take_along_axis(reference, index, -1)[..., 0]
    ce_weights = case["ce_weights"] * (case["targets"] >= 0)
    total = (ce_weights * nll).sum()
    total += z_loss * (ce_weights * jax.nn.logsumexp(logits, axis=-1) ** 2).sum()
    if name == "nll_difference":
        total += beta * (ce_weights * (nll - reference_nll)).sum()
    elif name == "forward":
        total += beta * (case["penalty_weights"] * (jnp.exp(reference) * (reference - logp)).sum(-1)).sum()
    elif name == "reverse":
        total += beta * (case["penalty_weights"] * (jnp.exp(logp) * (logp - reference)).sum(-1)).sum()
    return total


def gradients(function, case, *args, **options):
    value, grads = jax.jit(
        jax.value_and_grad(lambda h, m: function(case, h, m, *args, **options), (0, 1), has_aux=function is loss)
    )(case["hidden"], case["matrix"])
    return (value[0] if function is loss else value), grads


@pytest.mark.parametrize("chunk_tokens", [None, 1, 6, 13, 30])
@pytest.mark.parametrize("name", [None, "nll_difference", "forward", "reverse"])
def test_equals_the_plain_formula(case, name, chunk_tokens):
    got, got_grads = gradients(loss, case, name, z_loss=Z_LOSS, chunk_tokens=chunk_tokens)
    expected, expected_grads = gradients(plain, case, name, z_loss=Z_LOSS)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(got_grads, expected_grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_aux_holds_the_unweighted_parts_and_no_gradient(case):
    total, aux = loss(case, case["hidden"], case["matrix"], "forward", z_loss=Z_LOSS)
    np.testing.assert_allclose(total, aux.ce + Z_LOSS * aux.z + BETA * aux.penalty, rtol=1e-6)
    zero = jax.grad(lambda h: sum(jax.tree.leaves(loss(case, h, case["matrix"], "forward")[1])))(case["hidden"])
    assert not zero.any()


def test_value_without_gradient_is_the_same(case):
    with_gradient, _ = gradients(loss, case, "reverse", z_loss=Z_LOSS)
    np.testing.assert_allclose(loss(case, case["hidden"], case["matrix"], "reverse", z_loss=Z_LOSS)[0], with_gradient)


def test_the_cotangent_scales(case):
    tripled = jax.grad(lambda h: 3 * loss(case, h, case["matrix"])[0])(case["hidden"])
    np.testing.assert_allclose(tripled, 3 * jax.grad(lambda h: loss(case, h, case["matrix"])[0])(case["hidden"]))


def test_ignored_targets_have_no_cross_entropy(case):
    gradient = jax.grad(lambda h: loss(case, h, case["matrix"])[0])(case["hidden"])
    assert not gradient[0, 3:6].any()
    assert gradient[0, 2].any()
    assert gradient[0, 6].any()


def test_a_penalty_of_its_own_mask_sees_ignored_targets(case):
    weights = jnp.ones((R, T))
    gradient = jax.grad(lambda h: loss(case, h, case["matrix"], "forward", penalty_weights=weights)[0])(case["hidden"])
    assert gradient[0, 3:6].any()
    gradient = jax.grad(lambda h: loss(case, h, case["matrix"], "nll_difference")[0])(case["hidden"])
    assert not gradient[0, 3:6].any()


def test_a_penalty_without_formula_is_differentiated(case):
    formula = registry.penalties.get("reverse")
    derived = TokenPenalty(formula.value)
    for one, other in zip(gradients(loss, case, derived)[1], gradients(loss, case, "reverse")[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_beta_may_be_traced(case):
    function = jax.jit(lambda beta: loss(case, case["hidden"], case["matrix"], "forward", beta=beta)[0])
    for beta in (0.0, 0.5, 2.0):
        np.testing.assert_allclose(
            function(beta), plain(case, case["hidden"], case["matrix"], "forward", beta=beta), rtol=1e-5
        )


def test_flat_tokens_and_extra_axes_give_the_same(case):
    whole = loss(case, case["hidden"], case["matrix"], "forward")[0]
    flat = {name: value.reshape(R * T, *value.shape[2:]) for name, value in case.items() if "matrix" not in name}
    np.testing.assert_allclose(loss({**case, **flat}, flat["hidden"], case["matrix"], "forward")[0], whole, rtol=1e-6)
    extra = {name: value[None] for name, value in case.items() if "matrix" not in name}
    np.testing.assert_allclose(loss({**case, **extra}, extra["hidden"], case["matrix"], "forward")[0], whole, rtol=1e-6)


def test_bfloat16_states_have_float32_losses(case):
    half = case["hidden"].astype(jnp.bfloat16)
    (value, _), gradient = jax.value_and_grad(lambda h: loss(case, h, case["matrix"]), has_aux=True)(half)
    assert value.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, plain(case, case["hidden"], case["matrix"]), rtol=2e-2)


def test_a_matrix_in_bfloat16_has_a_gradient_in_bfloat16(case):
    matrix = case["matrix"].astype(jnp.bfloat16)
    of_states, of_matrix = jax.grad(lambda h, m: loss(case, h, m)[0], argnums=(0, 1))(case["hidden"], matrix)
    assert (of_states.dtype, of_matrix.dtype) == (jnp.float32, jnp.bfloat16)


def test_logits_of_the_batch_are_never_held():
    tokens, width, vocabulary = 1024, 8, 1000
    hidden, matrix = jnp.ones((1, tokens, width)), jnp.ones((width, vocabulary))
    targets, weights = jnp.zeros((1, tokens), jnp.int32), jnp.ones((1, tokens))

    def temporary_bytes(chunk_tokens):
        def both(h, m):
            return token_loss(
                h,
                m,
                targets,
                weights,
                penalties=(Penalised(registry.penalties.get("forward"), 0.1),),
                reference_hidden=hidden + 1,
                reference_unembedding_DV=matrix,
                chunk_tokens=chunk_tokens,
            )[0]

        compiled = jax.jit(jax.grad(both, (0, 1))).lower(hidden, matrix).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits_bytes = 4 * tokens * vocabulary
    assert temporary_bytes(64) < logits_bytes / 2
    assert temporary_bytes(1024) > logits_bytes


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_token_nll(case, chunk_tokens):
    nll = token_nll(case["hidden"], case["matrix"], case["targets"], chunk_tokens=chunk_tokens)
    logp = np.asarray(jax.nn.log_softmax(case["hidden"] @ case["matrix"]))
    for row, time in np.ndindex(R, T):
        target = int(case["targets"][row, time])
        assert nll[row, time] == pytest.approx(0 if target < 0 else -logp[row, time, target], abs=1e-5)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_token_kl(case, chunk_tokens):
    both = token_kl(
        case["hidden"],
        case["matrix"],
        case["reference_hidden"],
        case["reference_matrix"],
        chunk_tokens=chunk_tokens,
    )
    policy = jax.nn.log_softmax(case["hidden"] @ case["matrix"])
    reference = jax.nn.log_softmax(case["reference_hidden"] @ case["reference_matrix"])
    np.testing.assert_allclose(both[0], (jnp.exp(reference) * (reference - policy)).sum(-1), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(both[1], (jnp.exp(policy) * (policy - reference)).sum(-1), atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=6)
@given(rows=st.integers(1, 4), length=st.integers(1, 9), chunk_tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_chunk_size_gives_every_token_once(rows, length, chunk_tokens, seed):
    random = np.random.default_rng(seed)
    hidden, matrix = random.normal(size=(rows, length, 4)), random.normal(size=(4, 5))
    targets = jnp.asarray(random.integers(-1, 5, (rows, length)))
    hidden, matrix = jnp.asarray(hidden, jnp.float32), jnp.asarray(matrix, jnp.float32)
    whole = token_nll(hidden, matrix, targets)
    np.testing.assert_allclose(token_nll(hidden, matrix, targets, chunk_tokens=chunk_tokens), whole, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("name", [None, "forward"])
def test_a_tied_matrix_gives_the_same_and_is_not_copied_transposed(case, name, chunk_tokens) -> None:
    def tied(hidden, embedding):
        return token_loss(
            hidden, embedding.T, case["targets"], case["ce_weights"], z_loss=Z_LOSS, tied=True,
            penalties=() if name is None else (Penalised(penalty_of(name), BETA, case["penalty_weights"]),),
            reference_hidden=case["reference_hidden"], reference_unembedding_DV=case["reference_matrix"],
            chunk_tokens=chunk_tokens,
        )[0]  # fmt: skip

    def untied(hidden, matrix):
        return loss(case, hidden, matrix, name, z_loss=Z_LOSS, chunk_tokens=chunk_tokens)[0]

    embedding = case["matrix"].T.copy()
    value, (hidden_gradient, embedding_gradient) = jax.value_and_grad(tied, (0, 1))(case["hidden"], embedding)
    expected, (hidden_expected, matrix_expected) = jax.value_and_grad(untied, (0, 1))(case["hidden"], case["matrix"])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(hidden_gradient, hidden_expected, atol=1e-6)
    np.testing.assert_allclose(embedding_gradient, matrix_expected.T, atol=1e-6)
    compiled = jax.jit(jax.grad(tied, (0, 1))).lower(case["hidden"], embedding).compile().as_text()
    assert f"f32[{D},{V}]{{1,0}} copy(" not in compiled


def test_several_penalties_add_with_their_weights(case):
    def both(hidden, matrix):
        terms = [Penalised(penalty_of(name), beta, case["penalty_weights"]) for name, beta in TERMS.items()]
        return token_loss(
            hidden, matrix, case["targets"], case["ce_weights"], penalties=terms, chunk_tokens=7,
            reference_hidden=case["reference_hidden"], reference_unembedding_DV=case["reference_matrix"],
        )  # fmt: skip

    TERMS = {"forward": 0.5, "reverse": 0.25}
    hidden, matrix = case["hidden"], case["matrix"]
    total, aux = both(hidden, matrix)
    alone = {name: loss(case, hidden, matrix, name, chunk_tokens=7)[1].penalty for name in TERMS}
    np.testing.assert_array_equal(aux.penalties, list(alone.values()))
    np.testing.assert_allclose(total, aux.ce + sum(TERMS[name] * alone[name] for name in TERMS), rtol=1e-6)
    found = jax.grad(lambda h: both(h, matrix)[0])(hidden)
    parts = [jax.grad(lambda h, n=n, b=b: loss(case, h, matrix, n, beta=b)[0])(hidden) for n, b in TERMS.items()]
    plain_ce = jax.grad(lambda h: loss(case, h, matrix)[0])(hidden)
    np.testing.assert_allclose(found, sum(parts) - plain_ce, atol=1e-6)


def test_token_weights_multiply_the_cross_entropy_and_leave_its_record_alone(case):
    """By the formula: each token's weight times the probability of its target, without gradient through it."""

    def probability(memory, logp, _reference_logp, targets):
        return memory * jnp.exp(jnp.take_along_axis(logp, targets[:, None], 1)[:, 0])

    def weighted(hidden, scale=2.0):
        return token_loss(
            hidden, case["matrix"], case["targets"], case["ce_weights"],
            token_weights=[(probability, jnp.float32(scale))], chunk_tokens=7,
        )  # fmt: skip

    def textbook(hidden):
        logp = jax.nn.log_softmax(hidden @ case["matrix"])
        picked = jnp.take_along_axis(logp, jnp.maximum(case["targets"], 0)[..., None], -1)[..., 0]
        counted = jnp.where(case["targets"] >= 0, case["ce_weights"], 0)
        return (counted * 2.0 * jax.lax.stop_gradient(jnp.exp(picked)) * -picked).sum()

    total, aux = weighted(case["hidden"])
    np.testing.assert_allclose(total, textbook(case["hidden"]), rtol=1e-5)
    np.testing.assert_array_equal(aux.ce, loss(case, case["hidden"], case["matrix"], chunk_tokens=7)[1].ce)
    gradient = jax.grad(lambda h: weighted(h)[0])(case["hidden"])
    np.testing.assert_allclose(gradient, jax.grad(textbook)(case["hidden"]), atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [None, 6])
@pytest.mark.parametrize("name", [None, "nll_difference", "forward", "reverse"])
def test_capped_logits_have_the_gradient_of_the_plain_formula(case, name, chunk_tokens):
    cap = 1.5

    def bounded(case, hidden, matrix, name, *, z_loss):
        """The textbook on logits that were bounded before: an identity matrix makes logits of logits."""
        logits = cap * jnp.tanh(hidden @ matrix / cap)
        reference = cap * jnp.tanh(case["reference_hidden"] @ case["reference_matrix"] / cap)
        both = {**case, "reference_hidden": reference, "reference_matrix": jnp.eye(V)}
        return plain(both, logits, jnp.eye(V), name, z_loss=z_loss)

    assert jnp.abs(case["hidden"] @ case["matrix"]).max() > 2 * cap
    got, got_grads = gradients(loss, case, name, z_loss=Z_LOSS, chunk_tokens=chunk_tokens, softcap=cap)
    expected, expected_grads = gradients(bounded, case, name, z_loss=Z_LOSS)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(got_grads, expected_grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_capped_nll_and_divergences(case):
    cap = 1.5
    logits, reference = (
        cap * jnp.tanh(case[hidden] @ case[matrix] / cap)
        for hidden, matrix in (("hidden", "matrix"), ("reference_hidden", "reference_matrix"))
    )
    arrays = (case["hidden"], case["matrix"], case["reference_hidden"], case["reference_matrix"])
    nll = token_nll(case["hidden"], case["matrix"], case["targets"], softcap=cap)
    np.testing.assert_allclose(nll, token_nll(logits, jnp.eye(V), case["targets"]), rtol=1e-5, atol=1e-6)
    expected = token_kl(logits, jnp.eye(V), reference, jnp.eye(V))
    for one, other in zip(token_kl(*arrays, softcap=cap), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def operands(jaxpr):
    """Types of what each matrix product takes."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(each.aval.dtype for each in equation.invars)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from operands(inner)


def test_on_accelerators_the_backward_pass_has_no_scatters_and_gradients_of_logits_are_as_narrow_as_the_states(case):
    states = jax.ShapeDtypeStruct((R, T, D), jnp.bfloat16)
    narrow = {**case, "reference_hidden": case["reference_hidden"].astype(jnp.bfloat16)}

    def gradients(hidden):
        return jax.grad(lambda *given: loss(narrow, *given, "forward")[0], (0, 1))(hidden, case["matrix"])

    def traced():
        return jax.make_jaxpr(lambda hidden: gradients(hidden))(states)  # a new function: nothing is remembered

    with lowering_for("tpu"):
        accelerated = traced()
    assert "scatter" not in str(accelerated)
    assert "gather" not in str(accelerated)
    assert "gather" in str(traced()), "the test would not notice"
    # Logits of the policy and of the reference, and the two gradients.
    assert [*operands(accelerated.jaxpr)] == [(jnp.bfloat16, jnp.bfloat16)] * 4
    with lowering_for("tpu"):
        near = jax.jit(gradients)(case["hidden"].astype(jnp.bfloat16))
    exact = jax.grad(lambda *given: plain(case, *given, "forward"), (0, 1))(case["hidden"], case["matrix"])
    for got, right in zip(near, exact, strict=True):
        assert np.abs(np.asarray(got, np.float32) - right).max() <= 0.02 * np.abs(right).max()


def test_chunks_grow_with_the_memory_of_the_accelerator_and_with_nothing_else():
    hidden, matrix = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32), jax.ShapeDtypeStruct((8, 1 << 16), jnp.float32)
    targets, weights = jax.ShapeDtypeStruct((1, 4096), jnp.int32), jax.ShapeDtypeStruct((1, 4096), jnp.float32)

    def lengths():
        jax.clear_caches()
        text = str(jax.make_jaxpr(lambda *given: token_loss(*given)[0])(hidden, matrix, targets, weights))
        return [int(found) for found in re.findall(r"length=(\d+)", text)]

    assert lengths() == [16]
    for memory, chunks in ((16 << 30, 16), (80 << 30, 4)):
        with lowering_for("gpu", memory):
            assert lengths() == [chunks]


def test_inside_a_shard_of_data_chunks_are_as_large_as_outside():
    shapes = ((8, 4096, 8), jnp.float32), ((8, 1 << 16), jnp.float32), ((8, 4096), jnp.int32), ((8, 4096), jnp.float32)
    given = [jax.ShapeDtypeStruct(*each) for each in shapes]
    mesh = jax.sharding.AbstractMesh(
        (8, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def of_shard(*own):
        return jax.lax.psum(token_loss(*own)[0], "data")

    def split(*own):
        specs = (rows, whole, rows, rows)
        return jax.shard_map(of_shard, in_specs=specs, out_specs=whole, axis_names={"data"}, check_vma=False)(*own)

    with jax.sharding.use_abstract_mesh(mesh):
        for function in (lambda *own: token_loss(*own)[0], split):
            assert re.findall(r"length=(\d+)", str(jax.make_jaxpr(function)(*given))) == ["16"]
