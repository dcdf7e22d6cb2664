"""Go on from a model that exists: five ways to teach it something new, side by side, over seeds.

    HOLDFAST_DATA=../shared/data python examples/pretrained.py ../shared/weights/stories260K [--seeds 3] [--out runs]

The model knows children's stories and is taught Shakespeare. Stage 0 is what it knows: one step at a learning rate of
0, so that `boundary_1` is the imported model to the last bit. All arms then see the same rows of the new data, but for
the rows that replay puts in their place. Prints what `holdfast compare` prints and a short table, and writes the
page of the comparison. Killed and started again it goes on.
"""

import argparse
from pathlib import Path
from typing import Any

from holdfast.analysis.interpolation import Interpolator, default_folder
from holdfast.cli.configs import job_config
from holdfast.execution import ExecutionSpec
from holdfast.report import compare, write_report
from holdfast.report.groups import mean_and_spread
from holdfast.report.run_files import Run, open_run
from holdfast.training.run import start_run

JOB = "continual/train/abcd_kl"
PROJECT, GROUP = "pretrained", "arms"
OLD, NEW = "tinystories", "shakespeare"
BATCH, BLOCK = 16, 256

ARMS: dict[str, list[str]] = {
    "full": [],
    "full-slower": ["stages.1.lr=0.2"],  # learning less also forgets less: what a method has to beat
    "lora": ["optimization.lora.rank=8", "stages.1.lr=10"],  # adapters want a higher learning rate
    "kl": ["stages.1.beta=1.0", "stages.1.update_reference=true", "optimization.kl.estimator=forward"],
    "replay": ["training.replay={rate: 0.1}"],
}
# Interpolations of the imported model and the end of "full": half of each, and the best on the very rows that judge it.
AVERAGES = {"average-half": "0.5", "average-best": "best"}


def options(model: str, seed: int, steps: int, rows: int) -> dict[str, Any]:
    """The options that all arms of a seed share."""
    row_tokens = BATCH * BLOCK
    return {
        "stages": [
            {"name": OLD, "tokens": row_tokens, "data": [{"name": OLD, "style": "PMD"}], "lr": 0.0},
            {
                "name": NEW,
                "tokens": steps * row_tokens,
                "data": [{"name": NEW, "style": "PMD"}],
                "optimizer": "reset",
            },
        ],
        "training": {"batch_size": BATCH, "seed": seed, "validation_steps": rows, "validation": False},
        "optimization": {"lr": 0.0005, "schedule": "constant"},
        "architecture": {"from": model, "block_size": BLOCK},
        "eval": {"evaluations": []},
        "logging": {"report_interval": 10, "checkpoint_interval": 100000},
    }


def train(out: Path, shared: dict[str, Any], arm: str, name: str) -> Path:
    """Train an arm to its end; returns its folder."""
    spec = ExecutionSpec(name=name, project=PROJECT, group=GROUP, root=out, on_results=write_report_page)
    code = start_run(job_config(JOB, shared, ARMS[arm]).resolved(), spec)
    assert code == 0, f"{name} was stopped; start the script again to go on"
    return out / PROJECT / GROUP / name


def write_report_page(run_dir: Path) -> None:
    """The report of a run, without its pictures as files."""
    write_report(run_dir, pictures=False)


def average(run: Path, seed: int) -> None:
    """Evaluate what lies between the imported model and the end of a run, and keep some of it as runs."""
    ends = f"{run}@boundary_1", f"{run}@final"
    interpolator = Interpolator(*ends)
    found = interpolator.evaluate([step / 10 for step in range(11)], default_folder(*ends), say=lambda _line: None)
    best = found.best("bits_per_byte")
    assert best is not None
    for name, chosen in AVERAGES.items():
        interpolator.save(best if chosen == "best" else float(chosen), run.parent / f"{name}-s{seed}", chosen)


def table(out: Path, seeds: int) -> str:
    """The arms as a Markdown table: bits per byte of new and old at the end, mean ± spread over seeds."""
    lines = [
        f"| | learned new: {NEW}, bits/byte | kept old: {OLD}, bits/byte | mean of the two |",
        "|---|---|---|---|",
    ]
    for arm in (*ARMS, *AVERAGES):
        runs = [open_run(out / PROJECT / GROUP / f"{arm}-s{seed}") for seed in range(seeds)]
        if len(lines) == 2:
            lines.append(f"| before training | {' | '.join(f'{value:.3f}' for value in scores(runs[0], 0))} |")
        cells = []
        for values in zip(*(scores(run, -1) for run in runs), strict=True):
            mean, spread = mean_and_spread(values)
            cells.append(f"{mean:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scores(run: Run, row: int) -> tuple[float, float, float]:
    """Bits per byte of new, of old, and their mean, in a row of a run's matrix."""
    by_task = dict(zip(run.results["tasks"], run.results["matrix"]["bits_per_byte"][row], strict=True))
    return by_task[NEW], by_task[OLD], (by_task[NEW] + by_task[OLD]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a pretrained model, such as ../shared/weights/stories260K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps on the new data")
    parser.add_argument("--rows", type=int, default=128, help="validation rows of each dataset")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        shared = options(arguments.model, seed, arguments.steps, arguments.rows)
        for arm in ARMS:
            run = train(arguments.out, shared, arm, f"{arm}-s{seed}")
            if arm == "full":
                average(run, seed)
    found = compare.compare([arguments.out / PROJECT / GROUP / "*"])
    compare.print_comparison(found)
    print(compare.write_page(found, arguments.out / PROJECT / "compare.html"))
    print(f"\n{table(arguments.out, arguments.seeds)}")


if __name__ == "__main__":
    main()
