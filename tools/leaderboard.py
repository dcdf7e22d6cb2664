"""Writes docs/leaderboard.md from the results of the studies in examples/studies/results, and from nothing else.

What the README says of them, between its two marks, is written too.

python tools/leaderboard.py                       # write it
python tools/leaderboard.py --check               # exit 1 when it is not current
python tools/leaderboard.py --results FOLDER      # from other results, such as those of studies that still run

The verdicts are those of `holdfast verdict FILE`. What stands beside them is made from the same rows: see the functions
`equal_tokens`, `kl_and_forgetting` and `gap_to_joint`.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast.config import merge, read_yaml
from holdfast.errors import UserError
from holdfast.report.verdict_tables import interval, said, signed
from holdfast.studies.inference import LEVEL, Block, effect, point
from holdfast.studies.measured import measured
from holdfast.studies.records import costs_file, read_table
from holdfast.studies.results import Row, read_results
from holdfast.studies.study import BEFORE, BOUNDS, PLAIN, STAGES, nested, read_study
from holdfast.studies.verdict import BETTER, WORSE, Estimate, Judgement, Verdict, judge, judge_rows
from holdfast.studies.words import arm_words, ordered, plain_words
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve
from holdfast.types import Json

ROOT = Path(__file__).resolve().parents[1]
STUDIES, TARGET, README = ROOT / "examples" / "studies", ROOT / "docs" / "leaderboard.md", ROOT / "README.md"
BEGIN, END = "<!-- verdicts: written by tools/leaderboard.py -->", "<!-- verdicts end here -->"
# Arms whose objective holds a KL to the weights they began with on new rows, or an estimate of it.
MINIMISE_KL = ("forward KL", "reverse KL", "nll_difference", "ASFT")
NEAR = 1.5  # factor of steps between two checkpoints that plain may be interpolated between
ORDERS, LARGE = "order-", "-15m"
COMMAND = "holdfast study run examples/studies/*.yaml"
INTRODUCTION = f"""# Which way keeps the most?

Made by `{COMMAND}` and `python tools/leaderboard.py`, from
`examples/studies/results/*.csv` alone; do not edit it by hand.

