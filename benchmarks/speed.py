"""Training steps, ours beside the peers': the same weights, tokens and optimizer, in alternating rounds."""

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, say
from benchmarks.environments import environment
from benchmarks.shapes import as_json
from benchmarks.workers import ROOT, Worker, WorkerError, in_turns, our_command, our_worker
from benchmarks.workers import environment as variables

PEERS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "torch_eager": ("torch", "torch_gpt.py", {"compile": False, "bfloat16": False}),
    "torch_compile": ("torch", "torch_gpt.py", {"compile": True, "bfloat16": False}),
    "torch_bfloat16": ("torch", "torch_gpt.py", {"compile": False, "bfloat16": True}),
    "torch_huge_pages": ("torch", "torch_gpt.py", {"compile": False, "bfloat16": False}),
    "transformers": ("transformers", "transformers_gpt2.py", {}),
    "levanter": ("levanter", "levanter_gpt2.py", {}),
}
# `holdfast run` asks for huge pages by itself, so ours has them; one row shows what torch makes of them.
HUGE_PAGES = ("torch_huge_pages",)
TOLERANCE = 1e-4  # between losses of the first steps
TOLERANCE_BFLOAT16 = 2e-2
JOB = "gpt/train/pretrain"
MATMULS = 8  # of one round


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """One shape: everybody starts, is checked for equal work, and is then measured in turns."""
    shape, folder = bench.shapes[name], bench.folder / name
    config = bench.options(name)
    if not (folder / "model").exists():
        told = {"job": JOB, "config": config, "export": str(folder)}
        subprocess.run(our_command("our_worker", told), check=True, cwd=ROOT, env=variables())
    workers, missing = _start_peers(bench, name, folder)
    say(f"{name}: starting ours")
    workers = {"ours": our_worker({"job": JOB, "config": config}, bench.log(f"{name}-ours"))} | workers
    missing |= unequal(workers)
    extra = _start_extra(bench, config) if name == "small" else {}
    everybody = {key: worker for key, worker in {**workers, **extra}.items() if key not in missing}
    try:
        say(f"{name}: {bench.rounds} rounds of {', '.join(everybody)}")
        missing |= in_turns(everybody, bench.rounds, {"matmul": MATMULS}, shape.steps)
    finally:
        for worker in {**workers, **extra}.values():
            worker.close()
    measured = {key: worker for key, worker in workers.items() if key not in missing}
    return _result(shape.tokens, measured, missing) | _extra_result({**workers, **extra})


def _start_peers(bench: Bench, name: str, folder: Path) -> tuple[dict[str, Worker], dict[str, str]]:
    """The peers that can be started, and why the others cannot."""
    workers, missing = {}, {}
    for peer, (where, script, more) in PEERS.items():
        found = environment(where)
        if found.python is None:
            missing[peer] = found.reason
            continue
        say(f"{name}: starting {peer}")
        told = as_json(bench.shapes[name], folder=str(folder), **more)
        command = [str(found.python), str(Path(__file__).parent / "peers" / script), told]
        try:
            workers[peer] = Worker(command, bench.log(f"{name}-{peer}"), huge_pages=peer in HUGE_PAGES)
        except WorkerError as error:
            missing[peer] = str(error)
    return workers, missing


def _start_extra(bench: Bench, config: dict[str, Any]) -> dict[str, Worker]:
    """Our step with an exact KL penalty, and the machine's matrix product."""
    tokens = config["training"]["tokens"]
    training = {**config["training"], "tokens": [tokens // 100_000, tokens]}
    training["dataset"] = [training["dataset"]] * 2
    kl = {"beta": 0.1, "estimator": "forward"}
    penalised = {**config, "training": training, "optimization": {**config["optimization"], "kl": kl}}
    told = {"job": "gpt/train/kl", "config": penalised, "stage": 1}
    return {
        "ours_kl": our_worker(told, bench.log("small-ours_kl")),
        "matmul": Worker(our_command("matmul_worker"), bench.log("matmul"), huge_pages=True),
    }


def unequal(workers: dict[str, Worker]) -> dict[str, str]:
    """Peers that do not do the same work as ours, and how that shows."""
    ours = workers["ours"].facts
    found = {}
    for name, worker in workers.items():
        tolerance = TOLERANCE_BFLOAT16 if "bfloat16" in name else TOLERANCE
        facts = worker.facts
        pairs = list(zip(ours["losses"], facts["losses"], strict=True))
        if facts["parameters"] != ours["parameters"]:
            found[name] = f"{facts['parameters']:,} parameters, ours has {ours['parameters']:,}"
        elif not all(abs(a - b) <= tolerance for a, b in pairs):
            found[name] = f"losses of the first steps {facts['losses']}, ours {ours['losses']}"
    return found


def _result(tokens: int, workers: dict[str, Worker], missing: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    spread, memory = {}, {}
    for name, worker in workers.items():
        rate, width = worker.per_second(tokens)
        result["ours_tokens_per_s" if name == "ours" else name] = rate
        spread[name], memory[name] = width, worker.memory
    if "torch_eager" in memory:
        result["memory_ratio"] = memory["ours"] / memory["torch_eager"]
    ratios = {name: result["ours_tokens_per_s"] / result[name] for name in workers if name != "ours"}
    return {
        **result,
        "ratios": ratios,
        "spread": spread,
        "peak_memory": memory,
        "missing": missing,
        "parameters": workers["ours"].facts["parameters"],
        "losses": {name: worker.facts["losses"] for name, worker in workers.items()},
        "versions": {name: worker.facts["versions"] for name, worker in workers.items()},
    }


def _extra_result(workers: dict[str, Worker]) -> dict[str, Any]:
    if "matmul" not in workers:
        return {}
    ours, kl, matmul = workers["ours"], workers["ours_kl"], workers["matmul"]
    peak, spread = matmul.per_second(matmul.facts["flops_per_step"])
    return {
        "matmul_flops_per_s": peak,
        "matmul_spread": spread,
        "flops_per_step": ours.facts["flops_per_step"],
        "share_of_matmul_peak": ours.facts["flops_per_step"] / ours.median / peak,
        "kl_step_over_plain_step": kl.median / ours.median,
    }
