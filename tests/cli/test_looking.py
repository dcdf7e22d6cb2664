"""Commands that look at a run's model: eval, generate, forgotten."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_examples import write_jsonl
from holdfast.cli.app import app
from holdfast.cli.eval import eval_command
from holdfast.cli.generate import generate_command
from holdfast.cli.look import forgotten_command
from holdfast.config import to_yaml
from holdfast.errors import UserError
from holdfast.training.config import config_classes
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


def test_a_checkpoint_is_named_beside_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for name, given in ((f"{run}@boundary_1", None), (run, "boundary_1"), (f"{run}@final", None)):
        eval_command(name, checkpoint=given, tasks="lists", as_json=True)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    generate_command(f"{run}@boundary_1,final", "sort 1 2 ->", tokens=5)
    beside = capsys.readouterr().out
    generate_command(run, "sort 1 2 ->", ["boundary_1", "final"], tokens=5)
    assert capsys.readouterr().out == beside
    for command in (eval_command, lambda name, checkpoint: generate_command(name, "a", [checkpoint])):
        with pytest.raises(UserError, match="in one of the two places"):
            command(f"{run}@final", checkpoint="boundary_1")
    with pytest.raises(UserError, match="no checkpoint 'boundary_7'"):
        generate_command(f"{run}@boundary_7", "a")


@pytest.mark.slow
def test_diff_of_two_checkpoints_of_a_run(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    trained = [f"{run}@0", str(run), "--limit", "8", "--json", "--html", str(page)]
    forwards = CliRunner().invoke(app, ["diff", *trained])
    found = json.loads(forwards.stdout)
    assert forwards.exit_code == 0, forwards.output
    assert found["lost"] == []
    assert all(each["rise"] < 0 for each in found["data"].values())
    backwards = CliRunner().invoke(app, ["diff", str(run), f"{run}@0", "--limit", "8"])
    assert backwards.exit_code == 3, backwards.output
    assert "Lost beyond 0.05" in backwards.output
    assert "<h1>What was lost?</h1>" in page.read_text()
    unknown = CliRunner().invoke(app, ["diff", str(run), str(run), "--data", "nothing_of_that_name"])
    assert isinstance(unknown.exception, UserError)


@pytest.fixture(scope="module")
def orphan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data is gone: a folder that HOLDFAST_DATA named, and files of the user's own."""
    folder = tmp_path_factory.mktemp("orphan")
    root = folder / "root"
    write_jsonl(
        root / "notes" / "train.jsonl", [{"text": f"note {n} of many, each its own {n * n}"} for n in range(400)]
    )
    asks = [{"q": f"What is {n}?", "a": f" {n % 2}"} for n in range(400)]
    write_jsonl(folder / "asks.jsonl", asks)
    source = {"path": str(folder / "asks.jsonl"), "prompt": "{q}", "answer": "{a}", "choices": [" 0", " 1"]}
    values = {
        **CONTINUAL,
        "data": {"sources": {"asks": source}, "root": str(root), "cache": str(folder / "cache")},
        "stages": [
            {"tokens": 8 * 32 * 4, "data": [{"name": "notes"}]},
            {"tokens": 8 * 32 * 4, "data": [{"name": "asks", "style": "PADDED"}]},
            {"tokens": 8 * 32 * 4, "data": [{"name": "lists", "style": "PADDED"}]},
        ],
        "eval": {"evaluations": ["asks", "lists"], "limit": 8},
    }
    made = trainer(JOB, values, folder)
    made.run()
    config = made.spec.run_dir / "config.yaml"
    written = options(JOB, {**values, "data": {**values["data"], "cache": str(folder / "other")}})
    config.write_text(to_yaml(written, config_classes(JOB), JOB))
    shutil.rmtree(root)
    (folder / "asks.jsonl").unlink()
    run_dir: Path = made.spec.run_dir
    return run_dir


@pytest.mark.parametrize("root", ["gone", pytest.param("null", marks=pytest.mark.slow)])
def test_a_model_speaks_without_its_training_data(
    root: str, orphan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    where = [] if root == "gone" else ["data.root=null"]
    generate_command(orphan, "note ", tokens=3)
    assert capsys.readouterr().out.startswith("note ")
    eval_command(orphan, where, as_json=True)
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["lists"]
    left_out = [line.removeprefix("left out: ") for line in said.err.splitlines() if line.startswith("left out: ")]
    assert [line.partition(":")[0] for line in left_out] == ["notes", "asks"]
    eval_command(orphan, where, tasks="lists")
    said = capsys.readouterr()
    assert "lists" in said.out
    assert "left out" not in said.err
    with pytest.raises(UserError, match="notes: there is no dataset 'notes'"):
        eval_command(orphan, where, tasks="notes,lists")
    assert "lists" in capsys.readouterr().out


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