A way is compared with the best that plain training does **while learning as much**: five learning rates or more, early
stopping, interpolation with the snapshot ([how that is judged](verdict.md)). Δ is how many bits per byte of the old
text it keeps more than that; its interval counts seeds and held-out documents and is adjusted for all arms of the
table. "Worse" asks for more: plain that learns *more*, by the margin δ, and still keeps more. Where no plain run learns
so much more, as beside ways that learn all there is, a Δ below 0 stays "no evidence". Where a way has a grid, one
configuration was chosen on other seeds. These are tiny models and short stages: the
page says what holds there, not what holds for yours; [the same command](howto-run-a-study.md) takes your config.
"""
LEGEND = """**new**, **old**: losses on held-out text at the end, in bits per byte, means over seeds; lower is better.
**s/step**: seconds of a training step. **old rows**: rows of the old data that an arm trained on. **worst old**: the
largest old loss at the measured points of the new stages. **Δ, equal total tokens**: against plain's rates at the end
of their runs, which saw as many tokens in all. **Δ, equal new tokens**: against plain's rates when they had seen as
many *new* tokens, for replayed rows take the place of new ones; between two checkpoints plain is interpolated in the
logarithm of steps. **relearn**: steps of training on the old data again, with a fresh optimizer at the base rate,
until the old loss is back where arms began; ≥ where some seeds were not back when it was given up. **KL on new**:
KL(before ‖ after) on held-out new rows, nats per token. **runs**: of the arm on judged seeds + on selection seeds."""


class Fit(NamedTuple):
    """How well one figure predicts another: R² of a straight line and of a parabola."""

    line: float
    parabola: float
    runs: int
    arms: int


@dataclass(frozen=True)
class Result:
    """One study: its file, its rows and what was judged from them."""

    name: str
    study: Path
    path: Path
    rows: tuple[Row, ...]
    found: Judgement

    @cached_property
    def config(self) -> Json:
        """What its file says of the runs' config."""
        return read_yaml(self.study).get("config") or {}

    @property
    def rewarms(self) -> bool:
        """Whether the learning rate is warmed up again in each stage."""
        return "rewarm" in str((self.config.get("optimization") or {}).get("schedule"))

    @property
    def title(self) -> str:
        """Its stages."""
        stages = self.config.get("stages") or []
        told = " → ".join(str(stage["name"]) for stage in stages) or self.name
        return f"{told} ({self.name})" if told != self.name else told

    @cached_property
    def setting(self) -> str:
        """Model, batch, learning rate and stages of its runs."""
        study = read_study(self.study)
        # Data that is not at hand changes nothing of this.
        stages = [{**stage, "data": [{"name": "lists"}]} for stage in study.stages]
        run = resolve(study.job, merge(config_classes(study.job), nested({**study.values, STAGES: stages})))
        each = run.curriculum.batch_size * run.curriculum.block_size
        told = ", ".join(f"{stage['name']} {stage['tokens'] // each:,} steps" for stage in study.stages)
        size = f"{run.model.num_parameters() / 1e6:.2f}M parameters on {run.flat_config()['tokenizer/name']}"
        return (
            f"{size}, trained from scratch; {told}; "
            f"{run.curriculum.batch_size} rows of {run.curriculum.block_size} tokens a step; learning rate × 1 is "
            f"{run.config.lr:g}, schedule {run.options.optim.schedule}"
        )

    @property
    def losses(self) -> str:
        """What old and new stand for."""
        told = read_yaml(self.study)
        new = told.get("new", "")
        mean = f"the mean of {' and '.join(new)}" if isinstance(new, list) else new
        return f"old is {' and '.join(told.get('old', []))}, new is {mean}"

    @cached_property
    def judged(self) -> list[Row]:
        """Rows of judged seeds, of the configurations that are judged."""
        chosen = {(arm.arm, arm.rate, arm.strength) for arm in self.found.measured.arms.values()}
        known = (PLAIN, BEFORE, *BOUNDS)
        return [
            row
            for row in self.rows
            if row.role != "selection" and (row.arm in known or (row.arm, row.learning_rate, row.strength) in chosen)
        ]

    @cached_property
    def costs(self) -> list[dict[str, str]]:
        """The costs of its runs, one line for each cell."""
        return read_table(costs_file(self.path))

    def ends(self, arm: str, rate: float | None = None) -> dict[int, list[Row]]:
        """Rows at the end of an arm's runs, by seed; of plain at a rate."""
        found: dict[int, list[Row]] = {}
        for row in self.judged:
            mine = row.arm == arm and rate in (None, row.learning_rate) and not (arm == PLAIN and row.strength)
            if mine:
                known = found.setdefault(row.seed, [row])
                if (row.steps or 0) > (known[0].steps or 0):
                    found[row.seed] = [row]
                elif row is not known[0] and (row.steps or 0) == (known[0].steps or 0):
                    known.append(row)
        return found


def old_of(rows: Sequence[Row]) -> float:
    """The old loss of some rows; documents weigh as many as they have bytes, tasks all the same."""
    tasks = {row.task: [each for each in rows if each.task == row.task] for row in rows}
    return float(np.mean([np.average([r.old for r in own], weights=[r.bytes for r in own]) for own in tasks.values()]))


def mean_old(ends: Mapping[int, Sequence[Row]]) -> str:
    return f"{np.mean([old_of(rows) for rows in ends.values()]):.3f}" if ends else "–"


def mean_new(ends: Mapping[int, Sequence[Row]]) -> str:
    return f"{np.mean([rows[0].new for rows in ends.values()]):.3f}" if ends else "–"


def read_result(study: Path, path: Path) -> Result:
    """The result of a study that has enough of its runs to be judged."""
    rows = tuple(read_results(path))
    return Result(study.stem, study, path, rows, judge_rows(rows))


# What stands beside the verdicts


def equal_tokens(result: Result) -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    """Verdicts against plain's rates at equal total tokens, and at equal new tokens where plain was measured there."""
    shares = {name: new_share(result, name) for name in result.found.measured.arms}
    judged = {share: at_share(result, share) for share in {1.0, *shares.values()}}
    total = judged[1.0] or {}
    new = {name: (judged[share] or {})[name] for name, share in shares.items() if judged[share]}
    return total, new


def new_share(result: Result, name: str) -> float:
    """The share of an arm's tokens that is new."""
    beside = result.found.measured.arms[name].beside
    if not beside.get("total_tokens"):
        return 1.0
    return round(beside["new_tokens"] / beside["total_tokens"], 2)


