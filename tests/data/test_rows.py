"""Rows: every token where it belongs, the same loss in every style."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_examples import make_store, tasks, texts
from holdfast.data.documents import Document
from holdfast.data.rows import IGNORE, RowArrays, Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.data.store import TokenStore
from holdfast.errors import UserError

PMD, PADDED, PACKED = DatasetStyle.PMD, DatasetStyle.PADDED, DatasetStyle.PACKED
EOT, PAD = 256, 257
small_text = st.text("abcdefg ", min_size=1, max_size=14)
documents = st.lists(st.tuples(small_text, small_text), min_size=1, max_size=12)


def stored(tmp_path_factory: pytest.TempPathFactory, made: list[Document]) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("store"), made)


def test_pmd_rows_are_blocks_of_the_stream(tmp_path: Path) -> None:
    store = make_store(tmp_path, texts("abcd", "efg"))  # a b c d EOT e f g EOT: 9 tokens
    rows = Rows(store, PMD, 4, pad_id=PAD)
    assert len(rows) == 2
    both = rows.rows([0, 1])
    assert both.x.tolist() == [[97, 98, 99, 100], [EOT, 101, 102, 103]]
    assert both.y.tolist() == [[98, 99, 100, EOT], [101, 102, 103, EOT]]
    assert both.padding_mask.tolist() == both.segment_ids.tolist() == [[1] * 4] * 2
    assert both.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert rows.documents(0) == range(2 - 1)
    assert rows.documents(1) == range(2)
    assert rows.mean_tokens == rows.mean_loss_tokens == 4
    assert all(array.dtype == np.int32 for array in both)


@pytest.mark.parametrize(("tokens", "count"), [(8, 1), (9, 2), (10, 2), (13, 3)])
def test_pmd_at_the_edge_of_a_row(tmp_path: Path, tokens: int, count: int) -> None:
    store = make_store(tmp_path, texts("x" * (tokens - 1)))
    rows = Rows(store, PMD, 4)
    assert len(rows) == count
    assert (rows.row(count - 1).y >= 0).all()


def test_a_stream_shorter_than_a_row_is_one_padded_row(tmp_path: Path) -> None:
    rows = Rows(make_store(tmp_path, texts("ab")), PMD, 4, pad_id=PAD)
    assert len(rows) == 1
    row = rows.row(0)
    assert row.x.tolist() == [97, 98, PAD, PAD]
    assert row.y.tolist() == [98, EOT, IGNORE, IGNORE]
    assert row.padding_mask.tolist() == row.segment_ids.tolist() == [1, 1, 0, 0]
    assert rows.mean_tokens == 2


def test_padded_rows_count_the_answer_only_or_all(tmp_path: Path) -> None:
    store = make_store(tmp_path, tasks(("ab=", "cd"), ("e=", "f")))
    answers = Rows(store, PADDED, 6, pad_id=PAD)
    row = answers.row(0)
    assert row.x.tolist() == [97, 98, 61, 99, 100, PAD]
    assert row.y.tolist() == [IGNORE, IGNORE, 99, 100, EOT, IGNORE]  # the last prompt token predicts the answer
    assert row.padding_mask.tolist() == row.segment_ids.tolist() == [1, 1, 1, 1, 1, 0]
    assert answers.mean_tokens == (5 + 3) / 2
    assert answers.mean_loss_tokens == (3 + 2) / 2
    everything = Rows(store, PADDED, 6, loss_on="all", pad_id=PAD)
    assert everything.row(0).y.tolist() == [98, 61, 99, 100, EOT, IGNORE]
    assert everything.mean_loss_tokens == everything.mean_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "answer", "x", "y", "cut"),
    [
        ("abc", "z", "abcz", [-1, -1, 122, EOT], 0),  # exactly T inputs
        ("abcd", "z", "bcdz", [-1, -1, 122, EOT], 1),  # one more: the prompt's left end goes
        ("abcdefgh", "z", "fghz", [-1, -1, 122, EOT], 1),
        ("ab", "wxyz", "bwxy", [119, 120, 121, 122], 1),  # one prompt token stays, then the right end goes
    ],
)
def test_long_tasks_lose_the_left_end_of_the_prompt(
    tmp_path: Path, prompt: str, answer: str, x: str, y: list[int], cut: int
) -> None:
    for style in (PADDED, PACKED):
        rows = Rows(make_store(tmp_path / style.name, tasks((prompt, answer))), style, 4)
        assert bytes(rows.row(0).x.astype(np.uint8)).decode() == x
        assert rows.row(0).y.tolist() == y
        assert rows.num_truncated == cut


def test_long_texts_lose_their_right_end(tmp_path: Path) -> None:
    rows = Rows(make_store(tmp_path, texts("abcdefg", "abcd")), PADDED, 4)
    assert rows.row(0).x.tolist() == [97, 98, 99, 100]
    assert rows.row(0).y.tolist() == [98, 99, 100, 101]
    assert rows.num_truncated == 1


def test_packed_rows_hold_whole_documents(tmp_path: Path) -> None:
    store = make_store(tmp_path, tasks(("a=", "b"), ("c=", "d"), ("e=", "fg"), ("h=", "i")))
    rows = Rows(store, PACKED, 8, pad_id=PAD)
    assert len(rows) == 2  # 3 + 3, then 4 + 3
    first, second = (RowArrays(*(array[index] for array in rows.rows([0, 1]))) for index in (0, 1))
    assert first.x.tolist() == [97, 61, 98, 99, 61, 100, PAD, PAD]
    assert first.y.tolist() == [-1, 98, EOT, -1, 100, EOT, -1, -1]
    assert first.segment_ids.tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert first.padding_mask.tolist() == [1] * 6 + [0] * 2
    assert second.segment_ids.tolist() == [1] * 4 + [2] * 3 + [0]
    assert (rows.documents(0), rows.documents(1)) == (range(2), range(2, 4))


@given(documents, st.integers(4, 24), st.sampled_from(["answer", "all"]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_packed_and_padded_show_the_model_the_same(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], block: int, loss_on: str, is_text: bool
) -> None:
    made = texts(*(prompt + answer for prompt, answer in pairs)) if is_text else tasks(*pairs)
    store = stored(tmp_path_factory, made)
    padded = Rows(store, PADDED, block, loss_on=loss_on, pad_id=PAD)
    packed = Rows(store, PACKED, block, loss_on=loss_on, pad_id=PAD)
    assert len(padded) == len(made)
    assert padded.num_truncated == packed.num_truncated
    order = np.random.default_rng(0).permutation(len(packed))
    shown: dict[int, tuple[list[int], list[int]]] = {}
    for row, *arrays in zip(order, *packed.rows(order), strict=True):
        x, y, mask, segments, positions = arrays
        for segment, document in enumerate(packed.documents(int(row)), 1):
            here = segments == segment
            assert positions[here].tolist() == list(range(here.sum()))
            shown[document] = (x[here].tolist(), y[here].tolist())
        assert ((segments > 0) == (mask == 1)).all()
        assert (y[mask == 0] == IGNORE).all()
    for document in range(len(made)):
        x, y, mask, _, _ = padded.row(document)
        assert shown[document] == (x[mask == 1].tolist(), y[mask == 1].tolist())
    everything = padded.rows(range(len(padded)))
    assert padded.mean_tokens == pytest.approx(everything.padding_mask.sum() / len(padded))
    assert padded.mean_loss_tokens == pytest.approx((everything.y != IGNORE).sum() / len(padded))
    assert packed.mean_loss_tokens * len(packed) == pytest.approx(padded.mean_loss_tokens * len(padded))
    assert packed.loss_tokens(range(len(packed))).sum() == padded.loss_tokens(range(len(padded))).sum()


@given(documents)
@settings(deadline=None, max_examples=20)
def test_the_bytes_of_all_rows_are_the_bytes_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    store = stored(tmp_path_factory, tasks(*pairs))
    answers = sum(len(answer.encode()) for _, answer in pairs)
    for style in (PADDED, PACKED):
        rows = Rows(store, style, 64)
        assert rows.loss_bytes(range(len(rows))).sum() == answers
        assert rows.target_bytes(rows.rows(range(len(rows))).y).tolist() == rows.loss_bytes(range(len(rows))).tolist()
    stream = Rows(store, PMD, 1)
    assert stream.loss_bytes(range(len(stream))).sum() == store.num_bytes - 1  # the first token is no target


def test_packing_a_million_documents_is_next_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, texts("abc"))
    count = 1_000_000
    lengths = np.random.default_rng(0).integers(2, 40, count)
    monkeypatch.setattr(TokenStore, "offsets", np.concatenate([[0], np.cumsum(lengths)]))
    monkeypatch.setattr(TokenStore, "prompt_lengths", np.zeros(count, np.uint32))
    store.num_documents = count
    rows = Rows(store, PACKED, 64)
    first = rows._first
    ends = np.cumsum(np.concatenate([[0], lengths - 1]))
    used = ends[first[1:]] - ends[first[:-1]]
    assert used.max() <= 64
    assert (used[:-1] + (lengths - 1)[first[1:-1]] > 64).all()  # no row could have taken its next document too


def test_rows_outside_are_errors(tmp_path: Path) -> None:
    rows = Rows(make_store(tmp_path, texts("abcdefgh")), PMD, 4)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            rows.row(index)


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path, texts("a"))
    store.num_tokens = 1
    with pytest.raises(UserError, match="made/train: 1 tokens"):
        Rows(store, PMD, 4)
