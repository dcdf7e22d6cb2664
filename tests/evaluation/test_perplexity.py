"""Held-out losses against the plain formulas, row by row."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny, make_rows
from holdfast.data.documents import Document
from holdfast.data.rows import RowArrays
from holdfast.data.sampling import DatasetStyle
from holdfast.evaluation.perplexity import held_out
from holdfast.evaluation.scoring import batch_sums, row_sums

TEXTS = [Document(str(i), text=f"text {i} " * (i % 7 + 1)) for i in range(20)]
TASKS = [Document(str(i), prompt=f"{'long ' * (i % 3)}question {i}: ", answer=f"answer {i}") for i in range(11)]


def test_padded_rows_have_the_loss_of_their_answers(tiny: Tiny, tmp_path: Path) -> None:
    rows = make_rows(tmp_path, TASKS, DatasetStyle.PADDED)
    found = held_out(tiny.runner, tiny.params, rows, batch_size=4)
    wanted = []
    for each in TASKS:
        prompt, answer = TOKENIZER.encode(each.prompt), [*TOKENIZER.encode(each.answer), TOKENIZER.eot_id]
        log_p = tiny.log_p((prompt + answer)[:-1])[len(prompt) - 1 :]
        wanted.append(-log_p[np.arange(len(answer)), answer].sum())
    np.testing.assert_allclose(found.nll, wanted, rtol=1e-5)
    sizes = [len(each.answer) for each in TASKS]
    assert found.tokens.tolist() == [size + 1 for size in sizes]
    assert found.num_bytes.tolist() == sizes
    measures = found.measures()
    assert measures["nll"] == pytest.approx(sum(wanted) / (sum(sizes) + 11), rel=1e-5)
    assert measures["bits_per_byte"] == pytest.approx(sum(wanted) / sum(sizes) / math.log(2), rel=1e-5)
    assert measures["kl_forward"] is None
    assert set(found.intervals()) == {"nll", "bits_per_byte"}
    low, high = found.intervals()["nll"]
    assert low < measures["nll"] < high


@pytest.mark.parametrize("style", list(DatasetStyle))
def test_divergences_are_exact_over_all_real_tokens(tiny: Tiny, tmp_path: Path, style: DatasetStyle) -> None:
    rows = make_rows(tmp_path, TASKS, style)
    found = held_out(tiny.runner, tiny.params, rows, batch_size=2, reference=tiny.other)
    forward = reverse = tokens = nll = 0.0
    for index in range(len(rows)):
        row = rows.row(index)
        for segment in range(1, row.segment_ids.max() + 1):
            inside = row.segment_ids == segment
            policy, reference = (tiny.log_p(row.x[inside].tolist(), params) for params in (tiny.params, tiny.other))
            forward += (np.exp(reference) * (reference - policy)).sum()
            reverse += (np.exp(policy) * (policy - reference)).sum()
            tokens += inside.sum()
            y = row.y[inside]
            nll -= policy[np.arange(len(y)), y][y >= 0].sum()
    assert found.kl_tokens.sum() == tokens
    assert found.nll.sum() == pytest.approx(nll, rel=1e-5)
    assert found.measures()["kl_forward"] == pytest.approx(forward / tokens, rel=1e-4)
    assert found.measures()["kl_reverse"] == pytest.approx(reverse / tokens, rel=1e-4)


def test_the_first_rows_are_measured_and_a_model_does_not_diverge_from_itself(tiny: Tiny, tmp_path: Path) -> None:
    rows = make_rows(tmp_path, TEXTS, DatasetStyle.PMD)
    runner = tiny.runner
    whole = held_out(runner, tiny.params, rows, batch_size=4, reference=tiny.params)
    part = held_out(runner, tiny.params, rows, batch_size=4, limit=3)
    np.testing.assert_allclose(part.nll, whole.nll[:3], rtol=1e-6)
    assert abs(whole.measures()["kl_forward"]) < 1e-6
    assert abs(whole.measures()["kl_reverse"]) < 1e-6
    assert whole.groups.tolist() == [rows.documents(index).start for index in range(len(rows))]


def test_batch_sums_are_the_sums_of_rows(tiny: Tiny, tmp_path: Path) -> None:
    batch = RowArrays(*make_rows(tmp_path, TASKS, DatasetStyle.PACKED).rows([0, 1, 2]))
    by_row = row_sums(tiny.model, tiny.params, batch, tiny.other)
    summed = jax.jit(lambda p, r: batch_sums(tiny.model, p, batch, r))(tiny.params, tiny.other)
    for rows, total in zip(by_row, summed, strict=True):
        assert total.dtype == np.float32
        np.testing.assert_allclose(total, rows.sum(), rtol=1e-5)
