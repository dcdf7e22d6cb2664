"""What data costs: making a batch beside the step that uses it, and the first batch of a run that resumes late."""

from typing import Any

from benchmarks import mnli
from benchmarks.bench import Bench
from benchmarks.workers import one_shot

FADING_STEPS = 1_200_000


def run(bench: Bench) -> dict[str, Any]:
    """Both figures; the first one is the worse of the small shape and of packed MNLI rows."""
    small = bench.options("small")
    configs = {"small": small}
    if mnli.missing() is None:
        configs["mnli_packed"] = mnli.options(bench, "PACKED")
    told = {"configs": configs, "fading": fading(small), "rounds": bench.rounds}
    found = one_shot("data_costs", told)
    return {**found, "batch_over_step": max(entry["ratio"] for entry in found["batches"].values())}


def fading(small: dict[str, Any]) -> dict[str, Any]:
    """A curriculum of three stages with fades and replay, longer than a million steps."""
    tokens = small["training"]["tokens"] // 100_000 * FADING_STEPS // 3
    data = small["training"]["dataset"]
    other = [{"name": "arithmetic", "style": "PADDED"}]
    stages = [
        {"tokens": tokens, "data": data},
        {"tokens": tokens, "data": other, "overlap": 0.1},
        {"tokens": tokens, "data": data, "overlap": 0.1},
    ]
    training = {key: value for key, value in small["training"].items() if key not in ("tokens", "dataset")}
    training["replay"] = {"rate": 0.05}
    more = {"tokenizer": {"name": "bytes"}, "eval": {"evaluations": []}}
    return {**small, "training": training, "stages": stages, **more}
