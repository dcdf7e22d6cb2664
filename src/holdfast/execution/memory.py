"""The host's memory as a place for arrays that a step needs only piece by piece."""

import jax

from holdfast.errors import ConfigError
from holdfast.types import Tree

HOST = "pinned_host"  # what JAX calls memory of the host that devices read by themselves


def in_host_memory(array: jax.Array) -> bool:
    """Whether an array, also one that is traced, lies in the host's memory."""
    return bool(jax.typeof(array).memory_space == jax.memory.Space.Host)


def on_device(tree: Tree) -> Tree:
    """Arrays in the device's memory: those that lie in the host's are brought there, the others stay as they are."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if in_host_memory(leaf) else leaf, tree
    )


def host_place(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same shards, in the memory of the hosts of their devices."""
    return sharding.with_memory_kind(HOST)


def check_host_memory(mesh: jax.sharding.Mesh, path: str) -> None:
    """Refuse an option that asks for the host's memory where devices cannot read it."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return  # devices of which nothing but their number is known
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ConfigError(
            path,
            "host",
            f"device: {device.platform} devices have no memory of the kind {HOST} here, only {', '.join(kinds)}",
            f"set {path} to device",
        )
