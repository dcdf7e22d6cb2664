"""What a run keeps of its evaluations is enough to compute every interval again, and to say what was known before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.evaluation.sums import EMA, WEIGHTS, read_sums
from holdfast.report import open_run
from holdfast.report.page import render
from holdfast.report.verdicts import sentence, verdicts
from training import tiny

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[3] / "shared"))
MODEL = SHARED / "weights" / "stories260K"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything that has intervals: questions, texts, divergences, probes, averaged weights."""
    trainer = tiny.trainer(
        "continual/train/abcd_kl",
        tiny.CONTINUAL,
        tmp_path_factory.mktemp("measured"),
        "training.ema=0.75",
        "training.validation=false",
        "eval.evaluations=[arithmetic]",
        "eval.probe_interval=2",
        "eval.probe_window=2",
        "eval.probe_rows=4",
    )
    trainer.run()
    folder: Path = trainer.spec.run_dir
    return folder


def test_every_interval_of_the_results_can_be_computed_from_the_kept_sums(run_dir: Path) -> None:
    results = json.loads((run_dir / "results.json").read_text())
    recomputed: set[tuple[str, str]] = set()

    def check(step: int, kind: str, at: str, record: dict[str, Any]) -> None:
        sums = read_sums(run_dir / "evaluations" / str(step), kind)
        assert sums.keys() == record["intervals"].keys() == record["scores"].keys()
        for task, intervals in record["intervals"].items():
            found = sums[task].intervals()
            assert {name: list(ends) for name, ends in found.items()} == intervals
            assert sums[task].counts() == record["counts"][task]
            assert found.keys() == {name for name, score in record["scores"][task].items() if score is not None}
            recomputed.update((f"{kind} {at}", name) for name in found)
            assert all(low <= record["scores"][task][name] <= high for name, (low, high) in found.items())

    for point in results["points"]:
        at = "probe" if point["at"] == "probe" else "row"
        check(point["step"], WEIGHTS, at, point)
        if EMA in point:
            check(point["step"], EMA, at, point[EMA])
    measures = {"accuracy", "nll", "bits_per_byte"}
    divergences = {"kl_forward", "kl_reverse"}  # once there is a reference; the probes of this run come before it
    for kind, expected in {"tasks row": measures | divergences, "ema row": measures | divergences}.items():
        assert {name for known, name in recomputed if known == kind} == expected
    assert measures <= {name for known, name in recomputed if known == "tasks probe"}


def test_scores_are_the_ratios_of_the_kept_sums(run_dir: Path) -> None:
    for point in json.loads((run_dir / "results.json").read_text())["points"]:
        record = json.loads((run_dir / "evaluations" / str(point["step"]) / "sums.json").read_text())
        for task, scores in point["scores"].items():
            for part in ("rows", "documents"):
                columns = record["tasks"][task][part]
                assert scores["nll"] == pytest.approx(sum(columns["nll"]) / sum(columns["tokens"]), rel=1e-12)
                bits = sum(columns["nll"]) / sum(columns["bytes"]) / np.log(2)
                assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
            if "questions" in record["tasks"][task]:
                assert scores["accuracy"] == pytest.approx(np.mean(record["tasks"][task]["questions"]["right"]))


def test_the_verdicts_of_a_run_and_of_its_average_are_paired(run_dir: Path) -> None:
    run = open_run(run_dir)
    assert run.averaged is not None
    for each in (run, run.averaged):
        found = {verdict.task: verdict for verdict in verdicts(each)}
        assert found["lists"].interval is not None
        assert found["lists"].unit == "documents"


KNOWN = """
job: continual/train/abcd
stages:
- {{name: stories, tokens: 2048, data: [{{name: tinystories, style: PMD}}], lr: 0}}
- {{name: plays, tokens: 20480, data: [{{name: shakespeare, style: PMD}}]}}
architecture: {{from: {model}, block_size: 128}}
training: {{batch_size: 8, validation_steps: 48, validation: false, seed: {seed}}}
optimization: {{lr: {rate}}}
logging: {{report_interval: 10}}
data: {{sources: {{shakespeare: {{path: {shared}/data/shakespeare/train.jsonl,
  validation: {shared}/data/shakespeare/validation.jsonl, text: text}}}}}}
"""


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"no pretrained model: {MODEL} is not there")
def test_a_pretrained_model_that_forgets_what_it_knew_before(tmp_path: Path) -> None:
    """A stage at learning rate 0 teaches nothing: what the model lost afterwards, it had known before."""
    env = {**os.environ, "XLA_FLAGS": "", "HOLDFAST_DATA": str(SHARED / "data"), "COLUMNS": "400"}
    command = [sys.executable, "-m", "holdfast"]
    for name, rate in (("fast", 0.003), ("slow", 0.0003)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(KNOWN.format(model=MODEL, shared=SHARED, rate=rate, seed=0))
        run = [*command, "run", config, "--out", tmp_path / "runs"]
        shown = subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout
    folders = [tmp_path / "runs" / "general" / "default" / name for name in ("fast", "slow")]
    run = open_run(folders[0])
    found = {each.task: each for each in verdicts(run)}
    stories, plays = found["tinystories"], found["shakespeare"]
    assert (stories.word, stories.own) == ("forgotten", "known before")
    assert stories.before == stories.after
    assert 0 < stories.interval[0] < stories.change < stories.interval[1]
    assert stories.unit == "documents"
    assert plays.word == "learned"
    said = sentence(run)
    assert "knew tinystories" in said
    assert f"forgot tinystories (bits per byte {stories.lost.removeprefix('bits per byte ')})" in said
    assert f"over {stories.num} documents" in said
    assert "knew tinystories" in shown  # on the terminal, of the second run
    assert "forgot tinystories" in shown
    page = render(run)
    assert "known before, forgotten" in page
    assert stories.changed in page
    compared = [*command, "compare", *map(str, folders)]
    told = subprocess.run(compared, env=env, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    for text in (told, (tmp_path / "compare.html").read_text()):
        assert "known before" in text or "knew tinystories" in text
        assert "forgot" in text
