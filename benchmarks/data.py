"""What data costs: a batch beside the step that uses it, the first batch of a run that resumes late, checksums."""

from typing import Any

from benchmarks import mnli
from benchmarks.bench import Bench
from benchmarks.workers import one_shot

LONG_STEPS = 1_200_000


def run(bench: Bench) -> dict[str, Any]:
    """The figures: of small and packed MNLI rows the worse one, and of a plain and a fading run the worse one."""
    small = bench.options("small")
    configs = {"small": small}
    if mnli.missing() is None:
        configs["mnli_packed"] = mnli.options(bench, "PACKED")
    first = {"plain": ("gpt/train/pretrain", plain(small)), "fading": ("continual/train/abcd", fading(small))}
    found = one_shot("data_costs", {"configs": configs, "first": first, "rounds": bench.rounds})
    return {
        **found,
        "batch_over_step": max(entry["ratio"] for entry in found["batches"].values()),
        "late_over_early": max(entry["late_over_early"] for entry in found["first"].values()),
        "checksum_ratio": found["checksums"]["ratio"],
    }


def plain(small: dict[str, Any]) -> dict[str, Any]:
    """One stage, longer than a million steps."""
    tokens = small["training"]["tokens"] // 100_000 * LONG_STEPS
    return {**small, "training": {**small["training"], "tokens": tokens}}


def fading(small: dict[str, Any]) -> dict[str, Any]:
    """A curriculum of three stages with fades and replay, longer than a million steps."""
    tokens = small["training"]["tokens"] // 100_000 * LONG_STEPS // 3
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
