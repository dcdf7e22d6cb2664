"""Fused attention kernels of accelerators, and the table that says which one a platform, a type and a shape get.

None of them holds (T × T) scores or a mask of that size, and each keeps packed examples apart inside the kernel. What
no kernel can do goes to the plain formula of `models/attention.py`, in chunks.

| kernel | platform | what it can do |
|---|---|---|
| splash | TPU | segments, grouped heads as they are, windows, bounded scores |
| cudnn | NVIDIA GPU with cuDNN | half precision, rows of one text, grouped heads as they are, windows |
| triton | NVIDIA GPU | half precision, segments; keys and values are repeated for grouped heads |

Shapes: B rows, T time, H query heads, G key/value heads, K head size.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import backend as jax_backend
from jax.sharding import PartitionSpec

from holdfast.models import axes

PLAIN_NAME = "plain"
MIXED_NAME = "mixed"  # of what attention keeps for its backward pass, beside its inputs: its result, sums of weights
HALF = ("bfloat16", "float16")

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_memory: contextvars.ContextVar[int | None] = contextvars.ContextVar("memory", default=None)
_emulated: contextvars.ContextVar[str | None] = contextvars.ContextVar("emulated", default=None)


@contextlib.contextmanager
def lowering_for(platform: str, memory: int | None = None) -> Iterator[None]:
    """What is traced inside is for devices of this platform, whatever devices this process has.

    Args:
        memory: bytes of one of them, where it has memory of its own and that is known.
    """
    token, memory_token = _target.set(platform), _memory.set(memory)
    try:
        yield
    finally:
        _target.reset(token)
        _memory.reset(memory_token)


def target_memory() -> int | None:
    """Bytes of the accelerator that is traced for; None on a CPU, and where none was named."""
    return _memory.get()


@contextlib.contextmanager
def emulating(platform: str) -> Iterator[None]:
    """What is traced inside has the kernels of this platform, run step by step on the devices that are here."""
    token = _emulated.set(platform)
    try:
        yield
    finally:
        _emulated.reset(token)


def target_platform() -> str:
    """The platform that attention is traced for: this process's own unless another was named."""
    return _emulated.get() or _target.get() or jax.default_backend()


def interpreted() -> bool:
    """Whether kernels are run step by step instead of being compiled."""
    return _emulated.get() is not None


class Rules(NamedTuple):
    """How scores are made and which of them count, beyond causality: the same for all rows and known when compiling.

    Args:
        scale: their factor; None: 1 / √K.
        softcap: their bound c in c · tanh(s / c), if they have one.
        window: how many keys a query sees, its own among them; None: all.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def factor(self, head_dim: int) -> float:
        """The factor of scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = Rules()

# (q_BTHK, k_BTGK, v_BTGK, segment_ids_BT or None, rules) -> (B, T, H, K)
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, Rules], jax.Array]


class Case(NamedTuple):
    """What the choice of a kernel depends on."""

    platform: str  # "cpu", "tpu", "gpu"; "rocm" for a GPU that is not NVIDIA's
    dtype: str
    length: int
    head_dim: int
    packed: bool
    bounded: bool = False  # scores have a softcap
    windowed: bool = False  # some layer sees less than a row
    cudnn: bool = False  # JAX has found it


def choose(case: Case) -> str:
    """The kernel of a case: the first row of the table that takes it.

    >>> choose(Case("tpu", "bfloat16", 2048, 64, packed=True)), choose(Case("cpu", "float32", 2048, 64, packed=True))
    ('splash', 'plain')
    >>> [choose(Case("gpu", "bfloat16", 2048, 64, packed, cudnn=True)) for packed in (True, False)]
    ['triton', 'cudnn']
    """
    half, whole = case.dtype in HALF, not (case.bounded or case.windowed)
    table = (
        ("splash", case.platform == "tpu" and case.dtype in ("bfloat16", "float32") and case.length >= LANES),
        (
            "cudnn",
            case.platform == "gpu"
            and case.cudnn
            and half
            and not (case.packed or case.bounded)
            and case.head_dim % 8 == 0
            and case.head_dim <= 128,
        ),
        # Matrix units take no fewer than 16 channels; more than 128 do not fit a block's shared memory.
        ("triton", case.platform == "gpu" and half and whole and case.length >= 64 and 16 <= case.head_dim <= 128),
    )
    return next((name for name, takes in table if takes), PLAIN_NAME)


