"""What packing gains: useful tokens a second of PACKED and PADDED rows, and the losses of the same tokens in both."""

from typing import Any

from benchmarks import mnli
from benchmarks.bench import Bench, say
from benchmarks.workers import in_turns, one_shot, our_worker

JOB = "gpt/train/pretrain"
STYLES = ("PACKED", "PADDED")


def run(bench: Bench) -> dict[str, Any]:
    """Measure both styles in turns, then compare their losses."""
    if reason := mnli.missing():
        return {"missing": reason}
    workers = {}
    for style in STYLES:
        say(f"packing: starting {style}")
        told = {"job": JOB, "config": mnli.options(bench, style)}
        workers[style] = our_worker(told, bench.log(f"packing-{style}"))
    try:
        in_turns(workers, bench.rounds, {})
    finally:
        for worker in workers.values():
            worker.close()
    rates = {style: worker.per_second(worker.facts["useful_per_step"]) for style, worker in workers.items()}
    return {
        "useful_tokens_per_s": {style: rate for style, (rate, _) in rates.items()},
        "spread": {style: spread for style, (_, spread) in rates.items()},
        "useful_per_step": {style: worker.facts["useful_per_step"] for style, worker in workers.items()},
        "speed": rates["PACKED"][0] / rates["PADDED"][0],
        "loss_difference": one_shot("packing_losses", mnli.options(bench, "PACKED"))["difference"],
    }
