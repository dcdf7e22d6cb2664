"""Fused kernels against the plain formula, run step by step on a CPU; their table; programs that have them inside."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.analysis.chip_plan import describe
from holdfast.execution import ExecutionSpec
from holdfast.execution.chips import CHIPS
from holdfast.models import kernels
from holdfast.models.attention import (
    COUNTING,
    attention_taken,
    causal_attention,
    chunked_attention,
    fused_attention,
    kept_scores,
)
from holdfast.models.config import ModelSpec
from holdfast.models.kernels import KERNELS, Case, Rules, choose, emulating, lowering_for
from holdfast.training.compile import abstract_arguments, trace_train
from holdfast.training.initial import abstract_stage
from holdfast.training.run import make_trainer
from training import tiny

LENGTH, HEADS, KV_HEADS, SIZE = 200, 4, 2, 16  # an odd length: both kernels fill rows up
PLATFORM = {"splash": "tpu", "triton": "gpu"}

Arrays = tuple[jax.Array, ...]


def inputs(dtype: Any) -> Arrays:
    """Queries, keys, values of two rows and a gradient."""
    random = np.random.default_rng(0)
    return tuple(
        jnp.asarray(random.normal(size=(2, LENGTH, heads, SIZE)), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )


def packed() -> jax.Array:
    """Two rows of segments: three examples and padding, and one example alone."""
    first = np.minimum(np.arange(LENGTH) * 4 // LENGTH + 1, 4) % 4
    return jnp.asarray(np.stack([first, np.ones(LENGTH)]), jnp.int32)


def exact(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, rules: Rules) -> jax.Array:
    """Every score, a mask, a softmax, in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * rules.factor(SIZE)
    scores = scores if rules.softcap is None else rules.softcap * jnp.tanh(scores / rules.softcap)
    time = jnp.arange(LENGTH)
    mask = (time[:, None] >= time) & (time[:, None] - time < (rules.window or LENGTH))
    mask = mask[None] if ids is None else mask & (ids[:, :, None] == ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, rules: Rules) -> jax.Array:
    """The attention of CPUs."""
    return chunked_attention(q, k, v, ids, rules=rules)


def results(attention: Any, arrays: Arrays, rules: Rules) -> Arrays:
    """The values and the gradients on queries, keys and values."""
    q, k, v, gradient = arrays
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, packed(), rules), q, k, v)
    return (out, *pull(gradient.astype(out.dtype)))


@pytest.mark.parametrize(
    ("name", "dtype", "rules"),
    [
        ("splash", "float32", Rules()),
        ("splash", "bfloat16", Rules(0.7, 2.0, 70)),
        ("triton", "float32", Rules()),
        ("triton", "bfloat16", Rules()),
    ],
)
def test_a_kernel_equals_the_plain_formula_and_a_token_has_no_influence_where_it_is_not_seen(
    name: str, dtype: str, rules: Rules
) -> None:
    arrays = inputs(dtype)
    with emulating(PLATFORM[name]):
        taken = jax.jit(lambda arrays: results(KERNELS[name], arrays, rules)).lower(arrays).compile()
    got = taken(arrays)
    whole = tuple(array.astype(jnp.float32) for array in arrays)
    expected = jax.jit(lambda arrays: results(exact, arrays, rules))(whole)
    usual = jax.jit(lambda arrays: results(plain, arrays, rules))(arrays)
    for own, ours, right in zip(got, usual, expected, strict=True):
        assert own.dtype == jnp.dtype(dtype)
        error, other = (np.asarray(each, np.float32) - np.asarray(right) for each in (own, ours))
        if dtype == "float32":
            assert np.abs(error).max() <= 1e-5
        else:
            assert np.sqrt(np.square(error).mean()) <= 2e-3 * np.abs(right).max()
            # What bfloat16 itself loses is all there is: the plain formula in bfloat16 is no nearer.
            assert np.linalg.norm(error) <= 1.2 * np.linalg.norm(other)
    # Another token in the middle changes what comes after it in its own segment, and nothing else at all.
    at, ids = 90, np.asarray(packed())
    q, k, v, gradient = arrays
    changed = taken((q, k.at[:, at].add(1), v.at[:, at].add(10), gradient))[0]
    moved = np.asarray((changed != got[0]).any(axis=(2, 3)))
    time = np.arange(LENGTH)
    sees = (time >= at) & (time - at < (rules.window or LENGTH)) & (ids == ids[:, at : at + 1])
    assert (moved == sees).all()
    # And the other way: one output alone sends gradients to what it sees.
    alone = jnp.zeros_like(gradient).at[:, at].set(gradient[:, at])
    _, dq, dk, dv = taken((q, k, v, alone))
    seen = (time <= at) & (at - time < (rules.window or LENGTH)) & (ids == ids[:, at : at + 1])
    for found, where in ((dq, (time == at) & np.ones_like(seen)), (dk, seen), (dv, seen)):
        assert ((np.asarray(found, np.float32) != 0).any(axis=(2, 3)) == where).all()


