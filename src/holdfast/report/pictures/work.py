"""Throughput, and what the time went into."""

import itertools
from collections.abc import Sequence

from holdfast.report.drawing.chart import Chart, Line, Panel, thin
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run
from holdfast.tracking.console import count, duration
from holdfast.types import Json

KINDS = ("compute", "data", "compile", "evaluation", "checkpoint")
PIECES = 60


def seconds_by_kind(records: Sequence[Json]) -> dict[str, float]:
    """Seconds spent on each kind of work over some train records.

    >>> seconds_by_kind([{"seconds": {"compute": 1.0}}, {"seconds": {"compute": 2.0, "data": 0.5}}])
    {'compute': 3.0, 'data': 0.5}
    """
    total: dict[str, float] = {}
    for record in records:
        for kind, seconds in (record.get("seconds") or {}).items():
            total[kind] = total.get(kind, 0.0) + (seconds or 0.0)
    return {kind: total[kind] for kind in sorted(total, key=lambda kind: (kind not in KINDS, _order(kind), kind))}


def _order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def throughput(records: Sequence[Json]) -> float | None:
    """Tokens a second of training itself: compute and waiting for data, over all records but the first."""
    if len(records) < 2:
        return None
    spent = seconds_by_kind(records[1:])
    seconds = spent.get("compute", 0.0) + spent.get("data", 0.0)
    tokens = records[-1]["tokens"] - records[0]["tokens"]
    return tokens / seconds if seconds > 0 else None


def peak_memory(run: Run) -> int | None:
    """The most memory that a record tells of, in bytes."""
    found = [record["memory"] for record in run.records if record.get("memory")]
    sizes = [sum(each.values()) if isinstance(each, dict) else each for each in found]
    return int(max(sizes)) if sizes else None


def picture(run: Run) -> Chart | None:
    """Tokens a second, and the share of each kind of work, over the run."""
    records = [record for record in run.kind("train") if record.get("seconds")]
    if len(records) < 2:
        return None
    x, rates = [], []
    for before, record in itertools.pairwise(records):
        seconds = (record["seconds"].get("compute") or 0.0) + (record["seconds"].get("data") or 0.0)
        if seconds > 0:
            x.append(float(record["tokens"]))
            rates.append((record["tokens"] - before["tokens"]) / seconds)
    spent = seconds_by_kind(records)
    pieces = _pieces(records)
    at = [0.0, *(float(piece[-1]["tokens"]) for piece in pieces)]
    shares = [_shares(piece) for piece in pieces]
    areas = []
    for index, kind in enumerate(spent):
        column = [share.get(kind, 0.0) * 100 for share in shares]
        areas.append(Line(kind, at, [column[0], *column], index + 1))
    whole = sum(spent.values()) or 1.0
    rate = throughput(records)
    said = ", ".join(f"{kind} {seconds / whole:.0%}" for kind, seconds in spent.items())
    return Chart(
        "work",
        "Speed, and where the time went",
        "Tokens a second count compute and waiting for data; the areas below are shares of all the time.",
        f"{count(rate) if rate else 'unknown'} tokens a second; {duration(whole)} in all: {said}.",
        [
            Panel("tokens per second", [Line("tokens per second", *thin(x, rates), 0)], 130, zero=True),
            Panel("share of time (%)", areas, 110, stacked=True),
        ],
        **token_axis(run),
    )


def _pieces(records: Sequence[Json]) -> list[Sequence[Json]]:
    number = min(PIECES, len(records))
    edges = [index * len(records) // number for index in range(number + 1)]
    return [records[a:b] for a, b in itertools.pairwise(edges)]


def _shares(records: Sequence[Json]) -> dict[str, float]:
    spent = seconds_by_kind(records)
    whole = sum(spent.values()) or 1.0
    return {kind: seconds / whole for kind, seconds in spent.items()}
