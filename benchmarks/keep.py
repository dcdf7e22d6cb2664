"""Are budgets (`keep`) kept? Runs on real rows, judged on held-out documents that the controller never saw.

    python -m benchmarks.keep --minutes 30      # runs what has no row yet, for about so long
    python -m benchmarks.keep --summary         # what the rows say

Two curricula, 20 seeds, budgets of 0.02, 0.05 and 0.15 bits per byte; the same new data without replay and budget,
which says where one is exceeded at all; five fixed weights of the KL on old rows on other seeds, for what new loss a
fixed weight would cost; and budgets on the model's own samples, judged on fresh ones. Rows of
`benchmarks/results/keep.csv` are final: what has its row is not run again.

The model is tiny, so that 20 seeds fit an hour of two cores; it is trained on the old data once, and all seeds go on
from it. Documents of both splits of the old data are mixed and split anew, at random: the given validation split of
tinystories is of another kind than its train split (longer stories, half as many "Once upon a time"), and budgets
promise something of the rows that they are measured on.
"""

import argparse
import csv
import functools
import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.bench import SHARED
from holdfast.cli.configs import job_config
from holdfast.evaluation.budgets import held_out_rise
from holdfast.execution import ExecutionSpec

if TYPE_CHECKING:
    from holdfast.training.base import Trainer

