"""Rows of small studies, for tests."""

import numpy as np

from holdfast.studies.results import Row

RATES = (0.0003, 0.001, 0.003)
NEW, OLD = (4.0, 3.0, 2.0), (1.0, 2.0, 6.0)


def plain_rows(
    seeds: int = 3, *, new: tuple[float, ...] = NEW, old: tuple[float, ...] = OLD, before: float | None = 5.0, **columns
) -> list[Row]:
    """Plain at three rates; seeds differ by a constant in both losses."""
    rows = []
    for seed in range(seeds):
        shift = 0.1 * seed
        rows += [
            Row("plain", seed, rate, o + shift, n + shift, **columns)
            for rate, n, o in zip(RATES, new, old, strict=True)
        ]
        if before is not None:
            rows.append(Row("before", seed, None, 0.5 + shift, before + shift, **columns))
    return rows


def arm_rows(
    name: str, new: float, old: float, *, seeds: int = 3, noise: float = 0.01, rate: float = 0.003, **columns
) -> list[Row]:
    """An arm whose seeds differ as plain's do, and by a noise in old that is 0 on average."""
    spread = noise * (np.arange(seeds) - (seeds - 1) / 2)
    return [
        Row(name, seed, rate, float(old + 0.1 * seed + spread[seed]), new + 0.1 * seed, **columns)
        for seed in range(seeds)
    ]


def study_rows(seeds: int = 5) -> list[Row]:
    """One arm of each verdict."""
    return [
        *plain_rows(seeds),
        *arm_rows("kept", 3.0, 1.5, seeds=seeds),
        *arm_rows("lost", 3.0, 2.6, seeds=seeds),
        *arm_rows("null", 3.0, 2.0, seeds=seeds, noise=0.1),
        *arm_rows("slow", 4.2, 0.1, seeds=seeds),
        *arm_rows("quick", 1.5, 7.0, seeds=seeds),
    ]
