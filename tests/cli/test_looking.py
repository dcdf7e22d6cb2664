"""Commands that look at a run's model: eval, generate, forgotten."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.eval import eval_command
from holdfast.cli.forgotten import forgotten_command
from holdfast.cli.generate import generate_command
from holdfast.config import to_yaml
from holdfast.errors import UserError
from holdfast.training.jobs import config_classes
from training.tiny import CONTINUAL, options, trainer

JOB = "continual/train/abcd_kl"
SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[3] / "shared"))
STORIES = SHARED / "weights" / "stories260K"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("looking")
    before = os.environ.get("HOLDFAST_CACHE")
    os.environ["HOLDFAST_CACHE"] = str(folder / "cache")
    made = trainer(JOB, CONTINUAL, folder)
    made.run()
    config = made.spec.run_dir / "config.yaml"
    if not config.exists():
        config.write_text(to_yaml(options(JOB, CONTINUAL), config_classes(JOB), JOB))
    yield made.spec.run_dir
    if before is None:
        del os.environ["HOLDFAST_CACHE"]
    else:
        os.environ["HOLDFAST_CACHE"] = before


def test_eval_gives_what_the_run_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eval_command(run, checkpoint="final", out=tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    results = json.loads((run / "results.json").read_text())
    for column, task in enumerate(results["tasks"]):
        for measure in ("accuracy", "nll", "bits_per_byte", "kl_forward"):
            assert found[task]["measures"][measure] == pytest.approx(results["matrix"][measure][-1][column], rel=1e-4)
    assert len((tmp_path / "lists.jsonl").read_text().splitlines()) == 8
    eval_command(run, ["eval.limit=3"], checkpoint="boundary_1", tasks="lists")
    table = capsys.readouterr().out
    assert "lists" in table
    assert "arithmetic" not in table
    with pytest.raises(UserError, match="no evaluation 'nothing'"):
        eval_command(run, tasks="nothing")


def test_generate_says_the_same_again_and_shows_checkpoints_side_by_side(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_command(run, "sort 1 2 ->", tokens=5, seed=1)
    first = capsys.readouterr().out
    assert first.startswith("sort 1 2 ->")
    generate_command(run, "sort 1 2 ->", tokens=5, seed=1)
    assert capsys.readouterr().out == first
    generate_command(run, "sort 1 2 ->", ["boundary_1", "final"], tokens=5)
    both = capsys.readouterr().out
    assert "boundary_1" in both
    assert "final" in both


HARNESS = """
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
test_split: validation
"""
HARNESS_TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: [" 1", " 2"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    "own_generate": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["<none>"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
    "own_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.mark.extra
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_eval_runs_tasks_of_the_harness(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for number in range(4):
        prompt = f"sort {number} 1 ->"
        capsys.readouterr()
        generate_command(run, prompt, tokens=4, temperature=0)
        said = capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")
        rows.append({"prompt": prompt, "label": number % 2, "said": said})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in HARNESS_TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{HARNESS.format(path=path)}{text}")
    eval_command(run, ["eval.limit=null"], harness=",".join(HARNESS_TASKS), harness_tasks=tmp_path)
    found = json.loads(capsys.readouterr().out)
    assert {name: each["sample_len"] for name, each in found.items()} == dict.fromkeys(HARNESS_TASKS, 4)
    assert 0 <= found["own_choice"]["acc,none"] <= 1
    assert found["own_generate"]["exact_match,none"] == 1.0  # greedy decoding says what `generate` says
    assert 1 < found["own_rolling"]["bits_per_byte,none"] < 12
    with pytest.raises(UserError, match="--tasks and --out"):
        eval_command(run, tasks="lists", harness="own_choice")


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not there")
def test_a_pretrained_model_tells_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    generate_command(STORIES, "", tokens=40, temperature=0)
    said = capsys.readouterr().out
    # The text that llama2.c itself makes of it at temperature 0.
    assert said.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside in the")
    with pytest.raises(UserError, match="has no checkpoints"):
        generate_command(STORIES, "", ["final"])
    with pytest.raises(UserError, match="not the folder of a run"):
        generate_command(STORIES.parent, "")


def test_forgotten_lists_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forgotten_command(run, "lists", known="1", lost="2", as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["before"]["right"] and not line["after"]["right"] for line in lines)
    assert all(line["before"]["prompt"] == line["after"]["prompt"] for line in lines)
    forgotten_command(run, "lists")
    assert "examples that were right at step" in capsys.readouterr().out
    with pytest.raises(UserError, match="stages measured: 0"):
        forgotten_command(run, "lists", known="nothing")
