"""The spec's five stages on real data with GPT-2's tokenizer; needs `../shared`, and skips without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[3] / "shared"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SHARED / "data" / "mnli").is_dir(), reason=f"no real data: {SHARED}/data is not there"),
]


def test_five_stages_and_four_evaluations_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast"]
    env = {
        **os.environ,
        "XLA_FLAGS": "",
        "HOLDFAST_DATA": str(SHARED / "data"),
        "HOLDFAST_CACHE": str(tmp_path / "cache"),
    }
    config = tmp_path / "abcd.yaml"
    subprocess.run([*command, "configure", "continual/train/abcd_kl", config], env=env, check=True)
    overrides = [
        "training.batch_size=4",
        "training.tokens=[4096,4096,4096,4096,4096]",
        "architecture.block_size=128",
        "architecture.n_layers=1",
        "architecture.n_embd=32",
        "architecture.n_head=2",
        f"tokenizer.name={SHARED / 'tokenizers' / 'gpt2'}",
        "training.validation_steps=8",
        "eval.limit=20",
    ]
    run = [*command, "run", config, *overrides, "--out", tmp_path / "runs"]
    subprocess.run(run, env=env, check=True)
    results = json.loads((tmp_path / "runs" / "general" / "default" / "abcd" / "results.json").read_text())
    tasks = results["tasks"]
    assert results["stages"] == ["fineweb", "mnli", "qqp", "sst2", "siqa"]
    assert set(tasks) == {"fineweb", "mnli", "qqp", "sst2", "siqa"}
    accuracy, nll = results["matrix"]["accuracy"], results["matrix"]["nll"]
    assert len(accuracy) == len(nll) == 6
    for row in range(6):
        assert all(value is not None for value in nll[row])
        for task, value in zip(tasks, accuracy[row], strict=True):
            assert (value is None) == (task == "fineweb")
