"""What holds the old? Plain training, penalties and replay on two real curricula, judged where they learn as much.

    python examples/study.py --table                                         # the tables, from study.csv alone
    HOLDFAST_DATA=../shared/data python examples/study.py [--seeds 5] [--out runs]

Every arm of a seed branches from the same checkpoint at the end of the first dataset. What a run ended with is a row of
`study.csv` beside this file; what has its row is not run again, and a study that was killed goes on. `frontier.py` says
what an arm is compared with.
"""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from frontier import LEVEL, Plain, Verdict, judge

JOB = "continual/train/abcd_kl"
RESULTS = Path(__file__).with_name("study.csv")
BASE_RATE = 0.003
PLAIN, BEFORE = "plain", "before"

PENALISED = ["stages.1.beta=1.0", "stages.1.update_reference=true"]
ARMS: dict[str, list[str]] = {
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


class Curriculum(NamedTuple):
    """Two datasets with their styles, and the multiples of the base learning rate at which plain training is run."""

    old: str
    old_style: str
    new: str
    new_style: str
    rates: tuple[float, ...]


RATES = (0.03, 0.1, 0.2, 0.5, 1.0)
CURRICULA = {
    "tinystories to shakespeare": Curriculum("tinystories", "PMD", "shakespeare", "PMD", RATES),
    # Penalties and replay end beyond the smallest of the five.
    "fineweb to sst2": Curriculum("fineweb", "PMD", "sst2", "PACKED", (0.01, *RATES)),
}


class Row(NamedTuple):
    """What one run ended with, in bits per byte; `before` is what all runs of its seed begin with."""

    curriculum: str
    arm: str
    seed: int
    learning_rate: float
    old: float
    new: float


def read_rows(path: Path) -> list[Row]:
    """The rows of earlier runs."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(row["curriculum"], row["arm"], int(row["seed"]), *(float(row[name]) for name in Row._fields[3:]))
            for row in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: list[Row]) -> None:
    """All rows in a fixed order, the file whole or not at all."""
    from holdfast.execution.files import write_atomically

    arms = [BEFORE, PLAIN, *ARMS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    names = list(CURRICULA)
    for row in sorted(rows, key=lambda r: (names.index(r.curriculum), arms.index(r.arm), r.learning_rate, r.seed)):
        writer.writerow([*row[:3], f"{row.learning_rate:g}", f"{row.old:.5f}", f"{row.new:.5f}"])
    write_atomically(path, text.getvalue())


def learning_rate(multiple: float) -> float:
    """A multiple of the base rate, as `study.csv` has it.

    >>> learning_rate(0.1)
    0.0003
    """
    return round(multiple * BASE_RATE, 12)


def arms_of(curriculum: str) -> list[tuple[str, float]]:
    """The arms of each seed with their learning rates; the run that the others branch from is the first."""
    plain = [(PLAIN, learning_rate(rate)) for rate in sorted(CURRICULA[curriculum].rates, reverse=True)]
    return [*plain, *((arm, BASE_RATE) for arm in ARMS)]


def options(curriculum: str, seed: int) -> dict[str, Any]:
    """The options that all arms of a seed share."""
    data = CURRICULA[curriculum]
    tokens_per_step = 16 * 128
    return {
        "stages": [
            {
                "name": data.old,
                "tokens": 400 * tokens_per_step,
                "data": [{"name": data.old, "style": data.old_style}],
            },
            {
                "name": data.new,
                "tokens": 150 * tokens_per_step,
                "data": [{"name": data.new, "style": data.new_style}],
            },
        ],
        "training": {"batch_size": 16, "seed": seed, "validation_steps": 128, "validation": False},
        "optimization": {"lr": BASE_RATE, "schedule": "constant"},
        "architecture": {"preset": "tiny", "n_layers": 2, "n_embd": 96, "n_head": 4, "block_size": 128},
        "eval": {"evaluations": []},
        "logging": {"report_interval": 25, "checkpoint_interval": 100000},
    }


def run_name(arm: str, seed: int, rate: float) -> str:
    """The name of a run's folder.

    >>> run_name("plain", 3, 0.1), run_name("plain", 3, 1.0), run_name("replay 5 %", 0, 1.0)
    ('plain-lr-x-0.1-3', 'plain-3', 'replay-5pct-0')
    """
    slower = f" lr x {rate:g}" if rate != 1 else ""
    return f"{arm}{slower}-{seed}".replace(" %", "pct").replace(" ", "-")


def run_arm(out: Path, curriculum: str, seed: int, arm: str, rate: float) -> list[Row]:
    """Train an arm and read what it ended with, and what it began with."""
    from holdfast.cli.configs import job_config
    from holdfast.execution import ExecutionSpec
    from holdfast.training.run import start_run

    group, multiple = curriculum.replace(" ", "-"), round(rate / BASE_RATE, 6)
    name = run_name(arm, seed, multiple)
    overrides = ARMS.get(arm, [f"stages.1.lr={multiple}"])
    run = job_config(JOB, options(curriculum, seed), overrides).resolved()
    trunk = run_name(PLAIN, seed, 1.0)
    parent = None if name == trunk else str(out / "study" / group / trunk) + "@boundary_1"
    code = start_run(run, ExecutionSpec(name=name, project="study", group=group, root=out, parent=parent))
    assert code == 0, f"{name} was stopped; start the study again to go on"
    results = json.loads((out / "study" / group / name / "results.json").read_text())
    data = CURRICULA[curriculum]
    before, after = (dict(zip(results["tasks"], row, strict=True)) for row in results["matrix"]["bits_per_byte"][-2:])
    return [
        Row(curriculum, BEFORE, seed, 0.0, before[data.old], before[data.new]),
        Row(curriculum, arm, seed, rate, after[data.old], after[data.new]),
    ]


def run_missing(path: Path, out: Path, seeds: int) -> None:
    """Run the arms that have no row yet, and keep each row as soon as there is one."""
    found = {row[:4]: row for row in read_rows(path)}
    for curriculum in CURRICULA:
        for seed in range(seeds):
            arms = arms_of(curriculum)
            missing = [(arm, rate) for arm, rate in arms if (curriculum, arm, seed, rate) not in found]
            # The others branch from the first; where its run is still there, this takes no time.
            for arm, rate in dict.fromkeys([*(arms[:1] if missing else []), *missing]):
                for row in run_arm(out, curriculum, seed, arm, rate):
                    found[row[:4]] = row
                write_rows(path, list(found.values()))


class Study(NamedTuple):
    """All runs of a curriculum whose seeds are complete."""

    plain: Plain
    old_before: np.ndarray
    arms: dict[str, tuple[np.ndarray, np.ndarray]]


def study_of(rows: list[Row], curriculum: str) -> Study | None:
    """The seeds of which every run is there, together; None if there are fewer than two."""
    found = {row[1:4]: row for row in rows if row.curriculum == curriculum}

    def has_all(seed: int) -> bool:
        return all((arm, seed, rate) in found for arm, rate in arms_of(curriculum))

    seeds = [seed for seed in sorted({row.seed for row in found.values()}) if has_all(seed)]
    if len(seeds) < 2:
        return None

    def losses(arm: str, rate: float, field: str) -> np.ndarray:
        return np.array([getattr(found[arm, seed, rate], field) for seed in seeds])

    multiples = sorted(CURRICULA[curriculum].rates)
    plain = Plain(
        np.array(multiples),
        np.stack([losses(PLAIN, learning_rate(rate), "new") for rate in multiples], axis=1),
        np.stack([losses(PLAIN, learning_rate(rate), "old") for rate in multiples], axis=1),
        losses(BEFORE, 0.0, "new"),
    )
    arms = {arm: (losses(arm, BASE_RATE, "new"), losses(arm, BASE_RATE, "old")) for arm in ARMS}
    return Study(plain, losses(BEFORE, 0.0, "old"), arms)


def spread(values: np.ndarray) -> str:
    """Mean ± standard deviation over seeds."""
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def tables(curriculum: str, study: Study) -> str:
    """Plain training over its rates, and the verdict on every arm, as Markdown."""
    data, plain = CURRICULA[curriculum], study.plain
    head = f"{data.new}, bits/byte | kept old: {data.old}, bits/byte"
    lines = [f"| {curriculum}: plain | learned new: {head} | |", "|---|---|---|---|"]
    lines.append(f"| before | {spread(plain.new_before)} | {spread(study.old_before)} | |")
    dominated = plain.dominated()
    for index, rate in enumerate(plain.rates):
        note = f"dominated by rate × {dominated[rate]:g}" if rate in dominated else ""
        lines.append(f"| rate × {rate:g} | {spread(plain.new[:, index])} | {spread(plain.old[:, index])} | {note} |")
    verdicts = judge(plain, study.arms)
    lines += ["", f"| {curriculum}: arm | learned new | kept old | Δ₊ | Δ at δ = 0 | δ × slope | Δ₋ | verdict |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for arm, (new, old) in study.arms.items():
        lines.append(f"| {arm} | {spread(new)} | {spread(old)} | {' | '.join(cells(verdicts[arm]))} |")
    runs = len(plain.new_before) * (len(plain.rates) + len(study.arms))
    lines += ["", f"δ = {plain.margin:.4f} bits per byte; {len(plain.new_before)} seeds, {runs} runs; {FAMILY}"]
    return "\n".join(lines)


FAMILY = (
    f"Holm over {len(ARMS)} arms at a one-sided level of {LEVEL:g}. "
    "Conditional on this held-out set; each seed has a parent of its own, shared by all its arms."
)


def cells(verdict: Verdict) -> list[str]:
    """The last columns of an arm's line."""
    estimates = [
        "–" if part is None else f"{part.mean:+.3f} [{part.low:+.3f}, {part.high:+.3f}]"
        for part in (verdict.better, verdict.worse)
    ]
    numbers = ["–" if value is None else f"{value:+.3f}" for value in (verdict.without_margin, verdict.margin_worth)]
    words = "; ".join([verdict.words, *verdict.notes])
    return [estimates[0], *numbers, estimates[1], f"**{words}**" if words.startswith(("better", "worse")) else words]


def draw(studies: dict[str, Study], path: Path) -> None:
    """Kept old against learned new: plain over its rates, with every arm and its spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(studies), figsize=(6.4 * len(studies), 4.8), squeeze=False)
    for axis, (curriculum, study) in zip(axes[0], studies.items(), strict=True):
        data, plain = CURRICULA[curriculum], study.plain
        fine = np.linspace(np.log(plain.rates[0]), np.log(plain.rates[-1]), 200)
        curve = [np.interp(fine, np.log(plain.rates), losses.mean(0)) for losses in (plain.new, plain.old)]
        axis.plot(*curve, color="0.6", zorder=1, label="plain, linear in log learning rate")
        axis.plot(plain.new.mean(0), plain.old.mean(0), "o", color="0.4", ms=4)
        for rate, new, old in zip(plain.rates, plain.new.mean(0), plain.old.mean(0), strict=True):
            axis.annotate(f"× {rate:g}", (new, old), textcoords="offset points", xytext=(5, 5), fontsize=7)
        for marker, (arm, (new, old)) in zip("s^Dv<", study.arms.items(), strict=True):
            bars = {"xerr": new.std(ddof=1), "yerr": old.std(ddof=1)}
            axis.errorbar(new.mean(), old.mean(), **bars, fmt=marker, label=arm, capsize=2)
        if plain.new.mean(0).max() > 4 * plain.new.mean(0).min():
            axis.set_xscale("log")
        axis.set_xlabel(f"learned new: {data.new}, bits per byte (left is better)")
        axis.set_ylabel(f"kept old: {data.old}, bits per byte (down is better)")
        axis.set_title(f"{curriculum}, {len(plain.new_before)} seeds")
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the rows of all runs")
    parser.add_argument("--picture", type=Path, default=None, help="draw the arms and plain's frontier there")
    parser.add_argument("--table", action="store_true", help="train nothing: the tables of the rows that are there")
    arguments = parser.parse_args()
    if not arguments.table:
        run_missing(arguments.results, arguments.out, arguments.seeds)
    rows = read_rows(arguments.results)
    studies = {name: found for name in CURRICULA if (found := study_of(rows, name)) is not None}
    print("\n\n".join(tables(name, study) for name, study in studies.items()))
    if arguments.picture is not None:
        draw(studies, arguments.picture)


if __name__ == "__main__":
    main()