def described(case: Case) -> str:
    """The choice of a case in words, for the first line of a run and for a plan; why there is no kernel, if none is."""
    name = choose(case)
    if name == "splash":
        return f"splash kernel in blocks of {splash_block(case.length)[0]}"
    if name == "triton":
        return "Triton kernel with segments" if case.packed else "Triton kernel"
    if name == "cudnn":
        return "cuDNN kernel"
    why = f" (no kernel takes {', '.join(untaken(case))})" if case.platform != "cpu" else ""
    return f"plain formula in chunks{why}"


def untaken(case: Case) -> list[str]:
    """What keeps every kernel from a case, in words: each alone would.

    >>> untaken(Case("tpu", "bfloat16", 100, 64, packed=True)), untaken(Case("gpu", "float32", 512, 256, packed=True))
    (['rows of 100 tokens'], ['float32', 'heads of 256 channels'])
    """
    usual = case._replace(dtype="bfloat16", length=1024, head_dim=64, bounded=False, windowed=False)
    words = {
        "dtype": case.dtype,
        "length": f"rows of {case.length} tokens",
        "head_dim": f"heads of {case.head_dim} channels",
        "bounded": "bounded scores",
        "windowed": "packed rows with windows" if case.packed else "windows",
    }
    if choose(usual) == PLAIN_NAME:
        return [f"the platform {case.platform}"]
    alone = {name: choose(usual._replace(**{name: getattr(case, name)})) for name in words}
    return [words[name] for name, chosen in alone.items() if chosen == PLAIN_NAME]


def case_of(
    platform: str, dtype: str, length: int, head_dim: int, *, packed: bool, rules: Rules, shortest: int | None
) -> Case:
    """The case of some attention.

    Args:
        shortest: the smallest window of all layers; None where all see whole rows.
    """
    windowed = shortest is not None and shortest < length
    if platform == "gpu" and "rocm" in jax_backend.get_backend().platform_version:
        platform = "rocm"
    found = platform == "gpu" and has_cudnn()
    return Case(platform, dtype, length, head_dim, packed, rules.softcap is not None, windowed, found)


@functools.cache
def has_cudnn() -> bool:
    """Whether JAX finds a cuDNN that it can use: it refuses while tracing, before anything is compiled."""
    row = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"), row, row, row
        )
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def can_place() -> bool:
    """Whether a kernel would know on which devices its rows and heads lie: compilers cannot split one by themselves."""
    return target_is_named() or not jax.sharding.get_abstract_mesh().empty or jax.device_count() == 1


def target_is_named() -> bool:
    """Whether what is traced was said to be for certain devices."""
    return _target.get() is not None


def named(mixed: jax.Array) -> jax.Array:
    """The result of attention, under the name by which `architecture/remat` saves it."""
    result: jax.Array = checkpoint_name(mixed, MIXED_NAME)
    return result


# TPU

LANES = 128
SPLASH_BLOCKS = (512, 256, LANES)
FUSED_BACKWARD = 2048  # the fused backward pass holds one gradient of the queries for each block of keys


