"""The scripts below examples/ run to their ends."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_examples import SHARED
from holdfast.report.run_files import open_run
from training import tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPT = EXAMPLES / "pretrained.py"
MODEL = SHARED / "weights" / "stories260K"
ARMS = ("full", "full-slower", "lora", "kl", "replay", "average-half", "average-best")


def run(out: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(MODEL), "--seeds", "1", "--steps", "2", "--rows", "8", "--out", str(out)],
        env={**os.environ, "XLA_FLAGS": "", "HOLDFAST_DATA": str(SHARED / "data")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the shared weights are not here (HOLDFAST_SHARED names their folder)")
def test_the_pretrained_study_compares_all_arms_and_does_nothing_twice(tmp_path: Path) -> None:
    printed, log = run(tmp_path)
    table = printed[printed.index("| |") :]
    scores = {
        arm: [float(value) for value in values.split("|")]
        for arm, values in re.findall(r"^\| ([a-z -]+) \| (.+) \|$", table, re.MULTILINE)
    }
    assert list(scores) == ["before training", *ARMS]
    assert scores["full"][0] < scores["before training"][0]  # the new was learned
    assert scores["average-best"][2] <= scores["full"][2]
    runs = tmp_path / "pretrained" / "arms"
    assert {path.name for path in runs.iterdir()} == {f"{arm}-s0" for arm in ARMS}
    for arm in ARMS:  # stage 0 changes nothing: the first two rows are the imported model's
        first, second, _ = open_run(runs / f"{arm}-s0").results["matrix"]["nll"]
        assert first == second
    assert (tmp_path / "pretrained" / "compare.html").is_file()
    assert "before training (step 0)" in log
    again, log = run(tmp_path)
    assert again.endswith(table)
    assert "before training (step 0)" not in log


def answered(question: str) -> str:
    """What the toy of self-replay asks for."""
    task, asked = question[0], question[1:-1]
    if task in "rs":
        return asked[::-1] if task == "r" else "".join(sorted(asked))
    total = sum(map(int, asked.split("+")))
    return f"{total:02}"[::-1] if task == "a" else str(total % 10)


def test_the_toy_of_self_replay_asks_what_it_says_and_its_arms_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("self_replay_toy", EXAMPLES / "self_replay_toy.py")
    assert spec is not None
    assert spec.loader is not None
    toy: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    monkeypatch.setattr(toy, "TRAIN", 300)
    toy.write_tasks(tmp_path)
    for task in toy.TASKS:
        splits = {}
        for split in ("train", "validation"):
            lines = (tmp_path / task / f"{split}.jsonl").read_text().splitlines()
            splits[split] = {row["q"]: row["a"] for row in map(json.loads, lines)}
            assert all(answered(question) == answer for question, answer in splits[split].items())
        assert not set(splits["train"]) & set(splits["validation"])
        assert len(splits["validation"]) == toy.HELD_OUT
    for overrides in toy.ARMS.values():
        config = toy.config(tmp_path, 500)
        curriculum = tiny.resolved(config.pop("job"), config, *overrides).curriculum
        assert [stage.name for stage in curriculum.stages] == list(toy.TASKS)
        assert (curriculum.batch_size, curriculum.total_steps) == (128, 4 * 500)
