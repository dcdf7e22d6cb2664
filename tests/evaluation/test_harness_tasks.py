"""Tasks of lm-evaluation-harness in the matrix: its own numbers, paired questions, failures that cost a cell."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny
from evaluation.harness_folder import KINDS, LABELS, sources, write_tasks
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation import harness_tasks
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.evaluator import Evaluator
from holdfast.evaluation.harness import HarnessModel, encode_pairs, evaluate_task, reduced
from holdfast.evaluation.harness_tasks import HarnessTask
from holdfast.evaluation.results import forgotten
from holdfast.evaluation.sums import read_sums
from holdfast.evaluation.tasks import find_task
from holdfast.report.page import render
from holdfast.report.run_files import open_run
from training import tiny

installed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'holdfast[harness]'"
)
TASKS = [f"harness:{name}" for name in (*KINDS, "own_broken")]
JOB = "continual/train/abcd_kl"


def run_values(folder: Path, tasks: Path) -> dict[str, Any]:
    """Three stages that teach one answer each, with all tasks evaluated."""
    stage = {"tokens": 8 * 32 * 16}
    return {
        **tiny.CONTINUAL,
        "stages": [{**stage, "data": [{"name": f"stage_{i}", "style": "PADDED"}]} for i in range(3)],
        "data": {"sources": sources(folder)},
        "optimization": {"lr": 0.01, "schedule": "constant"},
        "eval": {"evaluations": TASKS, "harness": {"include_path": str(tasks)}},
        "logging": {"report_interval": 1, "checkpoint_interval": 1000, "validation_interval": 1000},
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("harness"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Path:
    folder = tmp_path_factory.mktemp("harness_run")
    trainer = tiny.trainer(JOB, run_values(folder, tasks), folder)
    trainer.run()
    found: Path = trainer.spec.run_dir
    return found


def points(run_dir: Path) -> list[Any]:
    """The rows of the matrix."""
    known = json.loads((run_dir / "results.json").read_text())["points"]
    return [next(point for point in known if point["row"] == row) for row in range(4)]


@pytest.mark.extra
@pytest.mark.slow
@installed
def test_every_boundary_has_the_numbers_of_lm_eval_on_the_exported_checkpoint(
    run_dir: Path, tasks: Path, tmp_path: Path
) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    import lm_eval
    from lm_eval.tasks import TaskManager

    from holdfast.analysis.export import export_run

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    moved = set()
    for row, name in enumerate(("boundary_0", "boundary_1", "boundary_2", "final")):
        export_run(f"{run_dir}@{name}", tmp_path / name)
        model = huggingface.HFLM(pretrained=str(tmp_path / name), device="cpu", dtype="float32", batch_size=6)
        theirs = lm_eval.simple_evaluate(model=model, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0)
        point = points(run_dir)[row]
        for task in KINDS:
            wanted = {key: value for key, value in theirs["results"][task].items() if "," in key and "err" not in key}
            ours = point["facts"][f"harness:{task}"]["reported"]
            assert ours.keys() == wanted.keys()
            for key, value in wanted.items():
                exact = key.partition(",")[0] in ("acc", "acc_norm", "exact_match")
                assert ours[key] == value if exact else np.log(ours[key]) == pytest.approx(np.log(value), abs=1e-5)
        scores = point["scores"]
        assert scores["harness:own_choice"]["accuracy"] == theirs["results"]["own_choice"]["acc,none"]
        assert scores["harness:own_choice"]["accuracy_norm"] == theirs["results"]["own_choice"]["acc_norm,none"]
        assert scores["harness:own_said"]["accuracy"] == theirs["results"]["own_said"]["exact_match,none"]
        bits = theirs["results"]["own_text"]["bits_per_byte,none"]
        assert scores["harness:own_text"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        total = -sum(each["filtered_resps"][0][0] for each in theirs["samples"]["own_words"])
        assert scores["harness:own_words"]["nll"] * 33 == pytest.approx(total, rel=1e-4)  # bytes of the six answers
        moved.add(scores["harness:own_choice"]["accuracy"])
    assert len(moved) > 2, "a comparison of scores that never change shows little"


@pytest.mark.extra
@pytest.mark.slow
@installed
def test_questions_are_kept_and_paired(run_dir: Path) -> None:
    rows = points(run_dir)
    facts = rows[1]["facts"]["harness:own_choice"]
    assert facts["count"] == len(LABELS)
    assert facts["chance"] == pytest.approx(1 / 3)
    assert facts["majority"] == 0.5
    assert {"accuracy", "accuracy_norm"} <= rows[1]["intervals"]["harness:own_choice"].keys()
    assert {"nll", "bits_per_byte"} <= rows[1]["intervals"]["harness:own_text"].keys()
    assert rows[1]["counts"]["harness:own_choice"]["accuracy"] == len(LABELS)
    assert rows[1]["scores"]["harness:own_said"]["accuracy"] == 1.0
    assert rows[3]["scores"]["harness:own_said"]["accuracy"] == 0.0

    lost = forgotten(run_dir, "harness:own_said", rows[1]["step"], rows[3]["step"])
    assert (lost.num_known, len(lost.lost)) == (6, 6)
    assert {each.before.chosen for each in lost.lost} == {" yes"}
    before, after = (read_sums(run_dir / "evaluations" / str(rows[row]["step"])) for row in (1, 3))
    change = before["harness:own_said"].change(after["harness:own_said"], "accuracy")
    assert change is not None
    assert (change.mean, change.num, change.unit) == (-1.0, 6, "questions")
    for task, measure in (("own_choice", "accuracy_norm"), ("own_text", "bits_per_byte"), ("own_words", "nll")):
        found = before[f"harness:{task}"].change(after[f"harness:{task}"], measure)
        assert found is not None, (task, measure)
        difference = rows[3]["scores"][f"harness:{task}"][measure] - rows[1]["scores"][f"harness:{task}"][measure]
        assert found.mean == pytest.approx(difference)


@pytest.mark.extra
@pytest.mark.slow
@installed
def test_a_task_that_fails_costs_a_cell_and_says_why(run_dir: Path) -> None:
    results = json.loads((run_dir / "results.json").read_text())
    assert results["finished"]
    column = results["tasks"].index("harness:own_broken")
    assert all(row[column] is None for matrix in results["matrix"].values() for row in matrix)
    assert "FileNotFoundError" in points(run_dir)[3]["facts"]["harness:own_broken"]["failed"]
    run = open_run(run_dir)
    assert len(run.failures) == 4
    page = render(run)
    assert "harness:own_broken was not evaluated at step 0: FileNotFoundError" in page
    assert "harness:own_choice" in page


@pytest.mark.extra
@installed
def test_a_name_that_is_not_there_is_an_error_of_its_place(tasks: Path) -> None:
    config = EvaluationConfig(harness_include_path=str(tasks))
    values = {"evaluations": ["arithmetic", "harness:own_choise"], "harness": {"include_path": str(tasks)}}
    known = harness_tasks._manager(str(tasks), False)
    with pytest.MonkeyPatch.context() as patch:  # the harness's own thousands of tasks take long to read
        patch.setattr(harness_tasks, "_manager", lambda folder, defaults: known)
        with pytest.raises(ConfigError, match=r"eval/evaluations/1: got 'harness:own_choise'.*harness:own_choice"):
            tiny.resolved(JOB, {**tiny.CONTINUAL, "eval": values})
    missing = EvaluationConfig(harness_include_path=str(tasks / "nothing"))
    with pytest.raises(ConfigError, match="eval/harness/include_path"):
        harness_tasks.harness_task("harness:own_choice", missing, "eval/evaluations/0")
    found = find_task("harness:own_choice", tiny.resolved(JOB, tiny.CONTINUAL).options.data, evaluation=config)
    assert found == HarnessTask("harness:own_choice", str(tasks))


def test_without_the_extra_the_message_names_the_place_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"eval/evaluations/0: harness:arc_easy.*holdfast\[harness\]"):
        harness_tasks.harness_task("harness:arc_easy", EvaluationConfig(), "eval/evaluations/0")


@pytest.mark.extra
@installed
def test_the_limit_takes_the_first_questions_and_a_failure_has_no_figures(tiny_model: Tiny, tasks: Path) -> None:
    config = EvaluationConfig(limit=4, harness_include_path=str(tasks))
    names = ["harness:own_text", "harness:own_broken"]
    evaluator = Evaluator(tiny_model.model, TOKENIZER, config, tasks=names)
    found = evaluator.evaluate(tiny_model.params)
    assert [each.id for each in found["harness:own_text"].examples] == ["0", "1", "2", "3"]
    assert found["harness:own_text"].accuracy is None
    assert found["harness:own_broken"].failed is not None
    assert set(found["harness:own_broken"].measures.values()) == {None}
    assert evaluator.examples("harness:own_text") == []


@pytest.mark.extra
@installed
def test_few_shot_examples_are_the_same_each_time_and_leave_no_trace(tiny_model: Tiny, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    shots = KINDS["own_text"].replace('doc_to_text: ""', 'fewshot_split: test\ndoc_to_text: "{{a}}"')
    text = (tasks / "own_text.yaml").read_text().replace(KINDS["own_text"], shots)
    (tasks / "own_text.yaml").write_text(text.replace("loglikelihood_rolling", "loglikelihood"))
    model = HarnessModel(tiny_model.runner, tiny_model.params, TOKENIZER, batch_size=4)
    random.seed(5)
    state = random.getstate()
    first, second = (
        [each.prompt for each in evaluate_task(model, HarnessTask("harness:own_text", str(tasks), 2)).examples]
        for _ in range(2)
    )
    assert first == second
    assert all(prompt.count("even?") == 2 for prompt in first)
    assert random.getstate() == state


def test_groups_pool_their_questions_and_filters_do_not_double_them() -> None:
    def sample(doc: int, name: str, right: float) -> dict[str, Any]:
        return {
            "doc_id": doc, "filter": name, "metrics": ["exact_match"], "exact_match": right, "target": "4",
            "arguments": [("2 + 2 =", {})], "filtered_resps": ["4" if right else "5"],
        }  # fmt: skip

    results = {
        "samples": {
            "one": [sample(1, "strict", 0.0), sample(0, "strict", 1.0), sample(0, "loose", 1.0), sample(1, "loose", 1)],
            "two": [sample(0, "strict", 1.0)],
        },
        "configs": {name: {"output_type": "generate_until"} for name in ("one", "two")},
        "results": {"both": {"exact_match,strict": 2 / 3, "exact_match_stderr,strict": 0.1, "alias": "both"}},
    }
    found = reduced(results, "both")
    assert [each["id"] for each in found["questions"]] == ["one/0", "one/1", "two/0"]
    assert [each["chosen"] for each in found["questions"]] == ["4", "5", "4"]
    assert found["figures"] == {"exact_match,strict": 2 / 3}


def test_a_continuation_keeps_the_spaces_before_it() -> None:
    pairs = encode_pairs(TOKENIZER, [("a b ", "c"), ("a b", " c"), ("", "x")])
    assert pairs[0] == pairs[1] == (TOKENIZER.encode("a b"), TOKENIZER.encode(" c"))
    assert pairs[2] == ([], TOKENIZER.encode("x"))


@pytest.fixture(name="tiny_model")
def _tiny_model(tiny: Tiny) -> Tiny:
    return tiny
