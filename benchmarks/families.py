"""What a family of models costs: the time of its step over that of a dense decoder of the same active size.

All take turns in one process, so that they see the same machine: a ratio is the median over rounds of a block of steps
over one of dense steps beside it.
"""

import statistics
import time
from typing import Any

from benchmarks.bench import Bench, say
from benchmarks.shapes import Shape, options, write_corpus

JOB = "gpt/train/pretrain"
LIMITS = {"moe": 1.3}  # at most, of issue "The field's data, models and evaluations"
ARMS = {
    "dense": {},
    "moe": {"family": "moe", "moe": {"n_experts": 8, "top_k": 2}},
    "hybrid": {"family": "hybrid", "hybrid": {"layers": "sssa"}},
}


def run(bench: Bench) -> dict[str, Any]:
    """The step time of the dense decoder, and the ratio of the others to it."""
    shape = bench.shapes["small"]
    dense = _Timed(bench, shape, "dense")
    ratios = {}
    for name in ARMS:
        if name == "dense":
            continue
        say(f"  {name}")
        timed, found = _Timed(bench, shape, name), []
        for number in range(bench.rounds):
            pair = (timed, dense) if number % 2 else (dense, timed)  # each goes first every other time
            seconds = {each: each.block() for each in pair}
            found.append(seconds[timed] / seconds[dense])
        ratios[name] = {"ratio": statistics.median(found), "spread": max(found) - min(found)}
        ratios[name] |= {"parameters": timed.parameters, "active": timed.active}
    return {"dense_seconds": statistics.median(dense.seconds), "dense_parameters": dense.parameters, "ratios": ratios}


class _Timed:
    """A run whose steps are timed in blocks."""

    def __init__(self, bench: Bench, shape: Shape, name: str) -> None:
        from holdfast.analysis.rehearsal import Rehearsal
        from holdfast.config import merge
        from holdfast.training.config import config_classes
        from holdfast.training.resolve import resolve

        folder = bench.folder / "families"
        if not folder.exists():
            write_corpus(folder, shape)
        config = options(shape, folder, bench.cache)
        config["architecture"] |= {"preset": "small", **ARMS[name]}
        resolved = resolve(JOB, merge(config_classes(JOB), {**config, "eval": {"evaluations": []}}, []))
        spec = resolved.model.options
        self.parameters, self.active = spec.num_parameters(), spec.active_parameters()
        self._steps = shape.steps
        self._rehearsal = Rehearsal(resolved, folder / "runs" / name, stage=0)
        self.seconds: list[float] = []
        self._rehearsal.take(2)  # compiles

    def block(self) -> float:
        """Seconds of a step, over one block of them."""
        started = time.perf_counter()
        self._rehearsal.take(self._steps)
        self.seconds.append((time.perf_counter() - started) / self._steps)
        return self.seconds[-1]


def family_table(result: dict[str, Any]) -> str:
    """The ratios beside their limits."""
    size = f"{result['dense_parameters'] / 1e6:.1f}M parameters"
    lines = [f"dense decoder of {size}: {result['dense_seconds']:.3f} s a step", ""]
    lines += ["| family | parameters, active | step time over dense (spread) | wanted | |", "|---|---|---|---|---|"]
    for name, found in result["ratios"].items():
        limit = LIMITS.get(name)
        verdict = "" if limit is None else "kept" if found["ratio"] <= limit else "**missed**"
        wanted = "" if limit is None else f"at most {limit:g}"
        sizes = f"{found['parameters'] / 1e6:.1f}M, {found['active'] / 1e6:.1f}M"
        lines.append(f"| {name} | {sizes} | {found['ratio']:.3f} ({found['spread']:.3f}) | {wanted} | {verdict} |")
    return "\n".join(lines)