def at_share(result: Result, share: float) -> dict[str, Verdict] | None:
    """All arms against plain's rates after a share of the steps; None where plain was not measured near there."""
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in result.judged:
        if row.arm == PLAIN and not row.strength:
            runs.setdefault((row.seed, row.learning_rate, row.task, row.document), []).append(row)
    plain = [plain_after(rows, share) for rows in runs.values()]
    if any(row is None for row in plain):
        return None
    others = [row for row in result.judged if row.arm != PLAIN]
    study = measured([*others, *(row for row in plain if row is not None)], result.found.measured.base_rate)
    return dict(judge(study, margin=result.found.margin).primary)


def plain_after(rows: Sequence[Row], share: float) -> Row | None:
    """One run of plain on one document after a share of its steps, as if that were its end."""
    points = {row.steps or 0: row for row in rows}
    last = max(points)
    target = share * last
    nearest = min(points, key=lambda steps: abs(steps - target))
    if abs(nearest - target) <= 1:
        return replace(points[nearest], steps=last)
    below, above = ([s for s in points if (s > target) == side] for side in (False, True))
    if not below or not above or min(above) > NEAR * max(below):
        return None
    one, two = points[max(below)], points[min(above)]
    place = math.log(target / max(below)) / math.log(min(above) / max(below))
    old, new = (a + place * (b - a) for a, b in ((one.old, two.old), (one.new, two.new)))
    return replace(two, steps=last, old=old, new=new)


def relearned(ends: Mapping[int, Sequence[Row]]) -> str:
    """Mean steps to relearn; ≥ with how many seeds were back where not all were."""
    told = [rows[0].costs for rows in ends.values() if "relearn_steps" in rows[0].costs]
    if not told:
        return "–"
    back = sum(bool(costs["relearned"]) for costs in told)
    mean = np.mean([costs["relearn_steps"] for costs in told])
    return f"{mean:.0f}" if back == len(told) else f"≥ {mean:.0f} ({back} of {len(told)} back)"


def beside(ends: Mapping[int, Sequence[Row]], name: str, digits: str) -> str:
    """The mean of a figure that rows tell beside their losses."""
    values = [rows[0].costs[name] for rows in ends.values() if name in rows[0].costs]
    return f"{np.mean(values):{digits}}" if values else "–"


def worst_old(result: Result, arm: str, rate: float | None = None) -> str:
    """The mean over seeds of the largest old loss during the new stages; – where only the end was measured."""
    by_seed: dict[int, dict[int, list[Row]]] = {}
    for row in result.judged:
        if row.arm == arm and rate in (None, row.learning_rate) and not (arm == PLAIN and row.strength):
            by_seed.setdefault(row.seed, {}).setdefault(row.steps or 0, []).append(row)
    if not by_seed or any(len(points) < 2 for points in by_seed.values()):
        return "–"
    return f"{np.mean([max(map(old_of, points.values())) for points in by_seed.values()]):.3f}"


def kl_and_forgetting(result: Result, without: Sequence[str] = MINIMISE_KL) -> Fit | None:
    """How well KL on new data predicts the rise of the old loss over runs; None where it was not measured."""
    before = {seed: old_of(rows) for seed, rows in result.ends(BEFORE).items()}
    rates = sorted({row.learning_rate for row in result.judged if row.arm == PLAIN and row.learning_rate})
    arms = [(PLAIN, rate) for rate in rates]
    arms += [(arm.arm, arm.rate) for arm in result.found.measured.arms.values() if arm.arm not in without]
    points = [
        (rows[0].costs["new_kl"], old_of(rows) - before[seed])
        for arm, rate in arms
        for seed, rows in result.ends(arm, rate).items()
        if "new_kl" in rows[0].costs and seed in before
    ]
    if len(points) < 4:
        return None
    x, y = np.array(points).T
    fits = [
        1 - float(((y - np.polyval(np.polyfit(x, y, n), x)) ** 2).sum() / ((y - y.mean()) ** 2).sum()) for n in (1, 2)
    ]
    return Fit(fits[0], fits[1], len(points), len(arms))


def gap_to_joint(result: Result, arm: str) -> tuple[Estimate, Estimate] | None:
    """How much higher the old and the new loss of an arm are than those of training on all data mixed, paired."""
    own, joint = result.ends(arm), result.ends("joint")
    seeds = sorted({*own} & {*joint})
    if len(seeds) < 2:
        return None
    sides = [
        np.array([[row.old for row in sorted(side[seed], key=lambda r: (r.task, r.document))] for seed in seeds])
        for side in (own, joint)
    ]
    weights = np.array([row.bytes for row in sorted(own[seeds[0]], key=lambda r: (r.task, r.document))])
    new = np.array([[own[seed][0].new - joint[seed][0].new] for seed in seeds])
    found = [effect([Block(sides[0] - sides[1], weights)]), effect([Block(new, np.ones(1))])]
    halves = [point(each.degrees, LEVEL) * each.error for each in found]
    made = [
        Estimate(each.mean, each.error, each.mean - half, each.mean + half, float("nan"), LEVEL)
        for each, half in zip(found, halves, strict=True)
    ]
    return made[0], made[1]


