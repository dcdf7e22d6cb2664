"""Our training step for TPUs that are not there, lowered or compiled; run by `benchmarks/chips.py`."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.shapes import ADAMW
from holdfast.analysis import estimates
from holdfast.analysis.chip_plan import describe
from holdfast.analysis.hlo import matmul_flops
from holdfast.cli.configs import job_config
from holdfast.execution import ExecutionSpec
from holdfast.execution.chips import CHIPS
from holdfast.training.compile import abstract_arguments, trace_train
from holdfast.training.initial import abstract_stage
from holdfast.training.resolve import ResolvedRun
from holdfast.training.run import make_trainer

JOB = "continual/train/abcd_kl"
STAGES = {"plain": 0, "anchored": 1}


def resolved(told: dict[str, Any], num_devices: int) -> ResolvedRun:
    """The run whose steps are compiled: a stage without a penalty and one with an exact KL."""
    rows = num_devices * told["rows"] * told["micro_batches"]
    stage = {"tokens": rows * told["length"] * 10}
    numbers = {key: ADAMW[key] for key in ("beta1", "beta2", "epsilon")}
    values = {
        "stages": [
            {**stage, "data": [{"name": "fineweb", "style": "PMD"}]},
            {**stage, "data": [{"name": "pycode", "style": "PMD"}], "beta": 0.2, "update_reference": True},
        ],
        "training": {"batch_size": rows, "per_device_batch_size": told["rows"]},
        "optimization": {
            "lr": ADAMW["lr"],
            "weight_decay": ADAMW["weight_decay"],
            "clip_norm": ADAMW["clip_norm"],
            "adamw": numbers,
            "kl": {"estimator": "forward"},
        },
        "architecture": {
            "preset": told["preset"],
            "block_size": told["length"],
            "vocab_size": told["vocabulary"],
            "dtype": "bfloat16",
            "remat": True,
        },
        "topology": {"data": 1, "fsdp": num_devices},
    }
    return job_config(JOB, values, []).resolved()


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    chip, sizes = CHIPS[f"tpu-{told['chip']}"], tuple(map(int, told["devices"].split("x")))
    run = resolved(told, math.prod(sizes))
    topology = describe(chip, sizes, run.options.topology)
    state = make_trainer(run, dataclasses.replace(ExecutionSpec(name="chips"), topology=topology)).state
    stage = abstract_stage(state, run, STAGES[told["kind"]])
    train_step = run.trainer.train_step
    traced = trace_train(train_step, topology.mesh, *abstract_arguments(run, topology, told["rows"], stage))
    lowered = traced.lower()
    facts: dict[str, Any] = {"program": digest(lowered.as_text()), "libtpu": importlib.metadata.version("libtpu")}
    if facts["program"] != told["known"]:
        # Products inside a kernel are not in a trace: they are counted in one of the plain formula.
        jaxpr = estimates.trace(run, topology, train_step, stage, told["rows"]).jaxpr
        facts["products"] = matmul_flops(jaxpr, told["length"])
        facts |= compiled(lowered, Path(told["text"]))
    print(json.dumps(facts))


def compiled(lowered: Any, text: Path) -> dict[str, Any]:
    """What the compiler says; the program's text goes into a file."""
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error)[:2000]}
    usage = program.memory_analysis()
    text.write_text(program.as_text())
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {"memory": {name: int(getattr(usage, f"{name}_size_in_bytes")) for name in names}}


def digest(text: str) -> str:
    """What tells a lowered program apart; without the bodies of kernels, which hold line numbers of sources."""
    return hashlib.sha256(re.sub(r'backend_config = "[^"]*"', "", text).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