def test_layers_with_windows_of_their_own_have_a_kernel_for_each() -> None:
    arrays = inputs(jnp.float32)[:3]

    def called(window: jax.Array) -> jax.Array:
        return causal_attention(*arrays, packed(), kernels.PLAIN, window, (70, 1000))

    with emulating("tpu"):
        taken = jax.jit(called).lower(jnp.int32(70)).compile()
        assert "splash" in str(jax.make_jaxpr(called)(jnp.int32(70)))
    for window in (70, 1000):
        rules = Rules(window=window)
        np.testing.assert_allclose(taken(jnp.int32(window)), exact(*arrays, packed(), rules), atol=1e-5)


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (Case("cpu", "float32", 2048, 64, packed=True), "plain"),
        (Case("tpu", "float32", 2048, 64, packed=True, bounded=True, windowed=True), "splash"),
        (Case("tpu", "float16", 2048, 64, packed=True), "plain"),
        (Case("tpu", "bfloat16", 100, 64, packed=True), "plain"),
        (Case("gpu", "bfloat16", 2048, 64, packed=False, cudnn=True, windowed=True), "cudnn"),
        (Case("gpu", "bfloat16", 2048, 64, packed=True, cudnn=True), "triton"),
        (Case("gpu", "bfloat16", 2048, 64, packed=True, cudnn=True, windowed=True), "plain"),
        (Case("gpu", "bfloat16", 2048, 256, packed=False, cudnn=True), "plain"),
        (Case("gpu", "bfloat16", 2048, 64, packed=False), "triton"),
        (Case("gpu", "float32", 2048, 64, packed=False, cudnn=True), "plain"),
        (Case("rocm", "bfloat16", 2048, 64, packed=False), "plain"),
    ],
)
def test_the_table(case: Case, taken: str) -> None:
    assert choose(case) == taken


def test_a_choice_is_told_in_words() -> None:
    spec = ModelSpec(2, 128, 2, 2, 64, 128, vocab_size=320, block_size=2048, activation="silu_gated", dtype="bfloat16")
    assert attention_taken(spec, "tpu", packed=True) == "splash kernel in blocks of 512"
    assert attention_taken(spec, "gpu", packed=True, described=True) == "Triton kernel with segments"
    assert (
        attention_taken(spec, "gpu", packed=False, described=True)
        == "cuDNN kernel where JAX finds cuDNN, else Triton kernel"
    )
    assert attention_taken(spec, "cpu", packed=True) == "plain formula in chunks"


@pytest.mark.parametrize(
    ("platform", "packed", "options", "why"),
    [
        ("gpu", True, {"dtype": "float32"}, "float32"),
        ("gpu", True, {"window": 128}, "packed rows with windows"),
        ("gpu", False, {"attention_softcap": 30.0}, "bounded scores"),
        ("gpu", True, {"head_dim": 256, "attention_softcap": 30.0}, "heads of 256 channels, bounded scores"),
        ("gpu", True, {"block_size": 63}, "rows of 63 tokens"),
        ("tpu", True, {"dtype": "float16"}, "float16"),
        ("tpu", True, {"block_size": 127, "window": 16}, "rows of 127 tokens"),
    ],
)
def test_a_plain_formula_on_an_accelerator_says_why(
    platform: str, packed: bool, options: dict[str, Any], why: str
) -> None:
    sizes = {"head_dim": 64, "vocab_size": 320, "block_size": 2048, "dtype": "bfloat16", **options}
    spec = ModelSpec(2, 128, 2, 2, n_ff=128, activation="silu_gated", **sizes)
    said = attention_taken(spec, platform, packed=packed, described=True)
    assert said == f"plain formula in chunks (no kernel takes {why})"


def test_windows_without_packing_have_a_kernel_where_there_is_cudnn() -> None:
    spec = ModelSpec(
        2, 128, 2, 2, 64, 128, vocab_size=320, block_size=2048, activation="silu_gated", dtype="bfloat16", window=128
    )
    assert attention_taken(spec, "gpu", packed=False, described=True) == (
        "cuDNN kernel where JAX finds cuDNN, else plain formula in chunks (no kernel takes windows)"
    )


