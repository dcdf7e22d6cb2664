"""Low-rank adapters (Hu et al. 2021) beside the kernels of a model's `Dense` modules.

Where a projection has `lora_in` (L, in, r), `lora_out` (L, r, out) and `lora_scale` (L,) beside its kernel (without L
where layers are not stacked), `Dense` adds scale · (x · in) · out to its product; a tree of parameters without them is
the base itself. `lora_out` starts at zero, so that fresh adapters change nothing.
"""

import hashlib
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.execution.checksums import bit_sums
from holdfast.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE, is_adapter
from holdfast.types import Json, JsonView, Tree


def adapter_shardings(params: Tree, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NamedSharding]:
    """Where each array of the adapters lies: split along the axis that it shares with its kernel.

    Args:
        params: the base as arrays or shapes with shardings, by slash path.
        shapes: of the adapters, by slash path.
    """
    placed = {}
    for path in shapes:
        module, name = path.rsplit("/", 1)
        sharding = params[f"{module}/kernel"].sharding
        rank = len(params[f"{module}/kernel"].shape)
        *stack, inputs, outputs = (*sharding.spec, *((None,) * rank))[:rank]
        spec = {
            LORA_IN: PartitionSpec(*stack, inputs, None),
            LORA_OUT: PartitionSpec(*stack, None, outputs),
            LORA_SCALE: PartitionSpec(*stack),
        }[name]
        placed[path] = NamedSharding(sharding.mesh, spec)
    return placed


def fresh_adapters(
    params: Tree, shapes: Mapping[str, tuple[int, ...]], scale: float, seed: int
) -> dict[str, jax.Array]:
    """Adapters before the first step, in float32: uniform in ±1/√in, and zero; the same on every mesh.

    Args:
        params, shapes: as for `adapter_shardings`.
        scale: what their product is multiplied with.
    """

    def make(path: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if path.endswith(LORA_SCALE):
            return jnp.full(shape, scale, jnp.float32)
        if path.endswith(LORA_OUT):
            return jnp.zeros(shape, jnp.float32)
        # The key follows from the name, so that one more target leaves the others as they are.
        key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        bound = shape[-2] ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    def make_all(key: jax.Array) -> dict[str, jax.Array]:
        return {path: make(path, shape, key) for path, shape in shapes.items()}

    made: dict[str, jax.Array] = jax.jit(make_all, out_shardings=adapter_shardings(params, shapes))(
        jax.random.key(seed)
    )
    return made


def merged(leaves: JsonView) -> Json:
    """Plain parameters: every kernel with its adapter added, in float32 and the kernel's type; by slash path."""
    plain = {path: leaf for path, leaf in leaves.items() if not is_adapter(path)}
    for path in leaves:
        module, name = path.rsplit("/", 1)
        if name == LORA_OUT:
            kernel = plain[f"{module}/kernel"]
            product = jnp.einsum(
                "...ir,...ro->...io",
                leaves[f"{module}/{LORA_IN}"],
                leaves[path],
                precision=jax.lax.Precision.HIGHEST,
            )
            summed = kernel.astype(jnp.float32) + leaves[f"{module}/{LORA_SCALE}"][..., None, None] * product
            plain[f"{module}/kernel"] = summed.astype(kernel.dtype)
    return plain


def fingerprint(leaves: JsonView) -> str:
    """A name for the exact values of parameters, the same on every mesh and number of processes.

    It is made of the checksums of `execution.checksums`, so that it finds accidents, not forgeries.
    """

    def sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: bit_sums(array) for path, array in arrays.items()}

    mesh = next(iter(leaves.values())).sharding.mesh
    found = jax.device_get(jax.jit(sums, out_shardings=NamedSharding(mesh, PartitionSpec()))(dict(leaves)))
    text = ";".join(
        f"{path} {tuple(leaves[path].shape)} {leaves[path].dtype} {found[path].tolist()}" for path in sorted(found)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
