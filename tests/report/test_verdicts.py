"""The words for what became of a task: paired, above chance and majority, known before, and no claim without data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_runs import UNIFORM, FakeRun
from holdfast.evaluation.results import Example, task_result, write_examples
from holdfast.evaluation.sums import WEIGHTS, Answers, HeldOut, TaskSums, write_sums
from holdfast.report import open_run
from holdfast.report.page import render
from holdfast.report.run_files import Run
from holdfast.report.verdicts import Verdict, sentence, verdicts

STAGES = ["first", "second"]


def rows(nll: Any, documents: Any = None) -> TaskSums:
    """Rows of 100 bytes with these losses in bits per byte, each of its own document unless given."""
    losses = np.asarray(nll, float)
    sizes, none = np.full(len(losses), 100.0), np.zeros(len(losses))
    groups = np.arange(len(losses)) if documents is None else np.asarray(documents)
    return TaskSums(HeldOut(losses * np.log(2) * sizes, sizes, sizes, groups, none, none, none))


def asked(right: Any) -> TaskSums:
    """Questions, each of its own group."""
    answers = tuple(bool(each) for each in right)
    return TaskSums(answers=Answers(tuple(map(str, range(len(answers)))), ("",) * len(answers), answers))


def made_run(path: Path, evaluations: list[TaskSums], *, keep: bool = True, **facts: Any) -> Run:
    """A finished run of two stages whose task `t` belongs to the first; evaluations before, after it, at the end."""
    points, matrix = [], {"accuracy": [], "bits_per_byte": []}
    for row, sums in enumerate(evaluations):
        score = sums.rows.measures()["bits_per_byte"] if sums.rows is not None else None
        right = sums.answers.right if sums.answers is not None else ()
        accuracy = sum(right) / len(right) if right else None
        scores = {"accuracy": accuracy, "bits_per_byte": score}
        known = {"uniform": UNIFORM} | ({"count": len(right), "chance": 0.5, "majority": 0.5} if right else {}) | facts
        points.append(
            {
                "step": row, "tokens": row, "row": row, "stage": max(row - 1, 0), "at": "", "scores": {"t": scores},
                "intervals": {"t": {name: list(ends) for name, ends in sums.intervals().items()}},
                "facts": {"t": known},
            }
        )  # fmt: skip
        for name, value in scores.items():
            matrix[name].append([value])
        if keep:
            write_sums(path / "evaluations" / str(row), {WEIGHTS: {"t": sums}})
    results = {
        "stages": STAGES, "tasks": ["t"], "homes": [1], "matrix": matrix, "points": points, "finished": True,
    }  # fmt: skip
    return Run(path, {}, [], results, running=False)


def judged(path: Path, evaluations: list[TaskSums], **values: Any) -> Verdict:
    [verdict] = verdicts(made_run(path, evaluations, **values))
    return verdict


SPREAD = np.linspace(-0.5, 0.5, 64)
NOISE = 0.002 * np.random.default_rng(0).normal(size=64)


def test_a_small_loss_in_every_document_is_forgetting(tmp_path: Path) -> None:
    after = rows(3.0 + SPREAD)
    now = rows(3.005 + SPREAD + NOISE)
    one, two = after.intervals()["bits_per_byte"], now.intervals()["bits_per_byte"]
    assert one[1] > two[0]  # the intervals overlap
    verdict = judged(tmp_path, [rows(8.1 + SPREAD), after, now])
    assert (verdict.word, verdict.own) == ("forgotten", "learned")
    assert verdict.change == pytest.approx(0.005, abs=5e-4)
    assert 0.004 < verdict.interval[0] < verdict.change < verdict.interval[1] < 0.006
    assert (verdict.num, verdict.unit) == (64, "documents")
    said = sentence(made_run(tmp_path, [rows(8.1 + SPREAD), after, now]))
    assert "forgot t (bits per byte 3 → 3.01, +0.005" in said or "forgot t (bits per byte 3, +0.00" in said
    assert "over 64 documents" in said


def test_noise_between_two_evaluations_is_not_forgetting(tmp_path: Path) -> None:
    run = made_run(tmp_path, [rows(8.1 + SPREAD), rows(3.0 + SPREAD), rows(3.0 + SPREAD + NOISE - NOISE.mean())])
    assert [each.word for each in verdicts(run)] == ["learned"]
    assert sentence(run).endswith("forgot nothing that shows.")


def test_few_documents_count_as_documents_and_rows_of_one_as_rows(tmp_path: Path) -> None:
    groups = np.arange(64) // 16
    evaluations = [rows(nll + SPREAD + NOISE, groups) for nll in (8.1, 3.0, 4.0)]
    four = judged(tmp_path / "four", evaluations)
    assert (four.num, four.unit, four.word) == (4, "documents", "forgotten")
    one = judged(tmp_path / "one", [rows(nll + SPREAD + NOISE, np.zeros(64, int)) for nll in (8.1, 3.0, 4.0)])
    assert (one.num, one.unit, one.word) == (64, "rows", "forgotten")
    assert "over 64 rows" in one.changed


def test_a_text_known_before_its_stage_can_be_forgotten(tmp_path: Path) -> None:
    same = rows(1.5 + SPREAD)
    kept = made_run(tmp_path / "kept", [same, same, rows(1.5 + SPREAD + NOISE - NOISE.mean())])
    assert [(each.word, each.known_before) for each in verdicts(kept)] == [("known before", True)]
    assert sentence(kept) == "Finished: knew t (bits per byte 1.5) before; forgot nothing that shows."
    lost = made_run(tmp_path / "lost", [same, same, rows(2.5 + SPREAD)])
    [verdict] = verdicts(lost)
    assert (verdict.word, verdict.own) == ("forgotten", "known before")
    assert "knew t (bits per byte 1.5) before; forgot t (bits per byte 1.5 → 2.5, +1 [+1, +1] over 64" in sentence(lost)
    page = render(lost)
    assert "known before, forgotten" in page
    assert "over 64 documents" in page


def test_a_gain_that_only_pairing_sees_is_not_learning(tmp_path: Path) -> None:
    slow = judged(tmp_path / "slow", [rows(1.5 + SPREAD), rows(1.499 + SPREAD), rows(1.499 + SPREAD)])
    assert slow.word == "known before"
    untrained = judged(tmp_path / "untrained", [rows(8.01 + SPREAD), rows(8.0 + SPREAD), rows(8.0 + SPREAD)])
    assert untrained.word == "not learned"
    transferred = judged(tmp_path / "transferred", [rows(4.1 + SPREAD), rows(2.6 + SPREAD), rows(2.6 + SPREAD)])
    assert (transferred.word, transferred.known_before) == ("learned", True)


def test_what_its_own_stage_made_worse_is_forgotten_since_before_it(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [rows(1.5 + SPREAD), rows(2.0 + SPREAD), rows(2.1 + SPREAD)])
    assert (verdict.word, verdict.since) == ("forgotten", "before")
    assert verdict.change == pytest.approx(0.6)


def test_runs_without_sums_claim_nothing_of_texts(tmp_path: Path) -> None:
    evaluations = [rows(8.1 + SPREAD), rows(3.0 + SPREAD), rows(9.0 + SPREAD)]
    run = made_run(tmp_path, evaluations, keep=False, uniform={})
    [verdict] = verdicts(run)
    assert (verdict.word, verdict.interval) == ("not judged", None)
    assert verdict.changed == "+6 (not paired)"
    assert "no claim, for want of sums to pair, about t (bits per byte 8.1 → 3 → 9)" in sentence(run)
    old = open_run(FakeRun(tmp_path / "old", sums=False).go().path)
    words = {each.task: each for each in verdicts(old)}
    assert words["stories"].word == "not judged"
    assert words["mnli"].interval is not None  # its questions were kept as they are now
    assert render(old)


def test_answers_of_one_class_and_of_the_majority_are_not_learned(tmp_path: Path) -> None:
    majority = asked(np.arange(200) % 100 < 68)
    level = {"chance": 0.5, "majority": 0.68}
    assert judged(tmp_path / "no", [majority, majority, majority], **level, one_class=True).word == "not learned"
    assert judged(tmp_path / "as good", [asked([0, 1] * 100), majority, majority], **level).word == "not learned"
    skilled = asked(np.arange(200) % 100 < 85)
    assert judged(tmp_path / "skilled", [asked([0, 1] * 100), skilled, skilled], **level).word == "learned"
    assert judged(tmp_path / "one", [majority, skilled, skilled], **level, one_class=True).word == "not learned"


def test_an_accuracy_known_before_can_be_forgotten(tmp_path: Path) -> None:
    good, bad = asked(np.arange(200) % 100 < 85), asked(np.arange(200) % 100 < 60)
    assert judged(tmp_path / "kept", [good, good, good]).word == "known before"
    lost = judged(tmp_path / "lost", [good, good, bad])
    assert (lost.word, lost.own, lost.unit) == ("forgotten", "known before", "questions")
    assert lost.change == pytest.approx(-0.25)
    assert lost.interval[1] < 0


def test_guessing_is_seldom_called_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = []
    for index in range(300):
        labels = rng.random(100) < 0.5
        right = [rng.integers(2, size=100) == labels for _ in range(3)]
        share = max(labels.mean(), 1 - labels.mean())
        words.append(judged(tmp_path / str(index), [asked(each) for each in right], majority=share).word)
    assert sum(word in ("learned", "known before", "forgotten") for word in words) <= 0.05 * 300


def test_questions_of_runs_of_earlier_versions_are_paired(tmp_path: Path) -> None:
    right = [np.arange(100) % 50 < share for share in (25, 45, 30)]
    run = made_run(tmp_path, [asked(each) for each in right], keep=False)
    for row, answers in enumerate(right):
        made = [
            Example(str(i), "p", "a", "a" if good else "b", bool(good), choices=("a", "b"))
            for i, good in enumerate(answers)
        ]
        write_examples(tmp_path / "evaluations" / str(row), {"t": task_result("t", "choice", made)})
    [verdict] = verdicts(run)
    assert (verdict.word, verdict.num) == ("forgotten", 100)
