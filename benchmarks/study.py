"""Studies, measured: how often one may be killed, and what sharing pasts and compiled steps saves.

    python -m benchmarks.study --kills 100      # SIGKILL at random instants; results and verdict equal to the last bit
    python -m benchmarks.study --speed          # 8 arms, 5 seeds, 400 and 150 steps, beside the same runs one by one

Both need no data: the model is tiny and learns lists, then arithmetic. `--seed` draws other instants, for kills in
several parts. `--alone N` starts only every N-th of the runs one by one and counts the others as the mean of those.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import yaml

from holdfast.report.verdict_tables import to_csv
from holdfast.studies.results import read_results
from holdfast.studies.verdict import judge_rows

BLOCK, ROWS = 32, 8
HOLDFAST = [sys.executable, "-m", "holdfast"]


def study(steps: tuple[int, int], seeds: int, rates: list[float], arms: dict[str, Any]) -> dict[str, Any]:
    """The file of a study of a tiny model."""
    names = ("lists", "arithmetic")
    return {
        "config": {
            "job": "continual/train/abcd_kl",
            "stages": [
                {"name": name, "tokens": count * BLOCK * ROWS, "data": [{"name": name, "style": "PADDED"}]}
                for name, count in zip(names, steps, strict=True)
            ],
            "training": {"batch_size": ROWS, "validation_steps": 32, "validation": False},
            "optimization": {"lr": 0.003, "schedule": "constant"},
            "architecture": {"block_size": BLOCK, "preset": "tiny", "n_layers": 2, "n_embd": 64, "n_head": 4},
            "eval": {"evaluations": []},
            "logging": {"report_interval": 10, "checkpoint_interval": 50, "trackers": []},
        },
        "old": ["lists"],
        "new": "arithmetic",
        "seeds": list(range(seeds)),
        "plain": {"rates": rates, "early": [], "interpolations": []},
        "arms": arms,
    }


def replays(*rates: float) -> dict[str, Any]:
    """Arms that replay old rows."""
    return {f"replay {rate:g}": {"set": [f"training.replay={{rate: {rate}}}"]} for rate in rates}


def started(folder: Path, file: Path) -> subprocess.Popen[bytes]:
    """`study run` in a process of its own."""
    log = (folder / "log").open("ab")
    return subprocess.Popen([*HOLDFAST, "study", "run", str(file), "--out", str(folder)], stdout=log, stderr=log)


def recorded_steps(folder: Path) -> int:
    """Steps that the runs of a study trained themselves, those of shared pasts once."""
    total = 0
    for path in (folder / "study").glob("*/*/metrics.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        trained = [record["step"] for record in records if record["kind"] == "train"]
        shared = [record["step"] for record in records if record["kind"] == "stage" and record["stage"] == 1]
        parent = json.loads((path.parent / "study.json").read_text())["parent"]
        total += max(trained) - (shared[0] if parent else 0)
    return total


def kills(times: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kill a study at random instants, and compare its results with those of one that was left alone."""
    values = study((60, 30), 2, [0.1, 1], {**replays(0.25), "average": {"weights": "interpolated", "shares": [0.5]}})
    file = folder / "kills.yaml"
    file.write_text(yaml.safe_dump(values))
    whole, killed = folder / "whole", folder / "killed"
    for each in (whole, killed):
        each.mkdir()
    begun = time.perf_counter()
    assert started(whole, file).wait() == 0, (whole / "log").read_text()[-2000:]
    seconds = time.perf_counter() - begun
    chance, count, rounds = Random(seed), 0, 0
    while count < times:
        process = started(killed, file)
        try:
            process.wait(chance.uniform(0.5, 0.3 * seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            count += 1
        else:  # it got to the end: begin anew in another folder, so that kills hit work and not a finished study
            compare(whole, killed)
            print(f"{count} kills so far; the same results, verdict and steps", file=sys.stderr, flush=True)
            rounds += 1
            killed = folder / f"killed-{rounds}"
            killed.mkdir()
    assert started(killed, file).wait() == 0, (killed / "log").read_text()[-2000:]
    compare(whole, killed)
    return {"kills": count, "seconds uninterrupted": round(seconds, 1), "steps": recorded_steps(whole), "equal": True}


def compare(whole: Path, other: Path) -> None:
    """Refuse results or a verdict that differ in a bit, or a past that was trained twice."""
    files = [folder / "study" / "kills" / "results.csv" for folder in (whole, other)]
    assert files[0].read_bytes() == files[1].read_bytes(), f"{other}: other results than {whole}"
    verdicts = [to_csv(judge_rows(read_results(file))) for file in files]  # what depends on the machine is not in it
    assert verdicts[0] == verdicts[1], f"{other}: another verdict than {whole}"
    assert recorded_steps(whole) == recorded_steps(other), f"{other}: other steps than {whole}"


def speed(folder: Path, every: int) -> dict[str, Any]:
    """Time of a study, over the time of its runs started one by one from scratch, each in a process of its own."""
    from holdfast.studies.graph import Graph, cost
    from holdfast.studies.study import read_study

    file = folder / "speed.yaml"
    values = study((400, 150), 5, [0.03, 0.1, 0.2, 0.5, 1], replays(0.05, 0.1, 0.25))
    file.write_text(yaml.safe_dump(values))
    graph = Graph(read_study(file))
    runs = graph.runs(graph.judging({}))
    begun = time.perf_counter()
    assert started(folder, file).wait() == 0, (folder / "log").read_text()[-2000:]
    together = time.perf_counter() - begun
    spent = []
    for index, run in enumerate(runs):
        if index % every:
            continue
        config = folder / "study" / "speed" / run.name / "config.yaml"
        begun = time.perf_counter()
        command = [*HOLDFAST, "run", str(config), "--quiet", "--out", str(folder / "alone"), "--name", run.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        spent.append(time.perf_counter() - begun)
    alone = sum(spent) / len(spent) * len(runs)
    return {
        "runs": len(runs),
        "seconds together": round(together, 1),
        "seconds one by one": round(alone, 1),
        "started one by one": len(spent),
        "ratio": round(together / alone, 3),
        "ideal": round(cost(runs).ideal, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="how often a study is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of kills")
    parser.add_argument("--speed", action="store_true", help="measure what sharing saves")
    parser.add_argument("--alone", type=int, default=1, help="start every N-th run one by one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_CACHE"] = str(folder / "cache")
        if arguments.kills:
            print(json.dumps(kills(arguments.kills, folder, arguments.seed), indent=1))
        if arguments.speed:
            print(json.dumps(speed(folder, arguments.alone), indent=1))


if __name__ == "__main__":
    main()
