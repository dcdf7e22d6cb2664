"""Preparation: what a store holds, and that neither kills nor company change it."""

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from data_examples import content, data_config, write_jsonl
from holdfast.data import encode, prepare, progress, store
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, SourceContext
from holdfast.data.prepare import find_prepared
from holdfast.data.sources import tables
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError

BYTES = load_tokenizer("bytes")
SCRIPT = Path(__file__).with_name("preparing.py")


def made(name: str, split: str, data: DataConfig) -> store.TokenStore:
    return prepare.prepare(name, split, data=data, tokenizer=BYTES, progress=False)


def some_texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {"text": " ".join(rng.choices(("alpha", "beta", "γάμμα", "delta"), k=rng.randint(1, 30)))} for _ in range(count)
    ]


def test_a_store_holds_every_document_ended_and_counted(tmp_path: Path) -> None:
    rows = some_texts(30)
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", rows)
    write_jsonl(tmp_path / "root" / "notes" / "validation.jsonl", some_texts(3, seed=1))
    found = made("notes", "train", data_config(tmp_path))
    assert found.num_documents == len(found) == 30
    for index, row in enumerate(rows):
        assert found.tokens(index).tolist() == [*row["text"].encode(), BYTES.eot_id]
        assert found.prompt_length(index) == 0
        assert found.doc_bytes[index] == len(row["text"].encode())
    assert found.num_bytes == sum(len(row["text"].encode()) for row in rows)
    assert found.num_tokens == found.num_bytes + 30 == len(found.flat)
    assert found.flat.dtype == np.uint16
    assert not found.flat.flags.writeable
    ledger = found.ledger
    assert (ledger["split"], ledger["kind"], ledger["broken"]["counts"]) == ("train", "text", {})
    assert ledger["tokenizer"]["eot_id"] == BYTES.eot_id
    assert not ledger["held_out_from_train"]


def test_prompts_are_encoded_apart_from_answers(tmp_path: Path) -> None:
    found = made("arithmetic", "validation", data_config(tmp_path))
    for index in range(20):
        ids, prompt = found.tokens(index), found.prompt_length(index)
        question, answer = BYTES.decode(ids[:prompt]), BYTES.decode(ids[prompt:])
        assert question.endswith("=")
        assert eval(question[:-1]) == int(answer)
        assert ids[-1] == BYTES.eot_id
    assert found.kind == "task"


def test_a_second_time_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(30))
    data = data_config(tmp_path)
    assert find_prepared("notes", "train", data=data, tokenizer=BYTES) is None
    first = made("notes", "train", data)

    def forbidden(*_: object) -> Iterator[Document]:
        raise AssertionError("read again")

    monkeypatch.setattr(tables.TableSource, "documents", forbidden)
    assert made("notes", "train", data).path == first.path
    found = find_prepared("notes", "train", data=data, tokenizer=BYTES)
    assert found is not None
    assert found.fingerprint == first.fingerprint


def test_what_matters_makes_another_store_and_what_does_not_matter_does_not(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(40))
    base = made("notes", "train", data_config(tmp_path)).path
    same = [data_config(tmp_path, workers=0, max_broken=0.5, max_leak=0.0, loss_on="all")]
    assert all(made("notes", "train", data).path == base for data in same)
    others = [
        made("notes", "validation", data_config(tmp_path)).path,
        made("notes", "train", data_config(tmp_path, max_documents=5)).path,
        made("notes", "train", data_config(tmp_path, max_tokens=500)).path,
        made("notes", "train", data_config(tmp_path, validation_fraction=0.5)).path,
    ]
    write_jsonl(file, some_texts(40, seed=5))
    others.append(made("notes", "train", data_config(tmp_path)).path)
    assert len({base, *others}) == 6


def test_limits_stop_at_whole_documents(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [{"text": "abc"}] * 10)
    write_jsonl(tmp_path / "root" / "notes" / "validation.jsonl", [{"text": "xyz"}])
    for limit, documents in ((3, None), (4, 1), (11, 2), (12, 3), (1000, 10)):
        data = data_config(tmp_path, max_tokens=limit)
        if documents is None:
            with pytest.raises(UserError, match="within 3 tokens"):
                made("notes", "train", data)
            continue
        found = made("notes", "train", data)
        assert (found.num_documents, found.num_tokens) == (documents, 4 * documents)
        assert found.ledger["stopped_at_max_tokens"] == (documents < 10)
    assert made("notes", "train", data_config(tmp_path, max_documents=7)).num_documents == 7


