"""What one step does: its operations from its trace, its collectives from the compiled program's text.

A program is a list of computations. One that a loop calls runs as often as the loop does, so each collective is
counted with the product of the loops around it. Compilers split a collective into a start and an end, and copy it
into the pieces of a fusion: what has one channel is one collective.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.models.attention import MASKED_PRODUCT

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "bf16": 2, "f16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
_LIMIT = re.compile(r"s32\[\][^=]* constant\((\d+)\)")


def matmul_flops(jaxpr: Any, length: int) -> int:
    """Operations of all matrix products of a traced function, on all devices together; loops count in full.

    Causal attention counts the keys that its queries see, (length + 1) / 2 of `length`, as
    `ModelSpec.flops_per_token` does: a share of the peak that masked scores helped to reach would flatter.

    Args:
        jaxpr: as `jax.make_jaxpr` gives it.
        length: tokens of a row.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
            continue
        inner = [matmul_flops(part, length) for value in equation.params.values() for part in _programs(value)]
        if equation.params.get("name") == MASKED_PRODUCT:
            total += sum(inner) * (length + 1) // (2 * length)
        elif equation.primitive.name == "cond":
            total += max(inner)
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
    """

    kind: str
    count: int
    num_bytes: int
    group: int
    span: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends, in a ring."""
        share = (self.group - 1) / self.group
        return self.num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def collectives(text: str, num_devices: int) -> list[Collectives]:
    """The collectives of one run of a compiled program, by kind and size of group.

    Args:
        text: `compiled.as_text()`.
        num_devices: of the program; the size of a group that is not written out.
    """
    bodies = _computations(text)
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for name, times in _times(bodies).items():
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
            key = (kind, channel[1] if channel else line.split("=")[0].strip())
            seen = found.get(key, (0, 0, group))
            found[key] = (max(seen[0], times), max(seen[1], size), group)
    totals: dict[tuple[str, int], tuple[int, int]] = {}
    for (kind, _), (times, size, group) in found.items():
        if group > 1:
            count, total = totals.get((kind, group), (0, 0))
            totals[kind, group] = (count + times, total + times * size)
    return [Collectives(kind, *totals[kind, group], group, num_devices) for kind, group in sorted(totals)]


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
    """How often a loop runs: as the compiler noted it, or the constant that its counter is compared with."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known is not None:
        return int(known[1])
    condition = re.search(r"condition=%([\w.\-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    limits = [int(limit[1]) for limit in map(_LIMIT.search, lines) if limit]
    return limits[0] if len(limits) == 1 else 1


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
