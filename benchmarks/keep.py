"""Are budgets (`keep`) kept? Runs on real rows, judged on held-out documents that the controller never saw.

    python -m benchmarks.keep --minutes 30      # runs what has no row yet, for about so long
    python -m benchmarks.keep --summary         # what the rows say

Two curricula, 20 seeds, budgets of 0.02, 0.05 and 0.15 bits per byte; the same runs without a budget, which say where
one is exceeded at all; five fixed weights of the KL on old rows on other seeds, for what new loss a fixed weight would
cost; and budgets on the model's own samples. Rows of `benchmarks/results/keep.csv` are final: what has its row is not
run again.
"""

import argparse
import csv
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import SHARED
from holdfast.cli.configs import job_config
from holdfast.evaluation.budgets import held_out_rise
from holdfast.execution import ExecutionSpec
from holdfast.training.run import start_run

RESULTS = Path(__file__).parent / "results" / "keep.csv"
JOB = "continual/train/abcd_kl"
BUDGETS = (0.02, 0.05, 0.15)
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0)
SEEDS, OTHER_SEEDS = tuple(range(20)), (100, 101)
BATCH, BLOCK = 16, 128


class Curriculum(NamedTuple):
    """What is learned after what, from which model."""

    old: str
    new: str
    steps: int
    lr: float
    before: int  # steps on the old data first
    architecture: dict[str, Any]


CURRICULA = {
    "stories": Curriculum(
        "tinystories",
        "shakespeare",
        300,
        0.0005,
        1,
        {"from": str(SHARED / "weights" / "stories260K"), "block_size": BLOCK},
    ),
    "speeches": Curriculum(
        "speeches", "german", 300, 0.001, 300, {"n_layers": 2, "n_embd": 64, "n_head": 4, "block_size": BLOCK}
    ),
}


class Arm(NamedTuple):
    """One kind of run: its name, its budget or weight, and its options."""

    name: str
    value: float
    overrides: tuple[str, ...]


REPLAY = "training.replay={rate: 0.25}"
ANCHORED = "training.replay={rate: 0.25, objective: kl}"
SELF = "training.replay={source: self, rate: 0.25, objective: kl}"


def arms(curriculum: Curriculum) -> Iterator[tuple[Arm, tuple[int, ...]]]:
    """All arms with their seeds, those first that say most."""
    yield Arm("plain", 0.0, (REPLAY,)), SEEDS
    for budget in BUDGETS:
        yield Arm("keep", budget, (ANCHORED, f"keep.{curriculum.old}={budget}")), SEEDS
    anchor = ("stages.1.update_reference=true", "optimization.kl={estimator: forward, on: old}")
    for weight in WEIGHTS:
        yield Arm("fixed", weight, (ANCHORED, f"stages.1.beta={weight}", *anchor)), OTHER_SEEDS
    for budget in BUDGETS:
        yield Arm("self", budget, (SELF, f"keep.self={budget}")), SEEDS


def options(curriculum: Curriculum, seed: int) -> dict[str, Any]:
    """The options that all arms of a seed share."""
    tokens, old, new = BATCH * BLOCK, curriculum.old, curriculum.new
    pretrained = "from" in curriculum.architecture
    return {
        "data": {"root": str(SHARED / "data"), "max_leak": 1.0},
        "stages": [
            {
                "tokens": curriculum.before * tokens,
                "data": [{"name": old, "style": "PMD"}],
                "lr": 0.0 if pretrained else 1.0,  # a step that changes nothing: the model knows the old already
            },
            {"tokens": curriculum.steps * tokens, "data": [{"name": new, "style": "PMD"}], "optimizer": "reset"},
        ],
        "training": {"batch_size": BATCH, "seed": seed, "validation_steps": 1024, "validation": False},
        "optimization": {"lr": curriculum.lr, "schedule": "wsd", "decay_pct": 0.3},
        "architecture": curriculum.architecture,
        "eval": {"evaluations": []},
        "logging": {"report_interval": 20, "checkpoint_interval": 100_000},
    }


