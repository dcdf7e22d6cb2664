"""Curves as runs draw them after a switch, and folders of runs that hold such curves."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.analysis.forecast import TUNED, Course, Curve, learning_curve
from holdfast.config import merge, to_yaml
from holdfast.evaluation.sums import WEIGHTS, HeldOut, TaskSums, write_sums
from holdfast.training.config import config_classes

JOB = "continual/train/abcd_kl"
START, LENGTH, BATCH, BLOCK = 40, 160, 8, 16
LEVELS = {"lists": 2.5, "arithmetic": 4.0}  # bits per byte at the switch
ROWS = 12


def changes(times: Any, replay: float = 0.0, scale: float = 1.3, pace: float = 4.0) -> tuple[Any, Any]:
    """New and old changes at some times: a power law, and a jump from which replay comes back."""
    new = learning_curve(np.asarray(times, float), np.array([math.log(scale), math.log(pace), TUNED.tail, TUNED.onset]))
    rate = TUNED.exchange[0] + TUNED.exchange[1] * math.sqrt(replay)
    old = 0.25 * (1 - np.exp(-np.asarray(times, float) / 5)) + rate * new
    return new, old


def curve(times: Any, values: Any, level: float = 4.0, **more: Any) -> Curve:
    """A curve whose measurements all saw the same rows."""
    return Curve(np.asarray(times, float), np.asarray(values, float), level, **more)


def constant(steps: int = LENGTH, rate: float = 1.0, **more: Any) -> Course:
    """A stage of one learning rate."""
    return Course(np.full(steps, rate), **more)


def write_run(path: Path, until: int, replay: float = 0.0, options: Any = None, few: int = ROWS) -> Path:
    """Write a run of two stages that has come so many steps into the second; probes see the first few rows."""
    values: Any = {
        "stages": [
            {"name": name, "tokens": steps * BATCH * BLOCK, "data": [{"name": name, "style": "PADDED"}]}
            for name, steps in (("lists", START), ("arithmetic", LENGTH))
        ],
        "training": {"batch_size": BATCH, "replay": {"rate": replay} if replay else None},
        "architecture": {"block_size": BLOCK},
        "optimization": {"lr": 1e-3, "schedule": "constant"},
        "eval": {"evaluations": []},
    }
    for section, more in (options or {}).items():
        values[section] = {**values[section], **more} if isinstance(values.get(section), dict) else more
    # Without what other tests registered in this process: whoever reads the run may not know it.
    classes = [cls for cls in config_classes(JOB) if cls.__module__.startswith("holdfast.")]
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(merge(classes, values), classes, JOB))
    lines = [_train(START + until)]
    for step in (0, *range(4, LENGTH, 4), LENGTH):
        if step <= until:
            at = {0: "boundary", 16: "asked", LENGTH: "end"}.get(step, "probe")
            lines.append(_evaluation(path, step, at, replay, few if at == "probe" else ROWS))
    if until == LENGTH:
        lines.append({"kind": "checkpoint", "step": START + LENGTH, "tokens": 0, "tags": ["final"]})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _train(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "tokens": step * BATCH * BLOCK, "loss": 2.0, "stage": 1, "rows": {}}


def _evaluation(path: Path, step: int, at: str, replay: float, rows: int) -> dict[str, Any]:
    new, old = changes([float(step)], replay)
    scores, sums = {}, {}
    for name, change in (("lists", float(old[0])), ("arithmetic", float(new[0]))):
        # Rows differ in their loss, and from the third on in how it changes: probes of three rows see other numbers.
        own = LEVELS[name] + np.linspace(-0.5, 0.5, ROWS) + change * np.where(np.arange(ROWS) < 3, 0.8, 1.0 + 0.2 / 3)
        nll, tokens, none = own[:rows] * BLOCK * math.log(2), np.full(rows, float(BLOCK)), np.zeros(rows)
        sums[name] = TaskSums(HeldOut(nll, tokens, tokens, np.arange(rows), none, none, none))
        mean = float(own[:rows].mean())
        scores[name] = {"nll": mean * math.log(2), "bits_per_byte": mean}
    write_sums(path / "evaluations" / str(START + step), {WEIGHTS: sums})
    row = {"boundary": 1, "end": 2}.get(at)
    point = {"row": row, "stage": 1, "at": at, "scores": scores}
    return {"kind": "evaluation", "step": START + step, "tokens": (START + step) * BATCH * BLOCK, **point}