def splash_block(length: int) -> tuple[int, int]:
    """Queries and keys of a block, the largest that wastes at most an eighth, and the length that rows are filled to.

    >>> [splash_block(length) for length in (128, 200, 640, 1000, 8192)]
    [(128, 128), (128, 256), (128, 640), (512, 1024), (512, 8192)]
    """
    for block in SPLASH_BLOCKS:
        filled = -(-length // block) * block
        if 8 * (filled - length) <= length:
            return block, filled
    return LANES, -(-length // LANES) * LANES


def splash(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array | None, rules: Rules
) -> jax.Array:
    """Splash attention: blocks that no query sees are skipped, key heads are shared as they are."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q_BTHK.shape[1:3]
    block, filled = splash_block(length)
    shape = (filled, filled)
    # Rows are filled up at their ends, which causality hides from all that was there.
    mask = masks.CausalMask(shape) if rules.window is None else masks.LocalMask(shape, (rules.window - 1, 0), 0)
    fused = filled <= FUSED_BACKWARD
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=None if fused else block,
            block_kv_dq=None if fused else block,
            use_fused_bwd_kernel=fused,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=MIXED_NAME,
        attn_logits_soft_cap=rules.softcap,
        interpret=interpreted(),
    )
    q = _filled(q_BTHK * rules.factor(q_BTHK.shape[-1]), filled).swapaxes(1, 2)
    k, v = (_filled(x, filled).swapaxes(1, 2) for x in (k_BTGK, v_BTGK))
    if segment_ids_BT is None:
        mixed = jax.vmap(kernel)(q, k, v)
    else:
        ids = _filled(segment_ids_BT, filled)
        mixed = jax.vmap(lambda q, k, v, own: kernel(q, k, v, kernels.SegmentIds(own, own)))(q, k, v, ids)
    out: jax.Array = mixed.swapaxes(1, 2)[:, :length].astype(v_BTGK.dtype)
    return out


def _filled(x: jax.Array, length: int) -> jax.Array:
    missing = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


# GPU


def triton(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array | None, rules: Rules
) -> jax.Array:
    """JAX's Pallas kernel for GPUs; it knows neither grouped heads nor windows nor bounded scores."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    assert rules.window is None and rules.softcap is None, "the table gives this kernel neither"  # noqa: PT018
    length, heads, head_dim = q_BTHK.shape[1:]
    block = 128 if head_dim <= 64 else 64
    filled = -(-length // block) * block
    shared = heads // k_BTGK.shape[2]
    k, v = (jnp.repeat(x, shared, axis=2) if shared > 1 else x for x in (k_BTGK, v_BTGK))
    ids = None if segment_ids_BT is None else _filled(segment_ids_BT, filled)
    mixed: jax.Array = mha(
        *(_filled(x, filled) for x in (q_BTHK, k, v)),
        ids,
        sm_scale=rules.factor(head_dim),
        causal=True,
        block_sizes=BlockSizes(block, block, 32, 32, 32, 32),
        interpret=interpreted(),
    )
    return named(mixed)[:, :length]


def cudnn(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array | None, rules: Rules
) -> jax.Array:
    """cuDNN's kernel through JAX; with segments it would need a mask of (T × T)."""
    assert segment_ids_BT is None, "the table gives this kernel rows of one text alone"
    mixed = jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        is_causal=True,
        scale=rules.scale,
        local_window_size=None if rules.window is None else (rules.window - 1, 0),
        implementation="cudnn",
    )
    return named(mixed)


KERNELS: dict[str, Kernel] = {"splash": splash, "triton": triton, "cudnn": cudnn}


# On a mesh


def on_mesh(
    name: str,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None,
    rules: Rules,
) -> jax.Array:
    """A kernel on each device's own rows and heads; no device needs another's."""
    kernel = KERNELS[name]
    sizes = jax.sharding.get_abstract_mesh().shape
    if math.prod(sizes.values()) == 1:
        return kernel(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT, rules)
    rows: tuple[str, ...] | None = tuple(axis for axis in axes.row_axes() if axis in sizes)
    if q_BTHK.shape[0] % math.prod(sizes[axis] for axis in rows or ()):
        rows = None  # too few to divide: every device takes all
    split = "tensor" if "tensor" in sizes and k_BTGK.shape[2] % sizes["tensor"] == 0 else None
    heads, ids = PartitionSpec(rows, None, split, None), PartitionSpec(rows, None)
    out: jax.Array = jax.shard_map(
        lambda q, k, v, own: kernel(q, k, v, own, rules),
        in_specs=(heads, heads, heads, ids),
        out_specs=heads,
        axis_names=sizes.keys() - set(jax.sharding.get_abstract_mesh().manual_axes),
        check_vma=False,
    )(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)
    return out


def by_window(
    name: str,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BT: jax.Array | None,
    rules: Rules,
    window: jax.Array,
    sizes: tuple[int, ...],
) -> jax.Array:
    """A kernel whose window is that of the layer at hand: one program for each size that a layer may have."""
    length = q_BTHK.shape[1]
    different = sorted({min(size, length) for size in sizes})
    each = [rules._replace(window=None if size >= length else size) for size in different]

    def branch(own: Rules) -> Callable[..., jax.Array]:
        return lambda q, k, v, ids: on_mesh(name, q, k, v, ids, own)

    if len(each) == 1:
        return branch(each[0])(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)
    place = (jnp.minimum(window, length) == jnp.asarray(different)).argmax()
    out: jax.Array = jax.lax.switch(place, [branch(own) for own in each], q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)
    return out
