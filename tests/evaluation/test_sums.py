"""Sums of an evaluation: kept exactly, read back, and refused where they are not of the same rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.evaluation.sums import EMA, SUMS, WEIGHTS, Answers, HeldOut, TaskSums, read_sums, write_sums

RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 60, 12).astype(float)
GROUPS = np.arange(12) // 3


def held_out(nll: np.ndarray, groups: np.ndarray = GROUPS, kl: bool = True) -> HeldOut:
    divergence = np.abs(nll) / 10 if kl else np.zeros(12)
    return HeldOut(nll, SIZES, 3 * SIZES, groups, divergence, 2 * divergence, SIZES if kl else np.zeros(12))


NLL = RNG.normal(2.0, 0.5, 12).astype(np.float32).astype(float) * SIZES
ANSWERS = Answers(("a", "b", "c"), ("", "text", "text"), (True, False, True))


def test_every_figure_comes_back_exactly(tmp_path: Path) -> None:
    made = {"a/b: ü": TaskSums(held_out(NLL), ANSWERS), "text": TaskSums(held_out(NLL, kl=False))}
    write_sums(tmp_path, {WEIGHTS: made, EMA: {"text": TaskSums(held_out(NLL + 1))}})
    back = read_sums(tmp_path)
    assert list(back) == list(made)
    for name, sums in made.items():
        assert back[name].intervals() == sums.intervals()
        assert back[name].rows.measures() == sums.rows.measures()
        assert back[name].counts() == sums.counts()
    assert back["a/b: ü"].answers == ANSWERS
    assert set(back["text"].intervals()) == {"nll", "bits_per_byte"}
    assert back["a/b: ü"].counts()["accuracy"] == 2
    assert back["text"].counts()["nll"] == 4
    assert read_sums(tmp_path, EMA)["text"].rows.nll.tolist() == (NLL + 1).tolist()
    first = (tmp_path / SUMS).read_bytes()
    write_sums(tmp_path, {WEIGHTS: back, EMA: read_sums(tmp_path, EMA)})
    assert (tmp_path / SUMS).read_bytes() == first


def test_documents_have_the_sums_of_their_rows(tmp_path: Path) -> None:
    write_sums(tmp_path, {WEIGHTS: {"text": TaskSums(held_out(NLL))}})
    record = json.loads((tmp_path / SUMS).read_text())[WEIGHTS]["text"]
    assert record["documents"]["document"] == [0, 1, 2, 3]
    for column in ("nll", "tokens", "bytes", "kl_forward", "kl_tokens"):
        by_document = np.array(record["rows"][column]).reshape(4, 3).sum(1)
        assert record["documents"][column] == pytest.approx(by_document.tolist())


def test_what_is_not_finite_is_null_and_has_no_interval(tmp_path: Path) -> None:
    broken = NLL.copy()
    broken[3] = np.nan
    write_sums(tmp_path, {WEIGHTS: {"text": TaskSums(held_out(broken, kl=False))}})
    assert "NaN" not in (tmp_path / SUMS).read_text()
    back = read_sums(tmp_path)["text"]
    assert back.intervals() == {}
    assert back.change(TaskSums(held_out(NLL, kl=False)), "nll") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"tasks": {"t": {"rows": {"document": [1], "nll": [1, 2]}}}}', "null"]
)
def test_a_broken_file_is_no_file(text: str, tmp_path: Path) -> None:
    assert read_sums(tmp_path) == {}
    (tmp_path / SUMS).write_text(text)
    assert read_sums(tmp_path) == {}


def test_only_the_same_rows_and_questions_are_paired() -> None:
    before, after = TaskSums(held_out(NLL), ANSWERS), TaskSums(held_out(NLL + 0.1 * SIZES), ANSWERS)
    change = before.change(after, "nll")
    assert change.mean == pytest.approx(0.1)
    assert (change.num, change.unit) == (4, "documents")
    assert before.change(after, "bits_per_byte").mean == pytest.approx(0.1 / 3 / np.log(2))
    assert before.change(after, "accuracy").mean == 0
    assert before.change(TaskSums(held_out(NLL, GROUPS[::-1].copy())), "nll") is None
    assert before.change(TaskSums(answers=Answers(("a", "b", "d"), ("",) * 3, (True,) * 3)), "accuracy") is None
    assert before.change(TaskSums(), "nll") is None
    assert before.change(TaskSums(), "accuracy") is None
