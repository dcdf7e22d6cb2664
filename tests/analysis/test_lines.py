"""LiNeS: the step between two checkpoints, scaled by depth."""

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.analysis.interpolation import interpolate, line_scales
from holdfast.models.family import Parameter
from holdfast.models.parameters import leaves_of, tree_of


def test_lines_scales_the_step_by_depth_as_the_formula_says() -> None:
    """alpha + (1 - alpha)(l - 1)/(L - 1) in NumPy; what stands outside the layers takes the first one's scale."""
    random = np.random.default_rng(0)
    parameters = {
        "embed/embedding": Parameter((7, 4)),
        "layers/up/kernel": Parameter((5, 4, 6), 5),
        "layers/norm/scale": Parameter((5, 4), 5),
        "final_norm/scale": Parameter((4,)),
    }
    first, second = (
        {path: random.normal(size=each.shape).astype(np.float32) for path, each in parameters.items()} for _ in "ab"
    )
    trees = tree_of(first), tree_of(second)
    share, lines = 0.8, 0.3
    found = leaves_of(jax.jit(interpolate)(jnp.float32(share), *trees, line_scales(parameters, lines)))
    for path, parameter in parameters.items():
        step = second[path].astype(np.float64) - first[path]
        scale = np.full(parameter.shape, lines)
        if parameter.num_layers:
            for layer in range(1, 6):
                scale[layer - 1] = lines + (1 - lines) * (layer - 1) / 4
        np.testing.assert_allclose(found[path], first[path] + share * scale * step, atol=1e-6, err_msg=path)
    plain = jax.jit(interpolate)(jnp.float32(share), *trees)
    same = jax.jit(interpolate)(jnp.float32(share), *trees, line_scales(parameters, 1.0))
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(same), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_layers_that_are_not_stacked_are_known_by_their_numbers() -> None:
    """As in the family `hybrid`: eleven layers, so that the tenth stands behind the ninth and not behind the first."""
    names = {f"layers/layer_{layer}/mlp/up/kernel": Parameter((2, 3)) for layer in range(11)}
    scales = leaves_of(line_scales({"embed/embedding": Parameter((5, 2)), **names}, 0.2))
    assert float(scales["embed/embedding"]) == np.float32(0.2)
    for layer in range(11):
        np.testing.assert_allclose(scales[f"layers/layer_{layer}/mlp/up/kernel"], 0.2 + 0.8 * layer / 10, rtol=1e-6)