@pytest.mark.parametrize(("dtype", "options"), [("float32", {}), ("bfloat16", {"attention_softcap": 5.0})])
def test_what_scores_take_without_a_kernel_is_what_the_backward_pass_keeps(dtype: str, options: dict[str, Any]) -> None:
    spec = ModelSpec(3, 64, 4, 2, 16, 128, vocab_size=320, block_size=200, activation="silu_gated", **options)
    spec = dataclasses.replace(spec, dtype=dtype)
    shapes = [jax.ShapeDtypeStruct((2, 200, heads, 16), dtype) for heads in (4, 2, 2)]
    rules = Rules(softcap=spec.attention_softcap)
    backward = jax.eval_shape(lambda *qkv: jax.vjp(lambda *a: chunked_attention(*a, rules=rules), *qkv)[1], *shapes)
    leaves = [leaf for leaf in jax.tree.leaves(backward) if leaf.ndim >= 4 and leaf.shape[-1] > 16]
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    chunk = 2 * 4 * 3 * 4 * 64 * 200
    assert kept_scores(spec, "gpu", 2) == 3 * kept + chunk
    assert kept_scores(dataclasses.replace(spec, remat="dots"), "gpu", 2) == kept + chunk
    assert kept_scores(spec, "tpu", 2) == 0  # splash takes it
    usual = dataclasses.replace(spec, dtype="bfloat16", attention_softcap=None)
    assert kept_scores(usual, "gpu", 2) == 0
    seen = dataclasses.replace(usual, window=64)
    assert 0 < kept_scores(seen, "gpu", 2) < kept_scores(dataclasses.replace(seen, window_layers="wwf"), "gpu", 2)


def test_a_trace_for_a_cpu_has_no_kernel_and_one_that_is_counted_none_either() -> None:
    q, k, v, _ = inputs(jnp.bfloat16)
    assert "pallas" not in str(jax.make_jaxpr(causal_attention)(q, k, v, packed()))
    with lowering_for(COUNTING):
        counted = str(jax.make_jaxpr(lambda *arrays: causal_attention(*arrays))(q, k, v, packed()))
    assert counted == str(jax.make_jaxpr(lambda *arrays: fused_attention(*arrays))(q, k, v, packed()))


PACKED = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 384 * 2, "data": [{"name": "lists", "style": "PACKED"}]},
        {
            "tokens": 8 * 384 * 2,
            "data": [{"name": "arithmetic", "style": "PACKED"}],
            "beta": 0.5,
            "update_reference": True,
        },
    ],
    "architecture": {**tiny.PRETRAIN["architecture"], "block_size": 384, "n_embd": 64, "n_kv_head": 2},
}
HALF = ("architecture.dtype=bfloat16", "architecture.scan_layers=true", "training.per_device_batch_size=4")


def test_a_packed_step_for_cuda_has_the_kernel_and_no_array_of_all_pairs_of_tokens(tmp_path: Path) -> None:
    trainer = tiny.trainer("continual/train/abcd_kl", PACKED, tmp_path, *HALF)
    shapes = abstract_stage(trainer.state, trainer.resolved, 1)
    arguments = abstract_arguments(trainer.resolved, trainer.topology, 4, shapes)

    def lowered(platform: str, target: str) -> str:
        with lowering_for(platform):
            step = jax.jit(lambda state, batch, key: trainer.train_step(state, batch, key, 2))
            return step.trace(*arguments).lower(lowering_platforms=(target,)).as_text()

    fused = lowered("gpu", "cuda")
    assert {"mha_forward", "mha_backward"} <= set(re.findall(r"mha_(?:forward|backward)", fused))
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", fused)) >= 3  # forward twice, with the reference
    square = r"384x384x"
    assert not re.search(square, fused)
    assert re.search(square, lowered(COUNTING, "cuda")), "the test would not notice"


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(("chip", "sizes"), [("tpu-v5e", (2, 4)), ("tpu-v5p", (2, 2, 2)), ("tpu-v6e", (2, 4))])
def test_an_anchored_packed_step_is_compiled_for_tpus_with_kernels_inside(chip: str, sizes: tuple[int, ...]) -> None:
    pytest.importorskip("libtpu", reason="the extra tpu is not installed")
    mesh = ("topology.data=1", "topology.fsdp=4", "topology.tensor=2")
    run = tiny.resolved("continual/train/abcd_kl", PACKED, *HALF, *mesh)
    topology = describe(CHIPS[chip], sizes, run.options.topology)
    state = make_trainer(run, dataclasses.replace(ExecutionSpec(name="plan"), topology=topology)).state
    arguments = abstract_arguments(run, topology, 1, abstract_stage(state, run, 1))
    text = trace_train(run.trainer.train_step, topology.mesh, *arguments).lower().compile().as_text()
    # Forward, backward and the reference's forward, once: on a mesh all micro-batches are in one loop.
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r"384,384\]", text)


@pytest.mark.slow
def test_every_mesh_gives_the_values_of_one_device_with_kernels_inside() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    program = Path(__file__).with_name("kernel_program.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