RESULTS = Path(__file__).parent / "results" / "keep.csv"
JOB, FIRST_JOB = "continual/train/abcd_kl", "gpt/train/pretrain"
BUDGETS = (0.02, 0.05, 0.15)
WEIGHTS = (0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS, OTHER_SEEDS = tuple(range(20)), (100, 101)
BLOCK = 64
FIRST_BATCH, FIRST_STEPS = 16, 800  # of the model that knows the old
ARCHITECTURE = {"n_layers": 2, "n_embd": 32, "n_head": 2, "block_size": BLOCK}
LATER = {"fixed": 2, "self": 20}  # rounds of seeds that other arms are ahead
FRESH_SAMPLES, FRESH_SEED = 128, 12_345


class Curriculum(NamedTuple):
    """What is learned after what.

    Args:
        lr: of the new data.
        held_out: documents of the old data that judge.
        replayed: documents of the old data that are replayed; the first model has seen all others too.
        num_chars: that held-out and replayed documents are cut to.
    """

    old: str
    new: str
    lr: float
    held_out: int
    replayed: int
    num_chars: int


CURRICULA = {
    "stories": Curriculum("tinystories", "shakespeare", 0.00015, 512, 820, 500),
    "speeches": Curriculum("speeches", "german", 0.0001, 256, 300, 1200),
}


class Length(NamedTuple):
    """How much new data a run sees, and at what learning rate over time."""

    batch: int
    steps: int
    schedule: dict[str, Any]


LONG = Length(32, 400, {"schedule": "constant"})
SHORT = Length(16, 300, {"schedule": "wsd", "warmup_pct": 0.2})


class Arm(NamedTuple):
    """One kind of run: its name, its budget or weight, its options and its length."""

    name: str
    value: float
    overrides: tuple[str, ...]
    length: Length = LONG


ANCHORED = "training.replay={rate: 0.5, objective: kl}"
SELF = "training.replay={source: self, rate: 0.5, objective: kl}"


def arms(curriculum: Curriculum) -> Iterator[tuple[Arm, tuple[int, ...]]]:
    """All arms with their seeds, those first that say most."""
    yield Arm("plain", 0.0, ()), SEEDS
    for budget in BUDGETS:
        yield Arm("keep", budget, (ANCHORED, f"keep.{curriculum.old}={budget}")), SEEDS
    anchor = ("stages.1.update_reference=true", "optimization.kl={estimator: forward, on: old}")
    for weight in WEIGHTS:
        yield Arm("fixed", weight, (ANCHORED, f"stages.1.beta={weight}", *anchor)), OTHER_SEEDS
    for budget in BUDGETS:
        for length in (SHORT, LONG):
            yield Arm("self", budget, (SELF, f"keep.self={budget}"), length), SEEDS


def write_split(curriculum: Curriculum, folder: Path) -> dict[str, dict[str, str]]:
    """Documents of both splits of the old data, mixed and split anew; sources, as a config has them."""
    names = ("first", "train", "validation")
    paths = {split: folder / f"{curriculum.old}-{split}.jsonl" for split in names}
    if not all(path.exists() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        given = [SHARED / "data" / curriculum.old / f"{split}.jsonl" for split in ("train", "validation")]
        texts = [json.loads(line)["text"] for path in given for line in path.read_text("utf-8").splitlines()]
        random.Random(curriculum.old).shuffle(texts)
        cut, held_out = [text[: curriculum.num_chars] for text in texts], curriculum.held_out
        parts = (texts[held_out:], cut[held_out : held_out + curriculum.replayed], cut[:held_out])
        for path, part in zip(paths.values(), parts, strict=True):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    validation = str(paths["validation"])
    return {
        curriculum.old: {"path": str(paths["train"]), "validation": validation},
        "first": {"path": str(paths["first"]), "validation": validation},
    }


def shared_options(curriculum: Curriculum, seed: int, folder: Path) -> dict[str, Any]:
    """The options of all runs."""
    return {
        "data": {"root": str(SHARED / "data"), "sources": write_split(curriculum, folder), "max_leak": 1.0},
        "tokenizer": {"name": str(SHARED / "weights" / "stories260K" / "tok512.bin")},
        "training": {"seed": seed, "validation_steps": 100_000, "validation": False},
        "architecture": ARCHITECTURE,
        "eval": {"evaluations": [], "batch_size": 128},
        "logging": {"report_interval": 20, "checkpoint_interval": 100_000},
    }


@functools.cache
def first_model(curriculum: Curriculum, folder: Path) -> Path:
    """The run that has learned the old data, made unless it is there.

    Little more than an epoch: rows that a model knows by heart lose more than its held-out loss does.
    """
    values = shared_options(curriculum, 0, folder)
    tokens = FIRST_STEPS * FIRST_BATCH * BLOCK
    values["training"] |= {"batch_size": FIRST_BATCH, "per_device_batch_size": FIRST_BATCH, "tokens": tokens}
    values["training"] |= {"dataset": [{"name": "first", "style": "PMD"}], "evaluate": False}
    values["optimization"] = {"lr": 0.004, "schedule": "wsd"}
    spec = ExecutionSpec(name=f"first-{curriculum.old}", root=folder)
    trained(FIRST_JOB, values, (), spec)
    return spec.run_dir


def options(curriculum: Curriculum, length: Length, seed: int, folder: Path) -> dict[str, Any]:
    """The options that all arms of a length and a seed share."""
    tokens, values = length.batch * BLOCK, shared_options(curriculum, seed, folder)
    values["training"] |= {"batch_size": length.batch, "per_device_batch_size": length.batch}
    return {
        **values,
        "stages": [
            # A step that changes nothing: the model knows the old already.
            {"tokens": tokens, "data": [{"name": curriculum.old, "style": "PMD"}], "lr": 0.0},
            {"tokens": length.steps * tokens, "data": [{"name": curriculum.new, "style": "PMD"}], "optimizer": "reset"},
        ],
        "optimization": {"lr": curriculum.lr, **length.schedule},
    }


def measured(name: str, arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
    """Run an arm to its end in a folder of its own, and what came of it."""
    curriculum = CURRICULA[name]
    first, started = first_model(curriculum, folder), time.process_time()
    scratch = Path(tempfile.mkdtemp(prefix="keep-"))
    try:
        spec = ExecutionSpec(name=arm.name, root=scratch, init_from=str(first))
        trainer = trained(JOB, options(curriculum, arm.length, seed, folder), arm.overrides, spec)
        results = json.loads((spec.run_dir / "results.json").read_text())
        points = results["points"]
        rise = held_out_rise(curriculum.old, 1, spec.run_dir, points)
        assert rise is not None
        steered = results.get("keep", {"certificates": [{}]})["certificates"][-1]
        control = next(iter(steered.get("control", {"": {"rise": None}}).values()))["rise"]
        records = [json.loads(line) for line in (spec.run_dir / "metrics.jsonl").read_text().splitlines()]
        kept = [record["keep"] for record in records if record.get("keep") and record["kind"] == "train"]
        return {
            "curriculum": name,
            "arm": arm.name,
            "value": arm.value,
            "seed": seed,
            "steps": arm.length.steps,
            "lr": curriculum.lr,
            **{end: f"{rise[end]:.5f}" for end in ("rise", "low", "high")},
            "documents": rise["num"],
            "new": f"{points[-1]['scores'][curriculum.new]['bits_per_byte']:.5f}",
            "control": "" if control is None else f"{control:.5f}",
            "fresh": f"{fresh_drift(trainer):.5f}" if arm.name == "self" else "",
            "alpha": steered.get("alpha", ""),
            "multiplier": f"{next(iter(kept[-1].values()))['multiplier']:.3f}" if kept else "",
            "seconds": f"{time.process_time() - started:.1f}",
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fresh_drift(trainer: "Trainer") -> float:
    """KL(snapshot ‖ model) in bits per byte on samples of the snapshot that no run has seen."""
    import numpy as np

    from holdfast.data.rows import RowArrays
    from holdfast.evaluation.forward import Runner
    from holdfast.evaluation.perplexity import padded_row_sums
    from holdfast.evaluation.scoring import Sums
    from holdfast.training.self_replay import sample_rows
    from holdfast.training.step import plain

    state, run = trainer.state, trainer.resolved
    runner: Runner = Runner(run.model, trainer.topology)
    reference, params = plain(state, state.reference_params()), plain(state, state.params)
    sample = functools.partial(sample_rows, seed=FRESH_SEED, temperature=1.0, eot_id=run.tokenizer.eot_id)
    numbers = np.arange(FRESH_SAMPLES, dtype=np.int32)
    rows = sample(runner, reference, numbers, vocab_size=run.tokenizer.vocab_size)
    mask = np.ones((len(rows), rows.shape[1] - 1), np.int32)
    arrays = RowArrays(rows[:, :-1].copy(), rows[:, 1:].copy(), mask, None, None)  # type: ignore[arg-type]  # one text a row
    sums = Sums(*runner.call(padded_row_sums, (params, reference), (*arrays,)))
    num_bytes = run.tokenizer.token_bytes()[rows[:, 1:]].sum()
    return float(np.sum(sums.kl_forward) / (num_bytes * math.log(2)))


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


def trained(job: str, values: dict[str, Any], overrides: Sequence[str], spec: ExecutionSpec) -> "Trainer":
    """The trainer of a run that has come to its end; programs that were compiled once are not compiled again."""
    import jax

    from holdfast.training.run import make_trainer, use_compilation_cache

    run = job_config(job, values, list(overrides)).resolved()
    use_compilation_cache(run.options.data)
    # Runs of one kind compile the same programs, of which many are small: together they take seconds of each run.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    trainer = make_trainer(run, spec)
    trainer.run()
    return trainer


def missing() -> Iterator[tuple[str, Arm, int]]:
    """What has no row yet: seed by seed, so that a part says something of every budget; budgets on real rows first."""
    done = {
        (row["curriculum"], row["arm"], float(row["value"]), int(row["steps"]), int(row["seed"])) for row in known()
    }
    wanted = [
        (seeds.index(seed) + LATER.get(arm.name, 0), name, arm, seed)
        for name, curriculum in CURRICULA.items()
        for arm, seeds in arms(curriculum)
        for seed in seeds
    ]
    for _, name, arm, seed in sorted(wanted, key=lambda each: each[0]):
        if (name, arm.name, arm.value, arm.length.steps, seed) not in done:
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
                every = [row for row in here if row["arm"] == arm and float(row["value"]) == budget]
                for steps in sorted({row["steps"] for row in every}):
                    told = _budget_line([row for row in every if row["steps"] == steps], plain, budget, arm, here)
                    if told:
                        yield f"{name}: {told}"


def _budget_line(found: list[dict[str, str]], plain: dict[str, float], budget: float, arm: str, here: list[Any]) -> str:
    if arm == "keep":
        found = [row for row in found if plain.get(row["seed"], -1.0) > budget]  # where it is exceeded without
    if not found:
        return ""
    column = "rise" if arm == "keep" else "fresh"
    rises = [float(row[column]) for row in found]
    broken, alphas = sum(rise > budget for rise in rises), [float(row["alpha"] or 0) for row in found]
    line = (
        f"{arm} {budget:g}, {found[0]['steps']} steps: {len(found)} runs, {broken} broken ({broken / len(found):.0%}), "
        f"median use {statistics.median(rises) / budget:.0%}, median α {statistics.median(alphas):.2f}, new loss "
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
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/keep"), help="of the first models")
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    asked = parser.parse_args()
    if not asked.summary:
        if not (SHARED / "data" / "tinystories").is_dir():
            raise SystemExit(f"no {SHARED / 'data'} (HOLDFAST_SHARED names the folder of real data)")
        end = time.monotonic() + 60 * asked.minutes
        for name, arm, seed in missing():
            if time.monotonic() > end:
                break
            append(measured(name, arm, seed, asked.folder.resolve()))
    print(f"{len(known())} rows, {len(list(missing()))} runs are missing")
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
