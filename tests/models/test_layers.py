"""Norms, rotary positions and activations against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.models import axes
from holdfast.models.config import ModelSpec
from holdfast.models.kernels import lowering_for
from holdfast.models.layers import activate, gathered, layer_norm, rms_norm, rotary_angles, rotate


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain_layer_norm(x, scale, bias, eps):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * scale + bias


def plain_rms_norm(x, scale, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


@pytest.mark.parametrize(
    ("ours", "plain", "num_vectors"), [(layer_norm, plain_layer_norm, 2), (rms_norm, plain_rms_norm, 1)]
)
def test_norms_equal_the_plain_formula(ours, plain, num_vectors):
    arrays = (3 * normal(2, 5, 16) + 1, *(normal(16, seed=index + 1) for index in range(num_vectors)))
    cotangent = normal(2, 5, 16, seed=9)
    results = []
    for function in (ours, plain):
        out, pull = jax.vjp(lambda *args, f=function: f(*args, 1e-5), *arrays)
        results.append((out, *pull(cotangent)))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", [lambda x: layer_norm(x, x[0], x[0], 1e-5), lambda x: rms_norm(x, x[0], 1e-5)])
def test_norms_keep_the_type_of_their_input(norm):
    assert norm(normal(3, 8).astype(jnp.bfloat16)).dtype == jnp.bfloat16


def spec(**values):
    return ModelSpec(1, 32, 2, 2, 16, 64, vocab_size=10, block_size=8, positions="rotary", **values)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_by_complex_multiplication(interleaved):
    x = normal(2, 8, 2, 16)
    out = np.asarray(rotate(x, rotary_angles(spec(), jnp.arange(8)[None]), interleaved=interleaved))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :8], x[..., 8:])
    turn = np.exp(1j * np.arange(8)[:, None, None] * 10_000.0 ** (-np.arange(8) / 8))
    expected = (np.asarray(first) + 1j * np.asarray(second)) * turn
    got = out[..., 0::2] + 1j * out[..., 1::2] if interleaved else out[..., :8] + 1j * out[..., 8:]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_share_of_the_head_stays_unrotated():
    x = normal(1, 8, 2, 16)
    partly = spec(rope_pct=0.25)
    out = rotate(x, rotary_angles(partly, jnp.arange(8)[None]), interleaved=False)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    assert not np.allclose(out[:, 1:, :, :4], x[:, 1:, :, :4])


def test_products_depend_on_the_distance_alone():
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def product(at_q, at_k):
        angles = [rotary_angles(spec(), jnp.array([[at]])) for at in (at_q, at_k)]
        turned = (rotate(x, by, interleaved=False) for x, by in zip((q, k), angles, strict=True))
        return float(jnp.vdot(*turned))

    assert product(7, 4) == pytest.approx(product(103, 100), abs=1e-4)


@pytest.mark.parametrize("kind", ["gelu", "gelu_exact", "silu_gated", "gelu_gated"])
def test_activations(kind):
    x, gate = normal(4, 8), normal(4, 8, seed=1)
    inner = gate if kind.endswith("_gated") else x
    cubic = 0.5 * inner * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
    exact = 0.5 * inner * (1 + jax.scipy.special.erf(inner / 2**0.5))
    expected = {"gelu": cubic, "gelu_exact": exact, "silu_gated": inner / (1 + jnp.exp(-inner)) * x}
    expected["gelu_gated"] = cubic * x
    got = activate(kind, x, gate if kind.endswith("_gated") else None)
    np.testing.assert_allclose(got, expected[kind], atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "width", "names", "pinned"),
    [
        ("tpu", 512, (axes.MLP, axes.EMBED), True),
        ("tpu", 516, (axes.MLP, axes.EMBED), False),  # the compiler finds the part itself
        ("tpu", 512, (axes.EMBED, axes.MLP), False),
        ("tpu", 512, (axes.ROUTES, axes.EMBED), False),  # experts are split otherwise where they are stored
        ("cpu", 512, (axes.MLP, axes.EMBED), False),
    ],
)
def test_the_gradient_of_a_weight_in_narrow_shards_is_said_to_be_in_shards(platform, width, names, pinned):
    mesh = jax.sharding.AbstractMesh(
        (1, 4, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    with jax.sharding.use_abstract_mesh(mesh), lowering_for(platform):
        gradient = jax.make_jaxpr(jax.grad(lambda weight: gathered(weight, *names).sum()))(jnp.zeros((8, width)))
    placed = [each.params["sharding"].spec for each in gradient.eqns if each.primitive.name == "sharding_constraint"]
    assert len(placed) == 2
    assert "fsdp" not in placed[0]
    assert ("fsdp" in placed[1]) == pinned
