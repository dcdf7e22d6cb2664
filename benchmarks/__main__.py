"""`python -m benchmarks`: the training step beside a plain PyTorch GPT, in one run, in alternating rounds.

Both train the same shape on two cores: GPT-2's design, float32, AdamW, clipping. PyTorch comes from this environment
or, with `--torch-python`, from another; without it only our own figures are measured. Prints a Markdown table and
writes benchmarks/out/latest.json.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SMALL = {"layers": 6, "width": 384, "heads": 6, "length": 256, "rows": 8, "vocabulary": 512, "steps": 4}


class Peer:
    """A process that measures a round whenever it is asked."""

    def __init__(self, python: str, script: str, shape: dict[str, Any]) -> None:
        command = [python, str(HERE / script), json.dumps(shape)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()
        self.rounds: list[dict[str, float]] = []

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.process.args} ended"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def measure(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rounds.append(self._read())

    def close(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        speeds = [entry["tokens_per_s"] for entry in self.rounds]
        return {
            **self.facts,
            "tokens_per_s": statistics.median(speeds),
            "spread": max(speeds) - min(speeds),
            "peak_memory": self.rounds[-1]["memory"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-python", default=None, help="interpreter of an environment that has torch")
    arguments = parser.parse_args()
    torch_python = arguments.torch_python or (sys.executable if importlib.util.find_spec("torch") else None)
    shape = {**SMALL, "threads": os.cpu_count()}
    wanted = {"ours": (sys.executable, "our_step.py", shape)}
    wanted["ours, exact KL"] = (sys.executable, "our_step.py", {**shape, "penalty": "forward"})
    if torch_python:
        wanted["torch_eager"] = (torch_python, "torch_gpt.py", shape)
    peers = {name: Peer(*arguments_) for name, arguments_ in wanted.items()}
    for _ in range(arguments.rounds):
        for peer in peers.values():
            peer.measure()
    figures = {name: peer.close() for name, peer in peers.items()}
    ours = figures["ours"]["tokens_per_s"]
    ratios = {f"ours / {name}": ours / entry["tokens_per_s"] for name, entry in figures.items() if name != "ours"}
    result = {
        "shape": shape,
        "machine": platform.processor() or platform.machine(),
        "figures": figures,
        "ratios": ratios,
    }
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    (out / "latest.json").write_text(json.dumps(result, indent=1) + "\n")
    print("| step of the small shape | tokens/s (spread) | peak memory | parameters |\n|---|---|---|---|")
    for name, entry in figures.items():
        print(
            f"| {name} | {entry['tokens_per_s']:.0f} ({entry['spread']:.0f}) | "
            f"{entry['peak_memory'] / 2**30:.2f} GiB | {entry['parameters']:,} |"
        )
    for name, value in ratios.items():
        print(f"\n{name}: {value:.2f}")


if __name__ == "__main__":
    main()