# The page


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arms_table(result: Result) -> str:
    """Every arm: the verdict, and what stands beside it."""
    total, new = equal_tokens(result)
    head = ["arm", "verdict", "Δ [interval]", "new", "old", "worst old", "Δ, equal total tokens", "Δ, equal new tokens"]
    head += ["relearn", "KL on new", "s/step", "old rows", "runs"]
    rows = []
    for name, verdict in ordered(dict(result.found.primary)):
        arm = result.found.measured.arms[name]
        ends = result.ends(arm.arm, arm.rate)
        told = f"{name} ({result.found.chosen[name]})" if name in result.found.chosen else name
        selected = {
            (r.learning_rate, r.strength, r.seed) for r in result.rows if r.role == "selection" and r.arm == arm.arm
        }
        others = [interval(found[name].better) if name in found else "–" for found in (total, new)]
        rows.append(
            [
                *(told, said(verdict), interval(verdict.told), mean_new(ends), mean_old(ends)),
                *(worst_old(result, arm.arm, arm.rate), *others, relearned(ends), beside(ends, "new_kl", ".3f")),
                *(beside(ends, "step_seconds", ".3f"), beside(ends, "extra_rows", ".0f")),
                f"{len(ends)} + {len(selected)}",
            ]
        )
    return table(head, rows)


def plain_table(result: Result) -> str:
    """What arms begin with, plain at its rates, and the bounds."""
    found = result.found
    rows = [["before", *_ends(result.ends(BEFORE)), "–", "–", "–", "–", str(len(result.ends(BEFORE)))]]
    for rate in sorted({at.rate for at in found.measured.points}):
        ends, by = result.ends(PLAIN, rate), found.dominated.get(rate)
        note = "" if by is None else f", dominated by {found.measured.multiple(by)}"
        others = [worst_old(result, PLAIN, rate), relearned(ends), beside(ends, "new_kl", ".3f")]
        others.append(beside(ends, "step_seconds", ".3f"))
        rows.append([f"plain {found.measured.multiple(rate)}{note}", *_ends(ends), *others, str(len(ends))])
    for bound in BOUNDS:
        ends = result.ends(bound)
        if ends:
            rows.append([f"{bound} (a bound)", *_ends(ends), "–", "–", "–", "–", str(len(ends))])
    return table(["", "new", "old", "worst old", "relearn", "KL on new", "s/step", "runs"], rows)


def _ends(ends: Mapping[int, Sequence[Row]]) -> tuple[str, str]:
    return mean_new(ends), mean_old(ends)


def seconds(results: Iterable[Result]) -> float:
    """The time that runs took by their own clocks, each once."""
    return sum(sum({row["run"]: float(row.get("seconds") or 0) for row in result.costs}.values()) for result in results)


def count_runs(result: Result) -> int:
    """Runs behind a study: configurations whose options are equal in all, such as averages of plain, are one."""
    return len({(row["seed"], row["digest"].partition("-")[0]) for row in read_table(result.path)})


def size(result: Result) -> str:
    """Runs, seeds, margin and time behind a section."""
    found = result.found
    count = count_runs(result)
    chosen = f", {len(found.selection_seeds)} to choose on" if found.selection_seeds else ""
    spent = f"; {seconds([result]) / 3600:.1f} h by the runs' own clocks" if result.costs else ""
    return (
        f"[{result.study.name}](../examples/studies/{result.study.name}): {result.losses}; {result.setting}; "
        f"{count} runs; {len(found.measured.seeds)} judging seeds{chosen}; "
        f"δ = {found.margin:.3g} bits per byte ({found.margin_source}){spent}."
    )


def unmeasured(result: Result) -> str:
    """Which columns are empty, where the runs were not measured for them and are no more."""
    asked = read_yaml(result.study)
    ends = [rows[0].costs for rate in {at.rate for at in result.found.measured.points}
            for rows in result.ends(PLAIN, rate).values()]  # fmt: skip
    wanted = [
        ("relearn", "relearn_steps", asked.get("relearn")),
        ("KL on new", "new_kl", asked.get("drift")),
        ("s/step", "step_seconds", True),
    ]
    missing = [name for name, key, wished in wanted if wished and not any(key in costs for costs in ends)]
    return f"{', '.join(missing)}: not measured, these runs were made before that was recorded" if missing else ""