def test_without_a_validation_split_a_slice_is_held_out_that_training_never_sees(tmp_path: Path) -> None:
    rows = [{"text": f"document {index} of many"} for index in range(400)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*rows, *rows[:50]])  # copies go to the same side
    data = data_config(tmp_path, validation_fraction=0.2)
    sides = [made("notes", split, data) for split in ("train", "validation")]
    train, validation = ({bytes(side.tokens(i)) for i in range(len(side))} for side in sides)
    assert not train & validation
    assert len(train) + len(validation) == 400
    assert sum(map(len, sides)) == 450
    assert 50 < len(validation) < 110
    assert sides[1].ledger["held_out_from_train"]


def test_too_little_to_hold_out_is_said(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [{"text": "only one"}])
    with pytest.raises(UserError, match=r"notes: its split 'validation' .* data/validation_fraction"):
        made("notes", "validation", data_config(tmp_path, validation_fraction=0.001))


def test_interrupted_at_every_batch_it_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = some_texts(25)
    rows[7] = b"{broken"
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", rows)
    write_jsonl(tmp_path / "root" / "notes" / "validation.jsonl", some_texts(2, seed=1))
    whole = made("notes", "train", data_config(tmp_path, cache=str(tmp_path / "whole"), max_broken=0.1))
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 2)
    monkeypatch.setattr(prepare, "JOURNAL_SECONDS", -1.0)
    documents = tables.TableSource.documents
    data = data_config(tmp_path, max_broken=0.1)
    tokenised = 0

    def count(batch: list[Document], *rest: Any) -> encode.Encoded:
        nonlocal tokenised
        tokenised += len(batch)
        return encode_documents(batch, *rest)

    encode_documents = encode.encode_documents
    monkeypatch.setattr(encode, "encode_documents", count)
    for stop in range(0, 24, 3):

        def dying(self: tables.TableSource, split: str, context: SourceContext, stop: int = stop) -> Iterator[Document]:
            yield from itertools.islice(documents(self, split, context), stop)
            raise RuntimeError("power cut")

        monkeypatch.setattr(tables.TableSource, "documents", dying)
        with pytest.raises(RuntimeError, match="power cut"):
            made("notes", "train", data)
    monkeypatch.setattr(tables.TableSource, "documents", documents)
    assert content(made("notes", "train", data).path) == content(whole.path)
    assert tokenised < 24 * 3  # most documents are tokenised once, and those in flight again


@pytest.mark.parametrize("place", ["sync", "write_json", "remove", "rename"])
def test_killed_while_publishing_it_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(25))
    whole = made("notes", "train", data_config(tmp_path, cache=str(tmp_path / "whole")))

    def dying(*_: object, **__: object) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        if place in ("sync", "write_json"):
            patch.setattr(store, place, dying)
        else:
            patch.setattr(Path, {"remove": "unlink"}.get(place, place), dying)
        with pytest.raises(RuntimeError, match="power cut"):
            made("notes", "train", data_config(tmp_path))
    assert list(store.stores(tmp_path / "cache")) == []
    assert content(made("notes", "train", data_config(tmp_path)).path) == content(whole.path)


def test_a_torn_journal_line_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(25))
    data = data_config(tmp_path)
    whole = made("notes", "train", data)
    expected = content(whole.path)
    partial = store.partial_path(whole.path)
    partial.mkdir()
    tokens = sum(len(whole.tokens(i)) for i in range(3))
    (partial / "tokens.bin").write_bytes(whole.flat[: tokens + 5].tobytes())
    records = encode.encode_documents(
        [Document(str(i), text=BYTES.decode(whole.tokens(i))) for i in range(4)], BYTES
    ).records
    records.tofile(partial / "documents.bin")
    (partial / "journal").write_bytes(b"[3, %d, %d]\n[4, 9" % (tokens, tokens - 3))
    store.remove(whole.path)
    assert content(made("notes", "train", data).path) == expected


def test_threads_that_prepare_the_same_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(50))
    data = data_config(tmp_path)
    makes: list[object] = []
    make = prepare._make

    def slow(*arguments: Any) -> None:
        makes.append(arguments)
        time.sleep(0.2)
        make(*arguments)

    monkeypatch.setattr(prepare, "_make", slow)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(made("notes", "train", data).path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makes) == 1
    assert len(set(results)) == 1
    assert len(results) == 4


