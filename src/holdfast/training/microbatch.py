"""How many rows fit on a device at once, asked of the compiler instead of tried until something is killed."""

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import psutil

from holdfast.errors import ConfigError
from holdfast.execution import processes

# Share of a device's memory that a step may plan to use; the rest is for the host's own work and fragmentation.
USABLE = 0.8
UNKNOWN = 1 << 62  # bytes of a step that the compiler refused without saying how many it needs
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_batch(batch_size: int, per_device: int, num_row_shards: int) -> None:
    """Refuse a batch that the mesh or the micro-batch does not divide."""
    if batch_size % num_row_shards:
        raise ConfigError(
            "training/batch_size",
            batch_size,
            f"a multiple of {num_row_shards}, the data x fsdp shards of the mesh",
            f"set it to {-(-batch_size // num_row_shards) * num_row_shards}, or change topology/data or topology/fsdp",
        )
    if per_device == 0:
        raise ConfigError("training/per_device_batch_size", 0, "-1 or at least 1", "-1 finds the largest that fits")
    if per_device > 0 and batch_size % per_device:
        raise ConfigError(
            "training/per_device_batch_size",
            per_device,
            f"a divisor of training/batch_size = {batch_size}",
            "choose one of " + ", ".join(str(d) for d in divisors(batch_size // num_row_shards)),
        )


def rows_at_once(batch_size: int, per_device: int, num_row_shards: int) -> int:
    """Rows of a shard's micro-batch: those asked for, or fewer where a shard has fewer or they do not divide its rows.

    So a run goes on when it comes back on another number of devices.

    >>> rows_at_once(32, 8, 1), rows_at_once(32, 8, 8), rows_at_once(24, 4, 4)
    (8, 4, 3)
    """
    return next(size for size in divisors(batch_size // num_row_shards) if size <= per_device)


def divisors(number: int) -> list[int]:
    """All divisors, the largest first.

    >>> divisors(12)
    [12, 6, 4, 3, 2, 1]
    """
    return [size for size in range(number, 0, -1) if number % size == 0]


def device_limit(mesh: jax.sharding.Mesh) -> int:
    """Bytes that one device of the mesh may use, the same number in all processes."""
    hosts = processes.gather([platform.node(), _local_limit(mesh)])
    names = [name for name, _ in hosts]
    # Devices with memory of their own share it with nobody; a machine's is shared by the processes on it.
    limits = (limit if own else limit // names.count(name) for name, (own, limit) in hosts)
    return int(min(limits))


def _local_limit(mesh: jax.sharding.Mesh) -> tuple[bool, int]:
    """Whether the devices of this process have memory of their own, and how much each may use."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return True, int(stats["bytes_limit"])
    limit = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit():
            limit = min(limit, int(text))
    return False, int(limit) // len(mesh.local_devices)


def needed_bytes(compiled: Any) -> int:
    """Bytes of one device that a compiled step needs.

    The analysis' own peak leaves temporaries out, so its parts are summed.
    """
    usage = compiled.memory_analysis()
    if usage is None:
        return 0
    total = (
        usage.argument_size_in_bytes + usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes
    )
    return int(total)


def refused_bytes(message: str) -> int | None:
    """Bytes that a step needs which the compiler refused, from its message; None if it refused for another reason.

    >>> refused_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.")
    22011707392
    >>> refused_bytes("RESOURCE_EXHAUSTED: memory required for HLO temporaries (20.5G) exceeds available HBM (15.75G)")
    22011707392
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    used = re.search(r"(?:[Uu]sed |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", message)
    return int(float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)) if used else UNKNOWN


def largest_fitting(rows_per_shard: int, limit: int, needs: Callable[[int], int]) -> tuple[int, int]:
    """The largest micro-batch per shard whose step fits, and what it needs.

    Memory grows with the rows nearly linearly, so each compilation predicts which size to look at next.

    >>> largest_fitting(512, 1000, lambda rows: 100 + 10 * rows)
    (64, 740)
    """
    sizes = divisors(rows_per_shard)
    position = 0
    while True:
        size = sizes[position]
        used = needs(size)
        if used <= limit * USABLE:
            return size, used
        if position == len(sizes) - 1:
            raise ConfigError(
                "training/per_device_batch_size",
                -1,
                f"a model whose step fits {limit / 2**30:.1f} GiB a device; with one row it needs "
                f"{used / 2**30:.1f} GiB",
                "make the model or architecture/block_size smaller, set architecture/remat, or raise topology/fsdp",
            )
        fits = [p for p in range(position + 1, len(sizes)) if sizes[p] / size * used <= limit * USABLE]
        position = fits[0] if fits else len(sizes) - 1 if position == len(sizes) - 2 else position + 1
