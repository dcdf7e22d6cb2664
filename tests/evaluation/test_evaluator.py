"""The evaluator: figures from questions and held-out rows, files of examples, what was forgotten."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny, make_rows
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.documents import Document
from holdfast.data.sampling import DatasetStyle
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.evaluator import Evaluator
from holdfast.evaluation.results import MEASURES, Example, forgotten, read_examples, task_result, write_examples
from holdfast.evaluation.tasks import Task, find_task

TASKS = [Document(str(i), prompt=f"{i}? ", answer=f"answer {i}") for i in range(9)]


@pytest.fixture(scope="module")
def evaluator(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Evaluator[Any]:
    folder = tmp_path_factory.mktemp("rows")
    return Evaluator(
        tiny.model,
        TOKENIZER,
        EvaluationConfig(limit=20, batch_size=8, probe_rows=3),
        tasks=["arithmetic"],
        rows={
            "arithmetic": make_rows(folder / "a", TASKS, DatasetStyle.PADDED),
            "text": make_rows(folder / "b", [Document("0", text="words " * 80)], DatasetStyle.PMD),
        },
        max_rows=6,
    )


def test_a_task_and_the_dataset_of_its_name_are_one_result(tiny: Tiny, evaluator: Evaluator[Any]) -> None:
    results = evaluator.evaluate(tiny.params, tiny.other)
    assert list(results) == ["arithmetic", "text"]
    both, text = results["arithmetic"], results["text"]
    assert all(both.measures[name] is not None for name in MEASURES)
    assert both.count == 20
    assert both.num_rows == 6
    assert text.measures["accuracy"] is None
    assert text.accuracy is None
    low, high = both.intervals["accuracy"]
    assert low <= both.accuracy <= high
    facts = both.facts()
    assert facts["chance"] == pytest.approx(np.mean([1 / len(each.choices) for each in both.examples]))
    assert sum(facts["per_class"].values()) == 20
    assert set(facts["per_class"]) <= {"0", "1", "2", "3"}
    json.dumps(facts)


def test_the_likeliest_answer_is_chosen_raw_or_by_length(tiny: Tiny, evaluator: Evaluator[Any]) -> None:
    by_length = Evaluator(
        tiny.model,
        TOKENIZER,
        EvaluationConfig(limit=20, batch_size=8, normalise="length"),
        tasks=["arithmetic"],
    )
    raw = evaluator.evaluate(tiny.params, datasets=[])["arithmetic"]
    length = by_length.evaluate(tiny.params)["arithmetic"]
    for first, second in zip(raw.examples, length.examples, strict=True):
        assert first.id == second.id
        np.testing.assert_allclose(first.scores, second.scores, rtol=1e-6)
        per_byte = [score / len(text) for score, text in zip(first.scores, first.choices, strict=True)]
        np.testing.assert_allclose(first.per_byte, per_byte, rtol=1e-6)
        lengths = [len(text.removeprefix(" ")) for text in first.choices]
        np.testing.assert_allclose(first.normalised, np.array(first.scores) / lengths, rtol=1e-6)
        assert first.chosen == first.choices[int(np.argmax(first.scores))]
        assert second.chosen == second.choices[int(np.argmax(second.normalised))]
        assert first.right == (first.chosen == first.answer)
    assert raw.facts()["accuracy_norm"] == length.accuracy
    assert raw.accuracy == raw.facts()["accuracy_raw"]


def test_a_probe_takes_few_examples_of_the_same(tiny: Tiny, evaluator: Evaluator[Any]) -> None:
    whole = evaluator.evaluate(tiny.params)["arithmetic"]
    probe = evaluator.probe(tiny.params)["arithmetic"]
    assert probe.count == probe.num_rows == 3
    assert {each.id for each in probe.examples} < {each.id for each in whole.examples}


def test_generated_answers_are_right_when_they_match(tiny: Tiny) -> None:
    config = EvaluationConfig(kind="generate", limit=5, max_new_tokens=3)
    asked = Evaluator(tiny.model, TOKENIZER, config, tasks=["arithmetic"])
    result = asked.evaluate(tiny.params)["arithmetic"]
    assert result.kind == "generate"
    assert result.chance == 0
    for each in result.examples:
        tokens = TOKENIZER.encode(each.prompt)
        said = []
        for _ in range(3):
            said.append(int(tiny.logits(tokens + said)[-1, : TOKENIZER.vocab_size].argmax()))
        wanted = said[: said.index(TOKENIZER.eot_id)] if TOKENIZER.eot_id in said else said
        assert each.chosen == TOKENIZER.decode(wanted)


def test_unknown_names_are_refused(tiny: Tiny, evaluator: Evaluator[Any]) -> None:
    with pytest.raises(UserError, match=r"no evaluation 'nothing'.*arithmetic"):
        evaluator.evaluate(tiny.params, tasks=["nothing"])
    with pytest.raises(UserError, match=r"eval/evaluations.*arithmetik.*did you mean 'arithmetic'"):
        Evaluator(tiny.model, TOKENIZER, EvaluationConfig(), tasks=["arithmetik"])


def test_tasks_of_the_users_own(tmp_path: Path, tiny: Tiny) -> None:
    lines = [{"q": f"is {i} even?", "a": i % 2} for i in range(12)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = SourceConfig(str(path), prompt="{q}", label="a", labels={"0": " yes", "1": " no"}, validation_fraction=0.5)
    data = DataConfig(sources={"own": own, "plain": SourceConfig(str(path), text="q")})
    assert find_task("own", data) == Task("own", kind="choice")
    result = Evaluator(tiny.model, TOKENIZER, EvaluationConfig(), tasks=["own"], data=data)
    found = result.evaluate(tiny.params)["own"]
    assert 1 <= found.count < 12
    assert found.chance == 0.5
    assert set(found.per_class) <= {"yes", "no"}
    with pytest.raises(ConfigError, match="it is text or chats"):
        find_task("plain", data)


def example(number: int, right: bool, chosen: str = "a") -> Example:
    return Example(
        str(number), f"prompt {number}", "a", chosen, right, choices=("a", "b"), label=0, scores=(-1.0, None)
    )


def test_one_class_and_majority() -> None:
    result = task_result("t", "choice", [example(i, True) for i in range(4)])
    assert result.one_class
    assert result.majority == 1
    assert result.accuracy == 1
    assert result.intervals["accuracy"][0] < 1  # never certain
    mixed = task_result("t", "choice", [example(0, True), example(1, False, "b")])
    assert not mixed.one_class
    assert mixed.per_class == {"a": 1, "b": 1}
    lost = task_result("t", "choice", [Example("0", "p", "a", None, False, choices=("a", "b"), label=0)] * 2)
    assert lost.accuracy == 0
    assert lost.per_class == {"none": 2}


def test_forgotten_lists_what_was_known_and_lost(tmp_path: Path) -> None:
    knowledge = {0: [0, 0, 0], 10: [1, 1, 0], 20: [1, 0, 1], 100: [0, 0, 1]}
    for step, right in knowledge.items():
        made = [example(i, bool(flag), "a" if flag else "b") for i, flag in enumerate(right)]
        write_examples(tmp_path / "evaluations" / str(step), {"t": task_result("t", "choice", made)})
    assert read_examples(tmp_path / "evaluations" / "10" / "t.jsonl")[0] == example(0, True)
    last = forgotten(tmp_path, "t")
    assert (last.known_step, last.lost_step, last.num_known) == (20, 100, 2)  # the latest of the best
    assert [each.before.prompt for each in last.lost] == ["prompt 0"]
    assert last.lost[0].after.chosen == "b"
    assert [each.before.id for each in forgotten(tmp_path, "t", 10, 20).lost] == ["1"]
    assert not list((tmp_path / "evaluations").glob("*/.*"))
    with pytest.raises(UserError, match=r"evaluated at step 11; steps: 0, 10, 20, 100"):
        forgotten(tmp_path, "t", 11)
    with pytest.raises(UserError, match="evaluated tasks: t"):
        forgotten(tmp_path, "u")
