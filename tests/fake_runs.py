"""Folders that look like runs of five stages, made in milliseconds: what reports, comparisons and the board read."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config import merge, to_yaml
from holdfast.curriculum import Curriculum
from holdfast.evaluation.matrix import Point, ScoreMatrix, task_homes, task_names, tasks_not_learned
from holdfast.evaluation.sums import WEIGHTS, Answers, HeldOut, TaskSums, write_sums
from holdfast.report.timeline import read_curriculum
from holdfast.training.config import config_classes
from holdfast.training.triggers import measurements

JOB = "continual/train/abcd_kl"
NAMES = ("stories", "mnli", "sst2", "arithmetic", "speeches")
EVALUATIONS = ("mnli", "sst2")
BLOCK, BATCH, STEPS = 32, 8, 40
ROWS, DOCUMENTS = 24, 12  # held-out ones


def config_values(
    seed: int = 0,
    lr: float = 1e-3,
    stages: int = 5,
    steps: int = STEPS,
    overlap: float = 0.5,
    replay: float = 0.0,
    mixture_unit: str = "rows",
) -> Any:
    """Options of a run of some stages, each of so many steps."""
    made = [
        {
            "name": f"{name} stage",
            "tokens": BLOCK * BATCH * steps,
            "data": [{"name": name}],
            "overlap": overlap if i else None,
        }
        | ({"beta": 0.2, "update_reference": i in (1, 3)} if i else {})
        for i, name in enumerate(NAMES[:stages])
    ]
    return {
        "stages": made,
        "training": {"batch_size": BATCH, "seed": seed, "replay": {"rate": replay}, "mixture_unit": mixture_unit},
        "architecture": {"block_size": BLOCK},
        "optimization": {"lr": lr, "kl": {"estimator": "forward"}},
        "eval": {"evaluations": list(EVALUATIONS)},
        "logging": {"report_interval": 2},
    }


def held_out_losses(curriculum: Curriculum, kept: float) -> dict[str, list[float]]:
    """Held-out losses before every step: they fall while their data is seen and rise afterwards, the less is kept."""
    levels = {source.name: [5.0] for source in curriculum.sources}
    for step in range(curriculum.total_steps):
        for source, share in curriculum.weights_at(step).items():
            level = levels[source.name][-1]
            forgotten = 0.01 * (1 - share) * (1 - kept) * max(3.0 - level, 0.0)
            levels[source.name].append(level + 0.06 * share * (1.5 - level) + forgotten)
    return levels


UNIFORM = {"nll": math.log(256), "bits_per_byte": 8.0}  # of a byte-level model that knows nothing


def held_out_rows(loss: float, seed: str) -> HeldOut:
    """Rows with that mean loss, noise that differs between evaluations, and the same spread in all of them."""
    random_ = random.Random(seed)
    own = np.linspace(-0.3, 0.3, ROWS) + [0.02 * random_.gauss(0, 1) for _ in range(ROWS)]
    tokens, none = np.full(ROWS, float(BLOCK)), np.zeros(ROWS)
    nll = (loss + own - own.mean()) * tokens
    return HeldOut(nll, tokens, tokens, np.arange(ROWS) * DOCUMENTS // ROWS, none, none, none)


class FakeRun:
    """Writes the files of a run up to a step.

    Args:
        kept: from 0 to 1, how much is not forgotten.
        sums: whether evaluations keep their sums, as those of earlier versions did not.
    """

    def __init__(
        self,
        path: Path,
        *,
        kept: float = 0.5,
        probes: bool = True,
        evaluate: bool = True,
        sums: bool = True,
        **values: Any,
    ) -> None:
        self.path, self.kept, self.probes, self.evaluate, self.sums = path, kept, probes, evaluate, sums
        classes = config_classes(JOB)
        config = config_values(**values)
        self.cfg = merge(classes, config)
        found = read_curriculum(JOB, config)
        assert found is not None
        self.curriculum = found
        self.losses = held_out_losses(found, kept)
        self.random = random.Random(f"{values.get('seed', 0)} {kept}")
        self.points: list[dict[str, Any]] = []
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(to_yaml(self.cfg, classes, JOB))
        self.metrics = (path / "metrics.jsonl").open("w")
        self.step = -1

    @property
    def total_steps(self) -> int:
        return self.curriculum.total_steps

    def go(self, step: int | None = None, *, finished: bool | None = None) -> "FakeRun":
        """Write everything up to a step, the last unless given; then the results so far."""
        last = self.total_steps if step is None else step
        for at in range(self.step + 1, last + 1):
            self._step(at)
        self.step = last
        self.metrics.flush()
        self._results(last == self.total_steps if finished is None else finished)
        return self

    def _record(self, kind: str, step: int, **values: Any) -> None:
        tokens = step * self.curriculum.tokens_per_step
        self.metrics.write(json.dumps({"kind": kind, "step": step, "tokens": tokens, **values}) + "\n")

    def _step(self, step: int) -> None:
        curriculum = self.curriculum
        stage = curriculum.stage_at(max(step - 1, 0))
        if step and step % 2 == 0:
            rows = {s.name: round(w * BATCH) for s, w in curriculum.weights_at(step - 1).items() if w * BATCH >= 0.5}
            ce = sum(self.losses[name][step - 1] * n for name, n in rows.items()) / BATCH
            beta = curriculum.beta_at(step - 1)
            penalty = 0.1 * stage * self.random.random()
            seconds = {
                "compute": 0.5,
                "data": 0.02,
                "evaluation": 0.3,
                "compile": 4.0 if step == 2 else 0.0,
                "checkpoint": 0.05,
            }
            self._record(
                "train", step, loss=ce + beta * penalty, ce=ce, penalty=penalty, beta=beta,
                learning_rate=1e-3 * min(1, step / 10), grad_norm=1.0, rows=rows, stage=stage, skipped=0,
                seconds=seconds, memory=2**30,
            )  # fmt: skip
        if step and step % 20 == 0:
            losses = {name: self.losses[name][step] for name in self.datasets}
            self._record("validation", step, loss=losses[self.datasets[stage]], losses=losses, stage=stage)
        found = measurements(curriculum).get(step) if self.evaluate else None
        probe = self.probes and step % 4 == 0 and any(abs(step - b) <= 12 for b in curriculum.boundaries())
        if found is not None:
            self._evaluate(step, stage, " ".join(found.labels), found.row)
        elif probe and self.evaluate:
            self._evaluate(step, stage, "probe", None)
        if step in [curriculum.stage_start(index) for index in range(len(curriculum.stages))]:
            index = curriculum.stage_at(step)
            self._record("checkpoint", step, tags=[f"boundary_{index}"])
            entered = curriculum.stages[index]
            taken = step in curriculum.snapshot_steps()
            self._record(
                "stage", step, stage=index, name=entered.name, beta=entered.beta, reference_updated=taken,
                processes=1, devices=1, mesh={"data": 1},
            )  # fmt: skip
        if step == curriculum.total_steps:
            self._record("checkpoint", step, tags=["final"])

    @property
    def datasets(self) -> list[str]:
        return [source.name for source in self.curriculum.sources]

    def _evaluate(self, step: int, stage: int, at: str, row: int | None) -> None:
        scores: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        sums: dict[str, TaskSums] = {}
        for name in self.datasets:
            loss = self.losses[name][step] + 0.002 * self.random.random()
            kl = 0.05 * stage + 0.01 if stage else None
            scores[name] = {"nll": loss, "bits_per_byte": loss / math.log(2), "kl_forward": kl, "kl_reverse": kl}
            intervals[name] = {
                "nll": [loss - 0.02, loss + 0.02],
                "bits_per_byte": [loss / 0.7 - 0.03, loss / 0.69 + 0.03],
            }
            rows = held_out_rows(loss, f"{step} {name}")
            sums[name] = TaskSums(rows)
            facts[name] = {"kind": "held_out", "rows": ROWS, "documents": DOCUMENTS, "uniform": UNIFORM}
            if name in EVALUATIONS:
                right = self._examples(step, name, loss, at == "probe")
                accuracy = sum(right) / len(right)
                scores[name]["accuracy"] = accuracy
                intervals[name]["accuracy"] = [max(accuracy - 0.1, 0), min(accuracy + 0.1, 1)]
                facts[name] |= {"kind": "choice", "count": 60, "chance": 0.5, "majority": 0.5, "one_class": False}
                answers = Answers(tuple(map(str, range(len(right)))), ("",) * len(right), tuple(right))
                sums[name] = TaskSums(rows, answers)
        if self.sums:
            write_sums(self.path / "evaluations" / str(step), {WEIGHTS: sums})
        tokens = step * self.curriculum.tokens_per_step
        point = {"row": row, "stage": stage, "at": at, "scores": scores, "intervals": intervals, "facts": facts}
        self.points.append({"step": step, "tokens": tokens, **point})
        self._record("evaluation", step, **point)

    def _examples(self, step: int, name: str, loss: float, probe: bool) -> list[bool]:
        number = 60
        right_share = min(max(1.1 - (loss - 1.5) / 3, 0.5), 0.98)
        lines, right = [], []
        for index in range(number):
            good = (index * 37 % number) / number < right_share
            right.append(good)
            scores = [-0.5 - index / 100, -3.0] if good else [-3.0, -0.6 - index / 100]
            lines.append(
                {
                    "id": str(index), "prompt": f"Review: film number {index} <b>& co</b>\nSentiment:",
                    "answer": " good", "chosen": " good" if good else " bad", "right": good, "group": "",
                    "choices": [" good", " bad"], "label": 0, "scores": scores, "per_byte": scores,
                }
            )  # fmt: skip
        if not probe:
            path = self.path / "evaluations" / str(step) / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return right

    def _results(self, finished: bool) -> None:
        if not self.points:
            return
        stages = self.curriculum.stages
        datasets = [[s.name for s in stage.mixture] for stage in stages]
        tasks = task_names([name for name in EVALUATIONS if name in self.datasets], datasets)
        points = [Point.from_dict(point) for point in self.points]
        homes = task_homes(tasks, datasets)
        missed = tasks_not_learned(points, tasks, homes)
        matrix = ScoreMatrix.from_points(points, [stage.name for stage in stages], tasks, homes, missed)
        results = matrix.to_results(points, finished=finished)
        results["points"] = self.points
        (self.path / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False))
