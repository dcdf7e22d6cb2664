"""What is read from a compiled program: every collective as often as its loops run it, once for each channel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from holdfast.analysis.hlo import Collectives, collectives, matmul_flops
from holdfast.models.attention import fused_attention

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[8,64]) -> bf16[1,64] {
  %input = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[8,64]{1,0} all-reduce(%input), channel_id=9, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[1,64]{1,0} dynamic-slice(%all-reduce.9)
}

%piece.1 (p: bf16[1,64]) -> bf16[8,64] {
  ROOT %all-gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8]
}

%piece.2 (p: bf16[1,64]) -> bf16[8,64] {
  ROOT %all-gather.2 = bf16[8,64]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8]
}

%inner_condition (c: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %counter = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%counter, %limit), direction=LT
}

%inner_body (b: (s32[])) -> (s32[]) {
  %fusion.1 = bf16[8,64]{1,0} fusion(%w), kind=kCustom, calls=%piece.1
  %fusion.2 = bf16[8,64]{1,0} fusion(%w), kind=kCustom, calls=%piece.2
  %fusion.3 = bf16[1,64]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[]) tuple(%one)
}

%outer_body (b: (s32[])) -> (s32[]) {
  %while.2 = (s32[], bf16[8,64]{1,0}) while(%t), condition=%inner_condition, body=%inner_body
  ROOT %next.2 = (s32[]) tuple(%one)
}

%condition.1 (c: (s32[])) -> pred[] {
  ROOT %lt.2 = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (p0: f32[16]) -> f32[16] {
  %while.1 = (s32[]) while(%t), condition=%condition.1, body=%outer_body, config={"known_trip_count":{"n":"3"}}
  %start = (f32[2,8], f32[16,8]) all-gather-start(%p0), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}
  %done = f32[16,8]{1,0} all-gather-done(%start)
  %alone = f32[16]{0} all-reduce(%p0), channel_id=21, replica_groups={{0},{1}}, to_apply=%add
  ROOT %sum = (f32[16]{0}, f32[4]{0}) all-reduce(%p0, %p1), channel_id=22, to_apply=%add
}
"""


def test_collectives_count_with_their_loops_and_once_for_each_channel() -> None:
    whole = 8 * 64 * 2
    assert collectives(PROGRAM, num_devices=8) == [
        Collectives("all-gather", 1, 16 * 8 * 4, group=2, span=8),
        Collectives("all-gather", 15, 15 * whole, group=8, span=8),
        Collectives("all-reduce", 1, (16 + 4) * 4, group=8, span=8),
        Collectives("reduce-scatter", 15, 15 * whole, group=8, span=8),
    ]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 75.0), ("reduce-scatter", 75.0), ("all-reduce", 150.0), ("collective-permute", 100)],
)
def test_what_one_device_sends_in_a_ring(kind: str, sent: float) -> None:
    assert Collectives(kind, 1, 100, group=4, span=4).sent == sent


def test_operations_count_loops_in_full_and_the_longer_branch() -> None:
    matrix = jnp.zeros((4, 4))

    def many(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda c, _: (c @ matrix, None), x, None, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda c: c @ matrix @ matrix, lambda c: c @ matrix, x)

    assert matmul_flops(jax.make_jaxpr(many)(jnp.zeros((3, 4))).jaxpr, length=3) == 2 * 3 * 4 * 4 * (5 + 2)


def test_recomputed_layers_are_counted() -> None:
    def loss(x: jax.Array, *, remat: bool) -> jax.Array:
        def layer(x: jax.Array) -> jax.Array:
            return jnp.sin(x @ jnp.ones((4, 4)))

        return (jax.checkpoint(layer) if remat else layer)(x).sum()

    counts = {}
    for remat in (False, True):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, remat=remat: loss(x, remat=remat)))(jnp.ones((3, 4)))
        counts[remat] = matmul_flops(jaxpr.jaxpr, length=3)
    assert counts[False] == 2 * (2 * 3 * 4 * 4)
    assert counts[True] == 3 * (2 * 3 * 4 * 4)