def in_words(found: Judgement) -> str:
    """The verdict on each arm, in a line of its own."""
    lines, told = [], set()
    for name, verdict in ordered(dict(found.primary)):
        lines.append(f"- {arm_words(name, verdict, found.outcomes[0], first=verdict.word not in told)}.")
        told.add(verdict.word)
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """What each study says, in a line."""
    lines = []
    for result in results:
        words: dict[str, list[str]] = {}
        for name, verdict in ordered(dict(result.found.primary)):
            size = f" ({signed(verdict.told.mean)})" if verdict.told and verdict.word in (BETTER, WORSE) else ""
            words.setdefault(verdict.word, []).append(f"{name}{size}")
        parts = [f"{word}: {', '.join(names)}" for word, names in words.items()]
        lines.append(f"- **{result.title}**, {len(result.found.measured.seeds)} seeds. {'; '.join(parts)}.")
    told = "What came out, in bits per byte kept beyond plain training that learns as much (for a way that learns\n"
    told += "more than every plain run: beyond plain where it learns most):"
    return "\n".join([told, "", *lines])


def section(result: Result) -> str:
    """One study, in words first."""
    notes = [*plain_words(result.found), *result.found.notes, *filter(None, [unmeasured(result)])]
    parts = [f"## {result.title}", in_words(result.found), arms_table(result), plain_table(result)]
    parts.append(
        "\n".join([f"- {size(result)}", *(f"- {note}." for note in notes), *(f"- {each}" for each in claims(result))])
    )
    return "\n\n".join(parts)


def claims(result: Result) -> list[str]:
    """What the literature says, here."""
    told, fits = [], [kl_and_forgetting(result), kl_and_forgetting(result, ())]
    if fits[0] is not None and fits[1] is not None:
        told.append(
            f"KL on new data as a predictor of forgetting (2509.04259), over arms that do not minimise it and plain's "
            f"rates: R² = {fits[0].line:.2f} (a parabola {fits[0].parabola:.2f}), n = {fits[0].runs} runs of "
            f"{fits[0].arms} settings; with those that minimise it ({', '.join(MINIMISE_KL)}) R² = {fits[1].line:.2f} "
            f"({fits[1].parabola:.2f}), n = {fits[1].runs}."
        )
    for name in result.found.measured.arms:
        gap = gap_to_joint(result, name) if name.startswith("replay 5 %") else None
        if gap is not None:
            warmed = " with re-warming" if result.rewarms else ""
            told.append(
                f"{name}{warmed} and joint training (2403.08763), its losses minus those of all data mixed from the "
                f"start with as many tokens: old {interval(gap[0])}, new {interval(gap[1])} bits per byte (above 0: "
                f"joint training is better); 95 % intervals, paired over {len(result.ends('joint'))} seeds."
            )
    return told


def orders(results: Sequence[Result]) -> str:
    """How the verdicts of the orders of one curriculum differ."""
    names = [*dict.fromkeys(name for result in results for name in result.found.primary)]
    head = ["arm", *(result.title.split(" (")[0] for result in results)]
    rows = []
    for name in names:
        found = [result.found.primary.get(name) for result in results]
        rows.append([name, *("–" if each is None else f"{each.word}, {interval(each.told)}" for each in found)])
    lost = [["plain × 1 loses", *(_lost(result) for result in results)]]
    everywhere = [name for name in names if all(name in result.found.primary for result in results)]
    same = [name for name in everywhere if len({result.found.primary[name].word for result in results}) == 1]
    other = [name for name in everywhere if name not in same]
    words = f"The verdict is the same in all {len(results)} orders for {', '.join(same) or 'no arm'}"
    words += f"; it depends on the order for {', '.join(other)}." if other else "."
    if len(everywhere) < len(names):
        words += f" Not run in every order: {', '.join(name for name in names if name not in everywhere)}."
    firsts = [ordered(dict(result.found.primary))[0] for result in results]
    told = [name if verdict.word == BETTER else "none that is better" for name, verdict in firsts]
    words += f" Keeps most beyond plain, in each order: {', '.join(told)}."
    return "\n\n".join(["## Three stages in three orders", words, table(head, [*lost, *rows])])


