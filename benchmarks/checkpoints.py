"""What a checkpoint takes from the loop: while it is made, and while the background writes it."""

from typing import Any

from benchmarks.bench import Bench
from benchmarks.workers import one_shot

INTERVAL = 50


def run(bench: Bench) -> dict[str, Any]:
    """The share of the loop's time that is lost with a checkpoint every 50 steps of the small shape."""
    found = one_shot("checkpoint_costs", {"config": bench.options("small"), "rounds": bench.rounds})
    steps = INTERVAL * found["step_seconds"]
    sums = found["checksum_cpu_seconds"] / (INTERVAL * found["step_cpu_seconds"])
    shares = {"share": found["lost_seconds"] / steps, "checksum_share": sums}
    return {**found, "interval": INTERVAL, **shares}