@pytest.mark.parametrize("segments", [False, True])
def test_causal_attention_counts_the_keys_that_are_seen(segments: bool) -> None:
    rows, length, heads, width = 2, 8, 4, 16
    seen = length * (length + 1) // 2  # of length * length pairs of a query and a key
    q, kv = jnp.zeros((rows, length, heads, width)), jnp.zeros((rows, length, 2, width))
    ids = jnp.zeros((rows, length), jnp.int32) if segments else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fused_attention(q, k, v, ids).sum()

    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda q: fused_attention(q, k, v, ids))
        return jax.lax.scan(lambda q, _: (layer(q), None), q, None, length=3)[0].sum()

    def counted(function: Callable[..., Any]) -> int:
        return matmul_flops(jax.make_jaxpr(function)(q, kv, kv).jaxpr, length)

    # Scores and the mix of values: one product and one sum for each pair and channel, each.
    forward = 2 * 2 * rows * heads * width * seen
    assert counted(attend) == forward
    assert counted(jax.grad(attend, argnums=(0, 1, 2))) == 3 * forward
    # Forward, and in the backward pass the scores once more.
    assert counted(jax.grad(layers, argnums=(0, 1, 2))) == 3 * (3 * forward + forward // 2)


def test_collectives_are_told_apart_by_the_axes_of_the_mesh() -> None:
    groups = {
        "replica_groups={{0,2},{1,3},{4,6},{5,7}}": "fsdp",
        "replica_groups=[2,4]<=[4,2]T(1,0)": "data+fsdp",
        "replica_groups=[4,2]<=[2,4]T(1,0)": "data",
        "replica_groups=[1,8]<=[8]": "data+fsdp+tensor",
        "source_target_pairs={{0,1},{1,0}}": "tensor",
    }
    body = "\n".join(
        f"  %sum.{index} = f32[{index + 1}]{{0}} all-reduce(%p), channel_id={index}, {each}, to_apply=%add"
        for index, each in enumerate(groups)
    )
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    found = collectives(text, 8, {"data": 2, "fsdp": 2, "tensor": 2})
    assert {part.axes: part.num_bytes for part in found} == {
        along: 4 * (index + 1) for index, along in enumerate(groups.values())
    }
    assert {part.axes for part in collectives(text, 8)} == {""}


WINDOWED = """HloModule jit_step

%cond (p: (f32[8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(4)
  %p = (f32[8]{0}, u32[]) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %p = (f32[8]{0}, u32[]) parameter(0)
  %part = f32[8]{0} get-tuple-element(%p), index=0
  %counter = u32[] get-tuple-element(%p), index=1
  %two..sunk = u32[]{:T(128)} constant(2)
  %first = f32[8]{0} collective-permute(%part), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %second = f32[8]{0} collective-permute(%first), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %next = u32[]{:T(128)} add(%counter, %two..sunk)
  ROOT %tuple.1 = (f32[8]{0}, u32[]) tuple(%second, %next)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (f32[8]{0}, u32[]) while(%start), condition=%cond, body=%body
}
"""


def test_a_loop_whose_counter_grows_by_two_runs_half_as_often() -> None:
    assert collectives(WINDOWED, 2) == [Collectives("collective-permute", 4, 4 * 32, group=2, span=2)]


SPREAD = """HloModule jit_step

%begun (p: f32[4]) -> f32[8] {
  ROOT %all-gather.1 = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1}}
}

%further (p: f32[4]) -> f32[8] {
  ROOT %all-gather.2 = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1}}
}

%product (p: (f32[8])) -> (f32[8]) {
  ROOT %part = f32[8]{0} fusion(%p), kind=kCustom, calls=%further
}

%layer (p: (f32[8])) -> (f32[8]) {
  %start = f32[8]{0} fusion(%p), kind=kCustom, calls=%begun
  ROOT %inner = (f32[8]) while(%start), condition=%cond, body=%product, config={"known_trip_count":{"n":"16"}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (f32[8]{0}, u32[]) while(%p), condition=%cond, body=%layer, config={"known_trip_count":{"n":"2"}}
}
"""


def test_a_collective_that_goes_on_in_the_parts_of_a_product_runs_as_often_as_it_is_begun() -> None:
    assert collectives(SPREAD, 2) == [Collectives("all-gather", 2, 2 * 32, group=2, span=2)]


def test_two_sums_with_one_channel_in_one_computation_are_two() -> None:
    sums = "".join(
        f"  %sum.{size} = f32[{size}]{{0}} all-reduce(%p), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add\n"
        for size in (8, 16)
    )
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{sums}}}\n"
    assert collectives(text, 2) == [Collectives("all-reduce", 2, 4 * (8 + 16), group=2, span=2)]
