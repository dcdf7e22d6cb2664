"""What one step does: its operations from its trace, its collectives from the compiled program's text.

A program is a list of computations. One that a loop calls runs as often as the loop does, so each collective is
counted with the product of the loops around it. Compilers split a collective into a start and an end, and copy it
into the pieces of a fusion, some of them inside the loop of a product that it runs beside: what has one channel in
several computations is one collective, and runs as often as the piece that runs least often. Two with one channel in
the same computation are two: JAX gives all sums of a `shard_map` the same.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.models.attention import MASKED_PRODUCT

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "bf16": 2, "f16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
_LIMIT = _CONSTANT = re.compile(r"[su]32\[\][^=]* constant\((\d+)\)")


def matmul_flops(jaxpr: Any, length: int, seen: float | None = None) -> int:
    """Operations of all matrix products of a traced function, on all devices together; loops count in full.

    Causal attention counts the keys that its queries see of `length`, as `ModelSpec.flops_per_token` does: a share of
    the peak that masked scores helped to reach would flatter.

    Args:
        jaxpr: as `jax.make_jaxpr` gives it.
        length: tokens of a row.
        seen: keys that a query sees, in the mean over queries and layers; (length + 1) / 2 unless given.
    """
    total, keys = 0, (length + 1) / 2 if seen is None else seen
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
            continue
        inner = [matmul_flops(part, length, seen) for value in equation.params.values() for part in _programs(value)]
        if equation.params.get("name") == MASKED_PRODUCT:
            total += round(sum(inner) * keys / length)
        elif equation.primitive.name == "cond":
            total += max(inner)
        elif equation.primitive.name == "shard_map":
            # What is inside runs once for each shard.
            sizes = equation.params["mesh"].shape
            total += sum(inner) * math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])
        else:
            total += sum(inner) * equation.params.get("length", 1) if inner else 0
    return total


def _programs(value: Any) -> list[Any]:
    from jax.extend import core

    parts = value if isinstance(value, tuple | list) else (value,)
    closed = [part.jaxpr if isinstance(part, core.ClosedJaxpr) else part for part in parts]
    return [part for part in closed if isinstance(part, core.Jaxpr)]


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind over groups of one size.

    Args:
        count: how often a step runs one.
        num_bytes: of the whole arrays that are gathered, reduced or moved, all together.
        group: devices that take part in each.
        span: devices from the first to the last of a group: what they share decides how fast it is.
        axes: of the mesh that the groups run along, joined by +; empty where that is not known.
    """

    kind: str
    count: int
    num_bytes: int
    group: int
    span: int
    axes: str = ""

    @property
    def sent(self) -> float:
        """Bytes that one device sends, in a ring."""
        share = (self.group - 1) / self.group
        return self.num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def collectives(text: str, num_devices: int, mesh: Mapping[str, int] | None = None) -> list[Collectives]:
    """The collectives of one run of a compiled program, by kind, size of group and axes of the mesh.

    Args:
        text: `compiled.as_text()`.
        num_devices: of the program; the size of a group that is not written out.
        mesh: sizes of its axes in their order.
    """
    bodies = _computations(text)
    found: dict[tuple[str, str, int], tuple[int, int, int, str]] = {}
    for name, times in _times(bodies).items():
        here: Counter[tuple[str, str]] = Counter()
        for line in bodies[name]:
            match = _COLLECTIVE.search(line)
            if match is None:
                continue
            kind = match[2]
            group = _group_size(line, num_devices)
            size = _collective_bytes(match[1], kind, group, started=match[3] is not None)
            # A TPU writes a reduce-scatter as an all-reduce inside a fusion of that name.
            kind = "reduce-scatter" if kind == "all-reduce" and "reduce-scatter" in name else kind
            channel = re.search(r"channel_id=(\d+)", line)
            named = (kind, channel[1] if channel else line.split("=")[0].strip())
            key = (*named, here[named])
            here[named] += 1
            seen = found.get(key, (0, 0, group, ""))
            found[key] = (min(seen[0] or times, times), max(seen[1], size), group, _along(line, mesh or {}))
    totals: dict[tuple[str, int, str], tuple[int, int]] = {}
    for (kind, _, _), (times, size, group, along) in found.items():
        if group > 1:
            count, total = totals.get((kind, group, along), (0, 0))
            totals[kind, group, along] = (count + times, total + times * size)
    return [
        Collectives(kind, *totals[kind, group, along], group, num_devices, along)
        for kind, group, along in sorted(totals)
    ]


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            name = "ENTRY" if line.startswith("ENTRY") else header[1]
            lines = bodies.setdefault(name, [])
        elif line.startswith("  "):
            lines.append(line)
    return bodies


