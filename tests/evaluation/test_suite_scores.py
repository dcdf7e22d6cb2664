"""Tasks of suites: answers scored by degrees have intervals and paired changes, and what a suite averages is there."""

from pathlib import Path

import pytest

from data.suite_files import write_reviews, write_trace
from evaluation.conftest import TOKENIZER, Tiny
from holdfast.data.config import DataConfig
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.evaluator import Evaluator
from holdfast.evaluation.metrics import rouge_l
from holdfast.evaluation.results import Example, answers_of, read_examples, task_result, write_examples
from holdfast.evaluation.sums import Answers

TASKS = ["trace-MeetingBank", "trace-ScienceQA", "yelp"]


def test_every_task_has_its_metric_and_the_score_of_the_suite(tiny: Tiny, tmp_path: Path) -> None:
    write_trace(tmp_path, 4)
    write_reviews(tmp_path, 5)
    config = EvaluationConfig(limit=4, max_new_tokens=12)
    evaluator = Evaluator(tiny.model, TOKENIZER, config, tasks=TASKS, data=DataConfig(root=str(tmp_path)))
    found = evaluator.evaluate(tiny.params)
    graded, lettered, chosen = (found[name] for name in TASKS)
    wanted = [rouge_l(each.chosen or "", each.answer) for each in graded.examples]
    assert graded.measures["rouge_l"] == graded.measures["score"] == pytest.approx(sum(wanted) / 4)
    assert graded.accuracy is None
    assert graded.sums.answers is not None
    assert graded.sums.answers.right is None
    assert max(len(each.chosen or "") for each in graded.examples) <= 12
    assert lettered.measures["score"] == lettered.accuracy
    assert chosen.measures["score"] == chosen.accuracy
    assert chosen.chance == 0.2


def test_scores_by_degrees_are_paired_and_survive_their_file(tmp_path: Path) -> None:
    def example(number: int, score: float) -> Example:
        return Example(str(number), "q", "a", "b", False, measures={"rouge_l": score})

    before = [example(i, 0.5 + 0.1 * (i % 2)) for i in range(6)]
    after = [example(i, 0.2 + 0.1 * (i % 2)) for i in range(6)]
    first, second = (task_result("t", "generate", each, judged=False) for each in (before, after))
    low, high = first.intervals["rouge_l"]
    assert first.measures["rouge_l"] == pytest.approx(0.55)
    assert low < 0.55 < high
    assert "accuracy" not in first.intervals
    change = first.sums.change(second.sums, "rouge_l")
    assert change is not None
    assert (change.mean, change.num) == (pytest.approx(-0.3), 6)
    assert first.sums.change(second.sums, "accuracy") is None
    assert first.sums.counts() == {"rouge_l": 6}
    assert Answers.from_dict(answers_of(before).to_dict()) == answers_of(before)
    write_examples(tmp_path, {"t": first})
    assert read_examples(tmp_path / "t.jsonl") == before