def _lost(result: Result) -> str:
    """What plain at the base rate loses, bits per byte."""
    ends, before = result.ends(PLAIN, result.found.measured.base_rate), result.ends(BEFORE)
    values = [old_of(rows) - old_of(before[seed]) for seed, rows in ends.items() if seed in before]
    return f"{np.mean(values):.3f}" if values else "–"


def larger(small: Result, large: Result) -> str:
    """Whether the order of the ways holds for the larger model."""
    shared = [name for name in large.found.primary if name in small.found.primary]
    rows = []
    for name in shared:
        both = [each.found.primary[name] for each in (small, large)]
        rows.append([name, *(f"{each.word}, {interval(each.told)}" for each in both)])
    sides = [[name for name, _ in ordered(dict(each.found.primary)) if name in shared] for each in (small, large)]
    words = "The order of the ways is the same." if sides[0] == sides[1] else (
        f"The order is {', '.join(sides[0])} for the small model and {', '.join(sides[1])} for the large one."
    )  # fmt: skip
    return "\n\n".join(["## A larger model", words, table(["arm", small.title, large.title], rows)])


def headlines(results: Sequence[Result]) -> str:
    """What the README says: a line for each study."""
    lines = []
    for result in results:
        arms = ordered(dict(result.found.primary))
        kept = [f"{name} {interval(verdict.told)}" for name, verdict in arms if verdict.word == BETTER]
        others: dict[str, list[str]] = {}
        for name, verdict in arms:
            if verdict.word != BETTER:
                others.setdefault(verdict.word, []).append(name)
        told = [f"more is kept by {', '.join(kept)}"] if kept else ["no way is shown to keep more"]
        told += [f"{word}: {', '.join(names)}" for word, names in others.items()]
        lines.append(f"- **{result.title}**, {len(result.found.measured.seeds)} seeds: {'; '.join(told)}.")
    return "\n".join(lines)


def with_headlines(readme: str, results: Sequence[Result]) -> str:
    """The README with what the studies say between its two marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{headlines(results)}\n\n{END}{rest.split(END)[1]}"


def behind(results: Sequence[Result]) -> str:
    """Command, time and machines of all of it."""
    machines = sorted({row["machine"] for result in results for row in result.costs if row.get("machine")})
    runs = sum(len({row["run"] for row in result.costs}) for result in results)
    if not runs:
        return f"Made by `{COMMAND}`."
    unknown = [result.name for result in results if not result.costs]
    more = f" The clocks of {' and '.join(unknown)} were not kept." if unknown else ""
    return (
        f"Made by `{COMMAND}`: {sum(map(count_runs, results)):,} runs, of which {runs} took "
        f"{seconds(results) / 3600:.1f} hours by their own clocks (steps, compilation, evaluation) on "
        f"{'; '.join(machines)}, which other work shared.{more}"
    )


def read_studies(results: Path) -> tuple[list[Result], list[str]]:
    """The studies that can be judged, and the others with the reason."""
    found, missing = [], []
    for study in sorted(STUDIES.glob("*.yaml")):
        path = results / f"{study.stem}.csv"
        try:
            found.append(read_result(study, path))
        except UserError as error:
            missing.append(f"{study.stem} ({'not run' if not path.is_file() else error})")
    return found, missing


def page(found: Sequence[Result], missing: Sequence[str]) -> str:
    """The whole page; studies whose runs do not suffice are named."""
    by_name = {result.name: result for result in found}
    turned = [result for result in found if result.name.startswith(ORDERS)]
    parts = [INTRODUCTION, *([summary(found), behind(found), LEGEND] if found else [])]
    parts += [section(result) for result in found if result not in turned]
    pairs = [(by_name[name.removesuffix(LARGE)], by_name[name]) for name in by_name if name.endswith(LARGE)
             and name.removesuffix(LARGE) in by_name]  # fmt: skip
    parts += [larger(small, large) for small, large in pairs]
    parts += [orders(turned)] if len(turned) > 1 else []
    parts += [section(result).replace("## ", "### ", 1) for result in turned]
    if missing:
        parts.append("Not enough runs for a verdict yet: " + "; ".join(missing) + ".")
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not current")
    parser.add_argument("--results", type=Path, default=STUDIES / "results", help="folder of the files of results")
    parser.add_argument("--to", type=Path, default=TARGET, help="the page")
    arguments = parser.parse_args()
    found, missing = read_studies(arguments.results)
    texts = {arguments.to: page(found, missing)}
    if arguments.to == TARGET:
        texts[README] = with_headlines(README.read_text(encoding="utf-8"), found)
    if arguments.check:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