def _times(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs; one that is called from several places, as often as all of them call it."""
    times = {"ENTRY": 1}
    waiting = ["ENTRY"]
    callers: dict[str, int] = {}
    for lines in bodies.values():
        for name, _ in _calls(lines, bodies):
            callers[name] = callers.get(name, 0) + 1
    while waiting:
        caller = waiting.pop()
        for name, factor in _calls(bodies[caller], bodies):
            times[name] = times.get(name, 0) + times[caller] * factor
            callers[name] -= 1
            if callers[name] == 0:
                waiting.append(name)
    return times


def _calls(lines: list[str], bodies: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    for line in lines:
        called = [name.strip().lstrip("%") for match in _CALLED.finditer(line) for name in match[1].split(",")]
        called = [name for name in called if name in bodies]
        factor = _trip_count(line, bodies) if " while(" in line else 1
        yield from ((name, factor) for name in called)


def _trip_count(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop runs: as the compiler noted it, or the constant that its counter is compared with, by steps."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known is not None:
        return int(known[1])
    condition, body = (
        bodies.get(name[1], []) if name else []
        for name in (re.search(rf"{part}=%([\w.\-]+)", line) for part in ("condition", "body"))
    )
    limits = [int(limit[1]) for limit in map(_LIMIT.search, condition) if limit]
    return -(-limits[0] // _step(condition, body)) if len(limits) == 1 else 1


def _step(condition: list[str], body: list[str]) -> int:
    """By how much a loop's counter grows; loops that exchange parts of a product while they compute are unrolled."""
    texts = {line.split("=")[0].replace("ROOT", "").strip().lstrip("%"): line for line in body}
    index = next((found[1] for found in (re.search(r"\), index=(\d+)", line) for line in condition) if found), None)
    root = next((line for line in body if line.lstrip().startswith("ROOT")), "")
    results = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2].partition(")")[0])
    if index is None or int(index) >= len(results):
        return 1
    added = re.search(r" add\(([^)]*)\)", texts.get(results[int(index)], ""))
    terms = re.findall(r"%([\w.\-]+)", added[1]) if added else []
    constants = [_CONSTANT.search(texts.get(term, "")) for term in terms]
    return next((int(found[1]) for found in constants if found and int(found[1])), 1)


def _collective_bytes(shape: str, kind: str, group: int, *, started: bool) -> int:
    """Bytes of the whole array: what a gather gives, what a reduction takes."""
    sizes = [_array_bytes(match) for match in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", shape))]
    if not sizes:
        return 0
    if started and kind in ("all-gather", "collective-permute"):
        return max(sizes)  # the start of these holds the operand beside the result
    return sum(sizes) * (group if kind == "reduce-scatter" else 1)


def _array_bytes(match: re.Match[str]) -> int:
    kind, dimensions = match[1], match[2]
    digits = re.sub(r"\D", "", kind)
    width = _WIDTHS.get(kind, int(digits) // 8 if digits else 0)
    return width * math.prod(int(size) for size in dimensions.split(",") if size)


def _along(line: str, mesh: Mapping[str, int]) -> str:
    """The axes of the mesh along which the devices of a group differ, from the first group."""
    if not mesh:
        return ""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if listed is not None:
        members = [int(device) for device in listed[1].split(",")]
    elif iota is not None:
        sizes = [int(size) for size in iota[3].split(",")]
        order = [int(axis) for axis in iota[4].split(",")] if iota[4] else range(len(sizes))
        members = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, int(iota[2]))[0].tolist()
    else:
        return ""
    places = np.array(np.unravel_index(members, tuple(mesh.values())))
    return "+".join(axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)


def _group_size(line: str, num_devices: int) -> int:
    """Devices of one group, in any of the three ways in which groups are written."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed is not None:
        return listed[1].count(",") + 1
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    if iota is not None:
        return int(iota[2])
    named = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\](?:, device_ids=\S+)?\s*\{([^}]*)\}", line)
    if named is not None:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    return num_devices
