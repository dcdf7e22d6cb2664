"""Leaks: copies are found, however they are dressed, and nothing else."""

from pathlib import Path

import pytest

from data_examples import GPT2, SHARED, make_store, needs_shared, tasks, texts
from holdfast.data import leaks
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.prepare import prepare
from holdfast.data.store import Prepared
from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.data.tokenizers.train import train_tokenizer
from holdfast.errors import UserError

BYTES = load_tokenizer("bytes")
WORDS = [f"word{index}" for index in range(400)]


def passage(start: int, count: int) -> str:
    return " ".join(WORDS[start : start + count])


def only(held_out: Prepared, train: Prepared, tokenizer: Tokenizer = BYTES) -> Leak:
    (leak,) = check_leaks({"v": held_out}, {"t": train}, tokenizer)
    return leak


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_each_way_to_find_a_leak(kind: str, tmp_path: Path) -> None:
    tokenizer = BYTES if kind == "bytes" else train_tokenizer([passage(0, 400)], 400, "trained")
    train = make_store(tmp_path, texts("Short  Text.", passage(0, 100), passage(200, 60)), tokenizer, "train")
    held_out = make_store(
        tmp_path,
        texts(
            "short text.",  # the same but for case and blanks
            passage(50, 20).upper().replace(" ", ", "),  # inside a training text, in another dress
            passage(90, 20),  # begins there and goes elsewhere: less than half of its runs
            passage(300, 40),  # unseen
            "short",  # part of a text, too short to mean anything
            passage(88, 12) + " " + passage(200, 12),  # both halves seen, but no run of 13 words
        ),
        tokenizer,
        "held_out",
    )
    leak = only(held_out, train, tokenizer)
    assert (leak.exact, leak.group, leak.ngram) == (1, 0, 1)
    assert (leak.leaked, leak.rows, leak.examples) == (2, 6, (0, 1))
    assert leak.share == pytest.approx(1 / 3)


def test_groups_and_prompts(tmp_path: Path) -> None:
    train = [Document("0", prompt="p1 h1", answer="yes", group="p1"), Document("1", prompt="p2 h2", answer="no")]
    held_out = [
        Document("0", prompt="p1 h9", answer="yes", group="p1"),  # same premise
        Document("1", prompt="P2  h2", answer="yes"),  # same prompt, whatever the answer
        Document("2", prompt="p3 h3", answer="no", group="p3"),
    ]
    leak = only(make_store(tmp_path, held_out, name="v"), make_store(tmp_path, train, name="t"))
    assert (leak.exact, leak.group, leak.leaked, leak.examples) == (1, 1, 2, (0, 1))


def test_runs_do_not_cross_documents_nor_get_lost_between_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = make_store(tmp_path, texts(passage(0, 13), passage(100, 13)), name="v")
    train = make_store(
        tmp_path,
        texts(passage(0, 6), passage(6, 7), *[passage(200 + n, 20) for n in range(50)], passage(100, 13)),
        name="t",
    )
    for piece in (1, 100, 1 << 21):
        monkeypatch.setattr(leaks, "PIECE", piece)
        leak = only(held_out, train)
        assert (leak.ngram, leak.examples) == (1, (1,))


def test_above_the_limit_it_stops_and_names_the_sets(tmp_path: Path) -> None:
    train = make_store(tmp_path, tasks(("a", "b"), ("c", "d")), name="t")
    held_out = make_store(tmp_path, tasks(("a", "b"), ("x", "y")), name="v")
    assert check_leaks({"v": held_out}, {"t": train}, BYTES, max_leak=0.5)[0].share == 0.5
    with pytest.raises(UserError, match=r"(?s)data/max_leak.*v: 1 of 2 rows \(50.0%\) occur in t"):
        check_leaks({"v": held_out}, {"t": train}, BYTES, max_leak=0.49)


def test_results_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = make_store(tmp_path, tasks(("a", "b")), name="t")
    held_out = make_store(tmp_path, tasks(("a", "b")), name="v")
    first = check_leaks({"v": held_out}, {"t": train}, BYTES, cache=tmp_path / "cache")

    def forbidden(*_: object) -> None:
        raise AssertionError("looked again")

    monkeypatch.setattr(leaks, "_count", forbidden)
    assert check_leaks({"v": held_out}, {"t": train}, BYTES, cache=tmp_path / "cache") == first


@needs_shared
def test_the_real_tasks_do_not_leak_and_planted_rows_are_found(tmp_path: Path) -> None:
    data = DataConfig(root=str(SHARED / "data"), cache=str(tmp_path))
    tokenizer = load_tokenizer(GPT2)
    train, held_out = (
        {name: prepare(name, split, data=data, tokenizer=tokenizer, progress=False) for name in ("mnli", "fineweb")}
        for split in ("train", "validation")
    )
    assert [leak.leaked for leak in check_leaks(held_out, train, tokenizer)] == [0, 0, 0, 0]
    planted = [tokenizer.decode(held_out["fineweb"].tokens(index)) for index in (3, 8)]
    spoilt = make_store(tmp_path, texts("Intro. " + planted[0].upper(), "other " + planted[1]), tokenizer, "spoilt")
    (leak,) = check_leaks({"v": held_out["fineweb"]}, {"t": spoilt}, tokenizer)
    assert leak.examples == (3, 8)