def measured(name: str, arm: Arm, seed: int) -> dict[str, Any]:
    """Run an arm to its end in a folder of its own, and what came of it."""
    curriculum, started = CURRICULA[name], time.monotonic()
    values, since = options(curriculum, seed), curriculum.before
    if arm.name == "self" and "from" in curriculum.architecture:
        # A model that exists replays itself from the first step on: one stage, and the old data only measures.
        values["stages"], since = values["stages"][1:], 0
        values["eval"] = {**values["eval"], "held_out": [curriculum.old]}
    scratch = Path(tempfile.mkdtemp(prefix="keep-"))
    try:
        run_dir = trained(arm.name, values, arm.overrides, scratch)
        results = json.loads((run_dir / "results.json").read_text())
        points = results["points"]
        rise = held_out_rise(curriculum.old, since, run_dir, points)
        assert rise is not None
        steered = results.get("keep", {"certificates": [{}]})["certificates"][-1]
        control = next(iter(steered.get("control", {"": {"rise": None}}).values()))["rise"]
        train = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        kept = [record["keep"] for record in train if record.get("keep") and record["kind"] == "train"]
        return {
            "curriculum": name,
            "arm": arm.name,
            "value": arm.value,
            "seed": seed,
            "steps": curriculum.steps,
            "lr": curriculum.lr,
            **{end: f"{rise[end]:.5f}" for end in ("rise", "low", "high")},
            "documents": rise["num"],
            "new": f"{points[-1]['scores'][curriculum.new]['bits_per_byte']:.5f}",
            "control": "" if control is None else f"{control:.5f}",
            "alpha": steered.get("alpha", ""),
            "multiplier": f"{next(iter(kept[-1].values()))['multiplier']:.3f}" if kept else "",
            "seconds": f"{time.monotonic() - started:.0f}",
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def known(results: Path = RESULTS) -> list[dict[str, str]]:
    """The rows that are there."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def append(row: dict[str, Any], results: Path = RESULTS) -> None:
    """One more row, in a file that is written whole."""
    rows = [*known(results), row]
    results.parent.mkdir(exist_ok=True)
    scratch = results.with_suffix(".tmp")
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    scratch.replace(results)


def trained(name: str, values: dict[str, Any], overrides: Sequence[str], scratch: Path) -> Path:
    """Run to the end below a folder; returns the run's own."""
    spec = ExecutionSpec(name=name, root=scratch)
    code = start_run(job_config(JOB, values, list(overrides)).resolved(), spec)
    if code:
        raise SystemExit(code)
    return spec.run_dir


def missing() -> Iterator[tuple[str, Arm, int]]:
    """What has no row yet: seed by seed, so that a part says something of every budget."""
    done = {(row["curriculum"], row["arm"], float(row["value"]), int(row["seed"])) for row in known()}
    wanted = [
        (seeds.index(seed), name, arm, seed)
        for name, curriculum in CURRICULA.items()
        for arm, seeds in arms(curriculum)
        for seed in seeds
    ]
    for _, name, arm, seed in sorted(wanted, key=lambda each: each[0]):
        if (name, arm.name, arm.value, seed) not in done:
            yield name, arm, seed


def summary() -> Iterator[str]:
    """What the rows say of every curriculum and budget."""
    rows = known()
    for name in CURRICULA:
        here = [row for row in rows if row["curriculum"] == name]
        plain = {row["seed"]: float(row["rise"]) for row in here if row["arm"] == "plain"}
        if plain:
            yield f"{name}: without a budget the old loss rises by {_spread([*plain.values()])} over {len(plain)} seeds"
        for budget in BUDGETS:
            for arm in ("keep", "self"):
                found = [row for row in here if row["arm"] == arm and float(row["value"]) == budget]
                told = _budget_line(found, plain, budget, arm, here)
                if told:
                    yield f"{name}: {told}"


def _budget_line(found: list[dict[str, str]], plain: dict[str, float], budget: float, arm: str, here: list[Any]) -> str:
    if arm == "keep":
        found = [row for row in found if plain.get(row["seed"], -1.0) > budget]  # where it is exceeded without
    if not found:
        return ""
    column = "rise" if arm == "keep" else "control"
    rises = [float(row[column]) for row in found]
    broken, alphas = sum(rise > budget for rise in rises), [float(row["alpha"] or 0) for row in found]
    line = (
        f"{arm} {budget:g}: {len(found)} runs, {broken} broken ({broken / len(found):.0%}), median use "
        f"{statistics.median(rises) / budget:.0%}, median α {statistics.median(alphas):.2f}, new loss "
        f"{statistics.mean(float(row['new']) for row in found):.3f}"
    )
    best = _best_fixed(here, budget)
    if arm == "keep" and best is not None:
        line += f"; best fixed weight on other seeds {best[0]:g} with new loss {best[1]:.3f}"
    if arm == "self":
        line += f"; the old data's own loss rises by {_spread([float(row['rise']) for row in found])}"
    return line


def _best_fixed(here: list[dict[str, str]], budget: float) -> tuple[float, float] | None:
    """The fixed weight with the lowest new loss among those that keep a budget on their seeds, and that loss."""
    fixed = [row for row in here if row["arm"] == "fixed"]
    found = []
    for weight in {float(row["value"]) for row in fixed}:
        own = [row for row in fixed if float(row["value"]) == weight]
        if statistics.mean(float(row["rise"]) for row in own) <= budget:
            found.append((statistics.mean(float(row["new"]) for row in own), weight))
    return (min(found)[1], min(found)[0]) if found else None


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Run a part of what is missing, or say what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no run begins after so long")
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    asked = parser.parse_args()
    if not asked.summary:
        if not (SHARED / "data" / "tinystories").is_dir():
            raise SystemExit(f"no {SHARED / 'data'} (HOLDFAST_SHARED names the folder of real data)")
        end = time.monotonic() + 60 * asked.minutes
        for name, arm, seed in missing():
            if time.monotonic() > end:
                break
            append(measured(name, arm, seed))
    print(f"{len(known())} rows, {len(list(missing()))} runs are missing")
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
