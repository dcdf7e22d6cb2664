"""What a method costs: the time of its step over that of a plain one, on the small shape, with a quarter of old rows.

Every arm takes turns with plain training in one process, so that both see the same machine: a ratio is the median over
rounds of one block of steps over the block of plain steps beside it, once of the process's CPU time, which a busy
machine leaves alone and which limits are judged by, and once of the clock's. All methods that are registered are
measured.
"""

import dataclasses
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import OUT, Bench, say
from benchmarks.shapes import Shape, options, write_corpus

JOB = "continual/train/abcd_kl"
OLD_STEPS, OLD_SHARE = 64, 0.25
BLOCK_STEPS = 1
PART = "methods-part.json"  # of a run that was ended
WIDE_VOCABULARY = 32_768
# At most, of issue "The field's ways to keep the old": token weights 1.05, with a statistic or the reference 1.4.
LIMITS = {
    "kl on old rows": 1.15,
    "l2_reference": 1.1,
    "dft": 1.05,
    "asft": 1.4,
    "eaft": 1.05,
    "eaft, 32k vocabulary": 1.3,
    "stm": 1.4,
    "talr": 1.4,
    "flow": 1.4,
    "ewc": 1.1,
    "si": 1.1,
    "sfa": 1.15,
    "ssu": 1.15,
    "osf": 1.15,
    "agem": 1.4,
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is measured beside plain training: changes of its config."""

    overrides: tuple[str, ...]
    wide: bool = False  # with a large vocabulary

    @classmethod
    def anchored(cls, estimator: str, on: str = "batch") -> "Arm":
        """An anchor of `optimization/kl`."""
        kl = f"optimization.kl={{estimator: {estimator}, on: {on}}}"
        return cls(("stages.1.beta=1.0", "stages.1.update_reference=true", kl))


def arms() -> dict[str, Arm]:
    """The anchors, and every method that is registered now; what is no method, as far as it is there."""
    from holdfast import registry
    from holdfast.training.config import option_entries

    found = {
        "kl": Arm.anchored("forward"),
        "kl on old rows": Arm.anchored("forward", "old"),
        "l2_reference": Arm.anchored("l2_reference"),
        **{name: Arm((f"training.methods=[{name}]",)) for name in registry.methods.names()},
    }
    if "eaft" in found:
        found["eaft, 32k vocabulary"] = Arm(found["eaft"].overrides, wide=True)
    if "optimization/sam/rho" in option_entries(JOB):
        found["sam"] = Arm(("optimization.sam.rho=0.05",))
    return found


def run(bench: Bench) -> dict[str, Any]:
    """The ratio of every arm, and why an arm is missing; what a run that was ended had measured is taken up again."""
    from holdfast.errors import UserError

    shape, part = bench.shapes["small"], OUT / PART
    wide = dataclasses.replace(shape, vocabulary=shape.vocabulary if bench.quick else WIDE_VOCABULARY)
    found = measured_before(part, bench)
    plain: dict[bool, _Timed] = {}
    for name, arm in arms().items():
        if name in found["ratios"]:
            continue
        say(f"  {name}")
        size = wide if arm.wide else shape
        if arm.wide not in plain:
            plain[arm.wide] = _Timed(bench, size, Arm(()))
        try:
            timed = _Timed(bench, size, arm)
        except UserError as error:
            found["missing"][name] = str(error)
            continue
        ratio = found["ratios"][name] = _compared(timed, plain[arm.wide], bench.rounds)
        found["plain"] += [] if arm.wide else plain[False].seconds[-bench.rounds :]
        say(f"    {ratio['ratio']:.3f} of CPU time, {ratio['wall']:.3f} by the clock")
        part.write_text(json.dumps(found))
    part.unlink(missing_ok=True)
    cpu, wall = (statistics.median(column) for column in zip(*found["plain"], strict=True))
    return {"plain_seconds": wall, "plain_cpu": cpu, "ratios": found["ratios"], "missing": found["missing"]}


def measured_before(part: Path, bench: Bench) -> dict[str, Any]:
    """What a run that was ended had measured with the same rounds, shapes and versions; nothing where there is none."""
    import jax

    made_with = [bench.rounds, bench.quick, jax.__version__, platform.node()]
    found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {}
    if found.get("made_with") == made_with:
        return {**found, "missing": {}}
    return {"made_with": made_with, "ratios": {}, "missing": {}, "plain": []}


def _compared(timed: "_Timed", plain: "_Timed", rounds: int) -> dict[str, float]:
    found = []
    for number in range(rounds):
        # Each goes first every other time.
        pair = (timed, plain) if number % 2 else (plain, timed)
        seconds = {each: each.block() for each in pair}
        found.append([own / other for own, other in zip(seconds[timed], seconds[plain], strict=True)])
    cpu, wall = zip(*found, strict=True)
    return {"ratio": statistics.median(cpu), "spread": max(cpu) - min(cpu), "wall": statistics.median(wall)}


class _Timed:
    """The second stage of a run, whose steps are timed in blocks."""

    def __init__(self, bench: Bench, shape: Shape, arm: Arm) -> None:
        from holdfast.analysis.rehearsal import Rehearsal
        from holdfast.config import merge
        from holdfast.training.config import config_classes
        from holdfast.training.resolve import resolve

        folder = bench.folder / "methods" / str(shape.vocabulary)
        if not folder.exists():
            write_corpus(folder, shape)
        cfg = merge(config_classes(JOB), config_of(shape, folder, bench.cache), list(arm.overrides))
        self._rehearsal = Rehearsal(resolve(JOB, cfg), folder / "runs", stage=1)
        self.seconds: list[tuple[float, float]] = []
        self._rehearsal.take(2)  # compiles

    def block(self) -> tuple[float, float]:
        """CPU seconds and seconds of a step, over one block of them."""
        cpu, wall = time.process_time(), time.perf_counter()
        self._rehearsal.take(BLOCK_STEPS)
        self.seconds.append(
            ((time.process_time() - cpu) / BLOCK_STEPS, (time.perf_counter() - wall) / BLOCK_STEPS),
        )
        return self.seconds[-1]


def config_of(shape: Shape, corpus: Path, cache: Path) -> dict[str, Any]:
    """Two stages over one corpus by two names, the second with a quarter of rows of the first."""
    config = options(shape, corpus, cache)
    kept = ("batch_size", "per_device_batch_size", "validation", "evaluate")
    source = config["data"]["sources"]["corpus"]
    old, new = ({"name": name, "style": "PADDED"} for name in ("old", "new"))
    mixture = [{**new, "rate": 1 - OLD_SHARE}, {**old, "rate": OLD_SHARE}]
    return {
        **config,
        "training": {name: config["training"][name] for name in kept},
        "stages": [
            {"tokens": shape.tokens * OLD_STEPS, "data": [old]},
            {"tokens": shape.tokens * 10_000, "data": mixture},
        ],
        "data": {**config["data"], "sources": {"old": source, "new": source}},
        "eval": {"evaluations": []},
    }


def method_table(result: dict[str, Any]) -> str:
    """The ratios beside their limits."""
    lines = [f"plain step: {result['plain_cpu']:.3f} s of CPU time, {result['plain_seconds']:.3f} s by the clock", ""]
    lines += ["| method | CPU time of a step over plain (spread) | by the clock | wanted | |", "|---|---|---|---|---|"]
    for name, found in result["ratios"].items():
        limit = LIMITS.get(name)
        verdict = "" if limit is None else "kept" if found["ratio"] <= limit else "**missed**"
        wanted = "" if limit is None else f"at most {limit:g}"
        ratio = f"{found['ratio']:.3f} ({found['spread']:.3f})"
        lines.append(f"| {name} | {ratio} | {found['wall']:.3f} | {wanted} | {verdict} |")
    lines += [f"| {name} | missing: {reason} | | | |" for name, reason in result["missing"].items()]
    return "\n".join(lines)
