"""Does a model that replays its own samples keep four tasks that it learns one after another?

    python examples/self_replay_toy.py --seeds 3          # trains what has no row yet, then prints the table
    python examples/self_replay_toy.py --table            # the table alone

After the toy of arXiv:2605.26097: addition, reversal, sorting, addition modulo 10; 500 steps of 128 rows a task, with
the cross-entropy alone, on numbers below 50 (the last digit of a sum first) and words of 3 different letters, so that
a tiny model learns each in that time. A line names its task by its first letter. Texts are rows of a stream (PMD), so
that the model learns how one begins. The paper samples afresh during training; here each stage samples a fixed set when
it is entered, from a model whose learning rate has decayed: what it says of an old task is then what it knows of it.
Samples of samples make a smaller share from stage to stage: of the last one's rows 0.35³ are the first task's.

Rows of `self_replay_toy.csv`, which it writes beside the runs, are final: what has its row is not run again, and a run
that was killed goes on.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
from pathlib import Path

TASKS = ("addition", "reversal", "sorting", "modular")
ARMS = {"plain": [], "self": ["training.replay={source: self, rate: 0.35, objective: ce}"]}
FIELDS = ("arm", "seed", "steps", "task", "accuracy")
BATCH, BLOCK = 128, 32
TRAIN, HELD_OUT = 20_000, 100
LETTERS = "abcdefghij"


def example(task: str, draw: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    if task in ("addition", "modular"):
        first, second = draw.randrange(50), draw.randrange(50)
        value = f"{first + second:02}"[::-1] if task == "addition" else f"{(first + second) % 10}"
        return f"{task[0]}{first:02}+{second:02}=", value
    word = "".join(draw.sample(LETTERS, k=3))
    return f"{task[0]}{word}=", word[::-1] if task == "reversal" else "".join(sorted(word))


def write_tasks(folder: Path) -> None:
    """Training and held-out questions of every task; no question is on both sides."""
    for task in TASKS:
        draw = random.Random(task)
        held_out: dict[str, str] = {}
        while len(held_out) < HELD_OUT:
            held_out.update([example(task, draw)])
        train = [each for each in (example(task, draw) for _ in range(TRAIN)) if each[0] not in held_out]
        for split, rows in (("train", train), ("validation", list(held_out.items()))):
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))


def config(data: Path, steps: int) -> dict[str, object]:
    """The options of all arms."""
    sources = {
        task: {
            "path": str(data / task / "train.jsonl"),
            "validation": str(data / task / "validation.jsonl"),
            "prompt": "{q}",
            "answer": "{a}",
        }
        for task in TASKS
    }
    stage = {"tokens": steps * BATCH * BLOCK}
    return {
        "job": "continual/train/abcd",
        "data": {"sources": sources, "max_leak": 1.0},  # questions look alike; none is on both sides
        "stages": [{**stage, "name": task, "data": [{"name": task, "style": "PMD"}]} for task in TASKS],
        "training": {"batch_size": BATCH, "per_device_batch_size": BATCH, "validation_steps": 64, "validation": False},
        "optimization": {"optimizer": "muon", "lr": 0.01, "schedule": "cosine_rewarm", "warmup_pct": 0.05},
        # Rotary positions of a low base tell neighbours apart, which is all that these texts need.
        "architecture": {"n_layers": 3, "n_embd": 64, "n_head": 4, "block_size": BLOCK, "rope_base": 100},
        "eval": {"evaluations": list(TASKS), "limit": 200, "batch_size": 128},
        "logging": {"report_interval": 50, "checkpoint_interval": 250, "validation_interval": 100_000},
    }


def known(results: Path) -> list[dict[str, str]]:
    """The rows that are there."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def train(arm: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    """Run one arm to its end; the accuracy of every task after the last stage."""
    data, path = out / "data", out / "toy.json"
    if not (data / TASKS[-1]).exists():
        write_tasks(data)
    path.write_text(json.dumps(config(data, steps)))  # JSON is YAML
    name = f"{arm}-{steps}-s{seed}"
    command = [sys.executable, "-m", "holdfast", "run", str(path), f"training.seed={seed}", *ARMS[arm]]
    subprocess.run([*command, "--out", str(out), "--group", "toy", "--name", name, "--quiet"], check=True)
    results = json.loads((out / "general" / "toy" / name / "results.json").read_text())
    return dict(zip(results["tasks"], results["matrix"]["accuracy"][-1], strict=True))


def table(rows: list[dict[str, str]], steps: int) -> None:
    """Mean accuracy of each task at the end, by arm."""
    print(f"| accuracy after {len(TASKS)} x {steps} steps | {' | '.join(TASKS)} |\n|{'---|' * (len(TASKS) + 1)}")
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm and row["steps"] == str(steps)]
        cells = [[float(row["accuracy"]) for row in mine if row["task"] == task] for task in TASKS]
        if all(cells):
            print(f"| {arm} ({len(cells[0])} seeds) | {' | '.join(f'{sum(c) / len(c):.3f}' for c in cells)} |")


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("runs/self-replay-toy"))
    parser.add_argument("--table", action="store_true", help="do not train")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "self_replay_toy.csv"
    for seed in range(0 if arguments.table else arguments.seeds):
        for arm in ARMS:
            key = (arm, str(seed), str(arguments.steps))
            if any((row["arm"], row["seed"], row["steps"]) == key for row in known(results)):
                continue
            found = train(arm, seed, arguments.steps, arguments.out)
            rows = known(results) + [dict(zip(FIELDS, (*key, task, str(found[task])), strict=True)) for task in TASKS]
            scratch = results.with_suffix(".new")
            with scratch.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            scratch.replace(results)
    table(known(results), arguments.steps)


if __name__ == "__main__":
    main()
