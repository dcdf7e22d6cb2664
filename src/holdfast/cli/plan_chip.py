"""The part of `holdfast plan` that is about a chip: what one device holds, sends and computes in a step."""

from collections.abc import Iterator
from typing import Any

GIB = 2**30


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"


def chip_lines(plan: dict[str, Any]) -> Iterator[str]:
    """The plan of a step on a chip, as text."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    yield ""
    yield (
        f"{plan['num_devices']} devices of {plan['chip']} with {plan['memory_of_a_device'] / GIB:.0f} GiB each, mesh "
        f"{mesh}, {plan['micro_batches']} micro-batches of {plan['rows_per_device']} rows a shard"
    )
    yield f"memory and collectives: {plan['source']}; operations: counted in the traced step; times: estimates"
    for step in plan["steps"]:
        yield ""
        yield f"a step of the stages {', '.join(step['stages'])}: {step['kind']}"
        yield from _memory(step, plan["memory_of_a_device"])
        yield from _collectives(step)
        yield f"  operations    {step['flops_per_device']:.3g} a device, matrix products alone"
        yield from _seconds(step)


def _memory(step: dict[str, Any], limit: int) -> Iterator[str]:
    memory = step["memory"]
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if name != "total" and size)
    verdict = "fits" if step["fits"] else "DOES NOT FIT: lower training/per_device_batch_size, raise topology/fsdp"
    total = "more than there is" if memory["total"] > 1e6 * limit else f"{_size(memory['total'])} a device"
    yield f"  memory        {total}{f' ({parts})' if parts else ''}: {verdict}"


def _collectives(step: dict[str, Any]) -> Iterator[str]:
    if step["collectives"] is None:
        return
    if not step["collectives"]:
        yield "  collectives   none"
    for part in step["collectives"]:
        yield (
            f"  {part['kind']:<18} {part['count']:>7,} over {part['group']:>4} devices, {_size(part['num_bytes'])} in "
            f"all, a device sends {_size(part['sent'])}"
        )


def _seconds(step: dict[str, Any]) -> Iterator[str]:
    times = step["seconds"]
    if times is None:
        return
    yield (
        f"  time          estimate from published peaks: {times['at_least']:.3g} s if all overlaps, "
        f"{times['one_after_another']:.3g} s if nothing does (compute {times['compute']:.3g}, memory "
        f"{times['memory']:.3g}, communication {times['communication']:.3g})"
    )
