"""What holds the old? Plain training, penalties and replay on two real curricula, judged at equal new-data loss.

    HOLDFAST_DATA=../shared/data python examples/study.py [--seeds 5] [--out runs/study]

Every arm of a seed branches from the same checkpoint at the end of the first dataset. Plain training at several
learning rates draws a curve of *kept old* against *learned new*; an arm is better than learning less only where it
lies above that curve. Prints a table and writes a picture. Killed and started again it goes on.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cli.configs import job_config
from holdfast.training.start import start_run

JOB = "continual/train/abcd_kl"
PLAIN_RATES = {"plain lr x 0.03": 0.03, "plain lr x 0.2": 0.2, "plain": 1.0}

CURRICULA = {
    "fineweb to sst2": ("fineweb", "PMD", "sst2", "PACKED"),
    "tinystories to shakespeare": ("tinystories", "PMD", "shakespeare", "PMD"),
}

PENALISED = ["stages.1.beta=1.0", "stages.1.update_reference=true"]
ARMS: dict[str, list[str]] = {
    **{name: [f"stages.1.lr={rate}"] for name, rate in PLAIN_RATES.items()},
    "nll_difference": [*PENALISED, "optimization.kl.estimator=nll_difference"],
    "forward KL": [*PENALISED, "optimization.kl.estimator=forward"],
    "reverse KL": [*PENALISED, "optimization.kl.estimator=reverse"],
    "replay 5 %": ["training.replay={rate: 0.05}"],
    "KL on 25 % old rows": [
        *PENALISED,
        "optimization.kl.estimator=forward",
        "optimization.kl.on=old",
        "training.replay={rate: 0.25, objective: kl}",
    ],
}


def options(curriculum: str, seed: int) -> dict[str, Any]:
    """The options that all arms of a seed share."""
    old, old_style, new, new_style = CURRICULA[curriculum]
    tokens_per_step = 16 * 128
    return {
        "stages": [
            {"name": old, "tokens": 400 * tokens_per_step, "data": [{"name": old, "style": old_style}]},
            {"name": new, "tokens": 150 * tokens_per_step, "data": [{"name": new, "style": new_style}]},
        ],
        "training": {"batch_size": 16, "seed": seed, "validation_steps": 128, "validation": False},
        "optimization": {"lr": 0.003, "schedule": "constant"},
        "architecture": {"preset": "tiny", "n_layers": 2, "n_embd": 96, "n_head": 4, "block_size": 128},
        "eval": {"evaluations": []},
        "logging": {"report_interval": 25, "checkpoint_interval": 100000},
    }


def run_arm(out: Path, curriculum: str, seed: int, arm: str) -> tuple[float, float]:
    """Bits per byte of the new and of the old dataset at the end of an arm's run."""
    group = curriculum.replace(" ", "-")
    name = f"{arm.replace(' %', 'pct').replace(' ', '-')}-{seed}"
    values = options(curriculum, seed)
    resolved = job_config(JOB, values, ARMS[arm])
    parent = None if arm == "plain" else str(out / "study" / group / f"plain-{seed}") + "@boundary_1"
    code = start_run(
        JOB, resolved.cfg, name=name, project="study", group=group, root=out, parent=parent, init_from=None
    )
    assert code == 0, f"{name} was stopped; start the study again to go on"
    results = json.loads((out / "study" / group / name / "results.json").read_text())
    last = dict(zip(results["tasks"], results["matrix"]["bits_per_byte"][-1], strict=True))
    old, _, new, _ = CURRICULA[curriculum]
    return last[new], last[old]


def saved_at_equal_loss(found: dict[str, list[tuple[float, float]]], arm: str) -> np.ndarray:
    """For each seed, how many bits per byte of the old an arm keeps beyond plain training with the same new loss."""
    saved = []
    for seed, (new, old) in enumerate(found[arm]):
        curve = sorted(found[name][seed] for name in PLAIN_RATES)
        news, olds = zip(*curve, strict=True)
        # What plain training would keep beyond its smallest learning rate is not known.
        saved.append(np.interp(new, news, olds, right=np.nan) - old)
    return np.array(saved)


def table(curriculum: str, found: dict[str, list[tuple[float, float]]]) -> str:
    """The arms of a curriculum as a Markdown table; mean ± standard deviation over seeds."""
    old, _, new, _ = CURRICULA[curriculum]
    lines = [
        f"| {curriculum} | learned new: {new}, bits/byte | kept old: {old}, bits/byte | saved at equal new loss |",
        "|---|---|---|---|",
    ]
    for arm, points in found.items():
        values = np.array(points)
        mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(2)
        saved = saved_at_equal_loss(found, arm)
        error = saved.std(ddof=1) if len(saved) > 1 else 0.0
        gain = f"{saved.mean():+.3f} ± {error:.3f}" if np.isfinite(saved).all() else "off the curve"
        gain = "" if arm in PLAIN_RATES else gain
        lines.append(f"| {arm} | {mean[0]:.3f} ± {spread[0]:.3f} | {mean[1]:.3f} ± {spread[1]:.3f} | {gain} |")
    return "\n".join(lines)


def draw(all_found: dict[str, dict[str, list[tuple[float, float]]]], path: Path) -> None:
    """Kept old against learned new, one point for each arm with its spread, and the curve of plain training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(all_found), figsize=(6 * len(all_found), 4.6), squeeze=False)
    for axis, (curriculum, found) in zip(axes[0], all_found.items(), strict=True):
        old, _, new, _ = CURRICULA[curriculum]
        curve = np.array([np.mean(found[name], axis=0) for name in PLAIN_RATES])
        axis.plot(curve[:, 0], curve[:, 1], color="0.6", zorder=1, label="plain over learning rates")
        for index, (arm, points) in enumerate(found.items()):
            values = np.array(points)
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(2)
            mean = values.mean(0)
            axis.errorbar(
                mean[0], mean[1], xerr=spread[0], yerr=spread[1], fmt="os^Dv<>P"[index % 8], label=arm, capsize=2
            )
        axis.set_xlabel(f"learned new: {new}, bits per byte (left is better)")
        axis.set_ylabel(f"kept old: {old}, bits per byte (down is better)")
        axis.set_title(curriculum)
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args()
    order = ["plain", *(arm for arm in ARMS if arm != "plain")]
    all_found = {}
    for curriculum in CURRICULA:
        found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        for seed in range(arguments.seeds):
            for arm in order:
                found[arm].append(run_arm(arguments.out, curriculum, seed, arm))
        all_found[curriculum] = found
        print(table(curriculum, found), flush=True)
    path = arguments.picture or arguments.out / "study" / "study.png"
    draw(all_found, path)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
