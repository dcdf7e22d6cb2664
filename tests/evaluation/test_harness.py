"""The harness adapter: its requests against the plain formulas, and its accuracies against our own."""

import importlib.util
import json
import os
import types
from pathlib import Path

import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.errors import UserError
from holdfast.evaluation.choice import harness_length
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.evaluator import Evaluator
from holdfast.evaluation.harness import HarnessModel, run_harness

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[3] / "shared"))

installed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'holdfast[harness]'"
)
TASK = """
task: own_yes_no
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
test_split: validation
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: ["yes", "näin", "maybe so"]
doc_to_target: "{{{{a}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> HarnessModel:
    return HarnessModel(tiny.runner, tiny.params, TOKENIZER, batch_size=4)


def test_log_likelihoods_of_shared_and_long_contexts(tiny: Tiny, model: HarnessModel) -> None:
    requests = [("a b", " c"), ("a b", " dd"), ("", "x"), ("z" * 90, " end"), ("z" * 90, " of it")]
    for (context, continuation), (total, greedy) in zip(requests, model.loglikelihood(requests), strict=True):
        wanted = TOKENIZER.encode(continuation)
        prompt = (TOKENIZER.encode(context) or [TOKENIZER.eot_id])[-(tiny.spec.block_size + 1 - len(wanted)) :]
        log_p = tiny.log_p((prompt + wanted)[:-1])[len(prompt) - 1 :]
        assert total == pytest.approx(log_p[np.arange(len(wanted)), wanted].sum(), rel=1e-5)
        assert greedy == (log_p.argmax(1).tolist() == wanted)


def test_rolling_predicts_every_token_once(tiny: Tiny, model: HarnessModel) -> None:
    short, long = "some text", "many words " * 12
    block = tiny.spec.block_size
    ids = [TOKENIZER.eot_id, *TOKENIZER.encode(short)]
    log_p = tiny.log_p(ids[:-1])
    first = log_p[np.arange(len(ids) - 1), ids[1:]].sum()
    ids = [TOKENIZER.eot_id, *TOKENIZER.encode(long)]
    second = 0.0
    for position in range(1, len(ids)):
        # A window starts at a multiple of the block, or ends the text.
        start = min((position - 1) // block * block, len(ids) - 1 - block)
        second += tiny.log_p(ids[start:position])[-1, ids[position]]
    assert model.loglikelihood_rolling([(short,), (long,)]) == pytest.approx([first, second], rel=1e-4)


def test_generation_stops_where_the_task_says(model: HarnessModel) -> None:
    bare, empty = {"max_gen_toks": 20}, {"until": [], "max_gen_toks": 20}
    whole, again = model.generate_until([("go on", bare), ("go on", empty)])
    assert whole == again
    stop = whole[len(whole) // 2]
    [cut] = model.generate_until([("go on", {"until": [stop], "max_gen_toks": 20})])
    assert cut == whole[: whole.index(stop)]


@pytest.mark.extra
@installed
def test_the_harness_and_our_own_evaluation_agree(tiny: Tiny, model: HarnessModel, tmp_path: Path) -> None:
    lines = [{"q": f"is {i} {'very ' * (i % 4)}even?", "a": i % 3} for i in range(15)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "train.jsonl").write_text(json.dumps(lines[0]) + "\n")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").write_text(TASK.format(path=path))
    theirs = run_harness(model, ["own_yes_no"], include_path=tasks)

    labels = {"0": " yes", "1": " näin", "2": " maybe so"}
    source = SourceConfig(str(tmp_path / "train.jsonl"), prompt="{q}", label="a", labels=labels, validation=str(path))
    data = DataConfig(sources={"own": source})
    ours = Evaluator(tiny.model, TOKENIZER, EvaluationConfig(), tasks=["own"], data=data)
    result = ours.evaluate(tiny.params)["own"]
    assert theirs["results"]["own_yes_no"]["acc,none"] == pytest.approx(result.accuracy)
    samples = {sample["doc"]["q"]: sample for sample in theirs["samples"]["own_yes_no"]}
    assert len(samples) == result.count == 15
    for example in result.examples:
        scores = [float(response[0][0]) for response in samples[example.prompt]["resps"]]
        np.testing.assert_allclose(scores, example.scores, atol=1e-4)
    by_length = EvaluationConfig(normalise="length")
    normed = Evaluator(tiny.model, TOKENIZER, by_length, tasks=["own"], data=data).evaluate(tiny.params)
    assert theirs["results"]["own_yes_no"]["acc_norm,none"] == pytest.approx(normed["own"].accuracy)
    assert [samples[each.prompt]["acc_norm"] for each in normed["own"].examples] == [
        each.right for each in normed["own"].examples
    ]


@pytest.mark.extra
@installed
@pytest.mark.skipif(not (SHARED / "data" / "siqa").is_dir(), reason=f"no real data: {SHARED}/data is not there")
def test_lengths_of_siqa_choices_choose_as_the_harness_does() -> None:
    """The harness's own judgement of siqa's choices, for scores that make lengths matter, against ours."""
    from lm_eval.api.task import ConfigurableTask

    lines = (SHARED / "data" / "siqa" / "validation.jsonl").read_text().splitlines()[:120]
    rng = np.random.default_rng(0)
    judge = ConfigurableTask.process_results
    for line in lines:
        row = json.loads(line)
        choices = [row["answerA"], row["answerB"], row["answerC"]]
        # Nearly the same score for each character, so that counting the space would often choose another.
        scores = -np.array([len(text) + 0.5 for text in choices]) * (1 + 0.01 * rng.normal(size=3))
        normed = [score / harness_length(f" {text}") for score, text in zip(scores, choices, strict=True)]
        task = types.SimpleNamespace(
            OUTPUT_TYPE="multiple_choice", _metric_fn_list={"acc_norm": None}, multiple_input=False,
            multiple_target=False, doc_to_choice=lambda doc: [doc[f"answer{place}"] for place in "ABC"],
            doc_to_target=lambda doc: int(doc["label"]) - 1, config=types.SimpleNamespace(process_results=None),
        )  # fmt: skip
        found = judge(task, row, [(score, False) for score in scores])
        assert found["acc_norm"] == float(int(np.argmax(normed)) == int(row["label"]) - 1)


def test_lengths_are_characters_without_the_space_before() -> None:
    """By hand: what lm-evaluation-harness's `len(choice)` gives for choices as siqa has them."""
    choices = ["make a new plan", "Go home and see Riley", "Find somewhere to go", "be at a café"]
    assert [harness_length(f" {text}") for text in choices] == [15, 21, 20, 12]
    assert harness_length("  two spaces") == 11
    assert harness_length(" ") == 1


@pytest.mark.extra
@installed
def test_an_unknown_task_is_a_users_mistake(model: HarnessModel) -> None:
    with pytest.raises(UserError, match="no such task"):
        run_harness(model, ["no_such_task_at_all"])


@pytest.mark.extra
@installed
def test_data_that_is_not_there_is_a_users_mistake(model: HarnessModel, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(TASK.format(path=tmp_path / "nothing.jsonl"))
    with pytest.raises(UserError, match="cannot read a task's data"):
        run_harness(model, ["own_yes_no"], include_path=tmp_path)


def test_no_task_and_no_folder_are_mistakes(model: HarnessModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task is named"):
        run_harness(model, [])
    with pytest.raises(UserError, match="no such folder"):
        run_harness(model, ["own_yes_no"], include_path=tmp_path / "nothing")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_extra_the_message_names_it(model: HarnessModel) -> None:
    with pytest.raises(UserError, match="holdfast\\[harness\\]"):
        run_harness(model, ["hellaswag"])