def test_too_many_broken_rows_stop_it_and_leave_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*some_texts(50), b"{", b"{", b"{"])
    write_jsonl(tmp_path / "root" / "notes" / "validation.jsonl", some_texts(1))
    with pytest.raises(
        UserError, match=r"(?s)data/max_broken: 3 of 53 rows of notes/train .*3 × bad JSON.*lines 51, 52, 53"
    ):
        made("notes", "train", data_config(tmp_path, max_broken=0.05))
    folder = store.stores_folder(tmp_path / "cache")
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    found = made("notes", "train", data_config(tmp_path, max_broken=0.06))
    assert found.num_documents == 50
    assert found.ledger["broken"]["counts"] == {"bad JSON": 3}
    assert [example["line"] for example in found.ledger["broken"]["examples"]["bad JSON"]] == [51, 52, 53]


def test_a_stricter_limit_also_holds_for_a_store_that_is_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*some_texts(50), b"{", b"{", b"{"])
    made("notes", "train", data_config(tmp_path, max_broken=0.06))
    with pytest.raises(UserError, match=r"(?s)data/max_broken: 3 of 53 rows of notes/train .*lines 51, 52, 53"):
        made("notes", "train", data_config(tmp_path, max_broken=0.05))
    assert made("notes", "train", data_config(tmp_path, max_broken=0.06)).ledger["rows"] == 53  # it is still there


def test_a_limit_judges_a_store_that_is_there_by_the_rows_of_both_sides_of_its_division(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*some_texts(400), b"{", b"{"])
    for _ in range(2):
        for split in ("train", "validation"):
            assert made("notes", split, data_config(tmp_path, max_broken=0.005)).ledger["rows"] == 402


def test_the_share_of_broken_rows_is_of_all_rows_on_both_sides_of_a_division(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*some_texts(400), b"{", b"{"])
    for split in ("train", "validation"):
        assert made("notes", split, data_config(tmp_path)).ledger["broken"]["counts"] == {"bad JSON": 2}


def test_an_early_stop_at_many_broken_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 100)
    rows = [b"{" if index % 2 else {"text": f"row {index}"} for index in range(6000)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", rows)
    write_jsonl(tmp_path / "root" / "notes" / "validation.jsonl", some_texts(1))
    with pytest.raises(UserError, match=r"of 1[01][0-9][0-9] rows"):  # not all 6000 are read
        made("notes", "train", data_config(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="data/cache"):
        made("arithmetic", "validation", data_config(tmp_path, cache=str(tmp_path / "file")))


def test_plain_progress_of_what_takes_long_when_not_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "WORTH_SECONDS", 1e9)
    prepare.prepare("topics", "validation", data=data_config(tmp_path), tokenizer=BYTES)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "WORTH_SECONDS", 0.0)
    prepare.prepare("arithmetic", "validation", data=data_config(tmp_path), tokenizer=BYTES)
    said = capsys.readouterr().err
    assert "prepare arithmetic/validation: " in said
    assert "rows/s" in said


def launch(root: Path, cache: Path, workers: int = 0) -> "subprocess.Popen[str]":
    arguments = [str(root), str(cache), "notes", "bytes", str(workers)]
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_five_times_at_random_it_ends_the_same(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*some_texts(20_000), b"{broken"])
    whole = made("notes", "train", data_config(tmp_path, cache=str(tmp_path / "whole")))
    cache = tmp_path / "cache"
    partial = store.partial_path(store.stores_folder(cache) / whole.path.name)
    rng = random.Random()
    kills = committed = 0
    while kills < 5:
        process = launch(tmp_path / "root", cache)
        before = committed
        while process.poll() is None and committed <= before:
            committed = (partial / "journal").stat().st_size if (partial / "journal").exists() else committed
            time.sleep(0.005)
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        assert not (store.stores_folder(cache) / whole.path.name).exists(), "it ended before it could be killed"
    process = launch(tmp_path / "root", cache)
    assert process.communicate()[0].strip() == str(whole.num_documents)
    assert content(store.stores_folder(cache) / whole.path.name) == content(whole.path)


@pytest.mark.slow
def test_worker_processes_give_the_same_store_and_die_with_their_parent(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", some_texts(8000))
    whole = made("notes", "train", data_config(tmp_path, cache=str(tmp_path / "whole")))
    process = launch(tmp_path / "root", tmp_path / "killed", workers=2)
    partial = store.partial_path(store.stores_folder(tmp_path / "killed") / whole.path.name)
    while not ((partial / "journal").exists() and (partial / "journal").stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert launch(tmp_path / "root", tmp_path / "killed", workers=2).wait() == 0
    assert content(store.stores_folder(tmp_path / "killed") / whole.path.name) == content(whole.path)
