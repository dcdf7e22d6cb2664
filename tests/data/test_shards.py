"""Preparation in several jobs: however they are started, ordered and killed, the store is that of one preparation."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_examples import content, data_config, write_jsonl
from holdfast.cli import main
from holdfast.data import encode, prepare, shards, store
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.shards import Portions, Shard
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import UserError
from holdfast.execution import faults

BYTES = load_tokenizer("bytes")
SCRIPT = Path(__file__).with_name("preparing.py")
SPLITS = ("train", "validation")


def texts(count: int) -> list[Any]:
    rng = random.Random(0)
    rows: list[Any] = [{"text": f"{n} " + " ".join(rng.choices(("a", "bé", "gamma"), k=20))} for n in range(count)]
    rows[count // 3] = b"{broken"
    return rows


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(shards, "PORTION", 2)
    yield
    faults.set_hook(None)


def one(name: str, split: str, data: DataConfig) -> store.TokenStore:
    return prepare.prepare(name, split, data=data, tokenizer=BYTES, progress=False)


def share(text: str, data: DataConfig, split: str = "train", name: str = "notes") -> store.TokenStore | None:
    return prepare.prepare_shard(name, split, Shard.parse(text), data=data, tokenizer=BYTES, progress=False)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", texts(100))
    return data_config(tmp_path, max_broken=0.1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many documents were tokenised, batch by batch."""
    sizes: list[int] = []
    original = encode.encode_documents

    def count(batch: Any, *rest: Any) -> encode.Encoded:
        sizes.append(len(batch))
        return original(batch, *rest)

    monkeypatch.setattr(encode, "encode_documents", count)
    return sizes


def whole(data: DataConfig, split: str = "train") -> dict[str, bytes]:
    """The files of one preparation, in a cache of its own."""
    apart = DataConfig(**{**vars(data), "cache": f"{data.cache}-one"})
    return content(one("notes", split, apart).path)


def left_over(data: DataConfig) -> list[str]:
    """What is in the cache beside stores and locks."""
    folder = store.stores_folder(data.cache_path())
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and not path.name.endswith(".lock")]


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 2, 1, 3)])
@pytest.mark.parametrize("split", SPLITS)
def test_the_last_of_four_jobs_makes_the_store_of_one(
    data: DataConfig, order: tuple[int, ...], split: str, counted: list[int]
) -> None:
    wanted = whole(data, split)
    counted.clear()
    found = [share(f"{number}/4", data, split) for number in order]
    made = next(each for each in reversed(found) if each is not None)
    assert all(each is None for each in found[:-1]) or len(made) < 20  # a small store is dealt to fewer jobs
    assert content(made.path) == wanted
    assert sum(counted) == len(made)  # each document once, and none when the store is made
    assert left_over(data) == []
    assert share("1/4", data, split) is not None


def test_what_is_missing_is_made_by_an_ordinary_preparation(data: DataConfig) -> None:
    wanted = whole(data)
    assert share("3/4", data) is None
    assert share("2/3", data) is None  # another number of jobs: what is there counts for all
    assert content(one("notes", "train", data).path) == wanted
    assert left_over(data) == []


def dying(count: int, ending: str) -> Callable[[str], None]:
    """A hook that ends the job when it passes a point for the given time."""
    left = count

    def hook(name: str) -> None:
        nonlocal left
        left -= name == ending
        if left == 0:
            raise KeyboardInterrupt("power cut")

    return hook


def test_killed_at_every_file_that_it_writes_it_ends_the_same(data: DataConfig) -> None:
    wanted = whole(data)
    rng, kills = random.Random(1), 0
    for _ in range(200):
        faults.set_hook(dying(rng.randint(1, 6), "replace"))
        try:
            found = share(f"{rng.randint(1, 4)}/4", data)
        except KeyboardInterrupt:
            kills += 1
            continue
        finally:
            faults.set_hook(None)
        if found is not None:
            break
    assert kills > 5
    assert content(store.store_paths(data.cache_path())[0]) == wanted
    assert left_over(data) == []


@pytest.mark.parametrize("limit", [{"max_tokens": 700}, {"max_documents": 31}, {"max_tokens": 10**6}])
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_limits_stop_at_the_same_document(data: DataConfig, limit: dict[str, int], order: tuple[int, ...]) -> None:
    limited = DataConfig(**{**vars(data), **limit})
    wanted = whole(limited)
    found = [share(f"{number}/3", limited) for number in order][-1]
    assert found is not None
    assert content(found.path) == wanted


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_does_not_read_on_when_it_has_enough_alone(data: DataConfig, number: int, counted: list[int]) -> None:
    share(f"{number}/2", DataConfig(**{**vars(data), "max_tokens": 300}))
    assert 0 < sum(counted) <= 18  # of 99 documents: one portion is enough, and some are under way


def test_damaged_portions_are_made_again(data: DataConfig) -> None:
    wanted = whole(data)
    share("1/2", data)
    (folder,) = store.stores_folder(data.cache_path()).glob(".*.portions")
    files = sorted(folder.iterdir())
    damages: list[Callable[[bytes], bytes]] = [
        lambda x: x[:-1], lambda x: x + b"x", lambda x: x[:-9] + bytes([x[-9] ^ 1]) + x[-8:], lambda _: b"",
        lambda x: x.replace(b"[1,", b"[9,", 1), lambda _: b"{}\n", lambda x: x[1:],
    ]  # fmt: skip
    assert len(files) >= len(damages)
    for file, damage in zip(files, damages, strict=False):
        file.write_bytes(damage(file.read_bytes()))
    assert content(one("notes", "train", data).path) == wanted
    portions = Portions(folder.parent / "none", BYTES.dtype)
    assert portions.load(0) == []
    assert portions.num_tokens(0) is None


def test_too_many_broken_rows_are_refused_by_a_job_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ENOUGH_ROWS", 10)
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [{"text": "a"}, b"{"] * 50)
    with pytest.raises(UserError, match="data/max_broken"):
        share("1/2", data_config(tmp_path))


def test_token_files_are_looked_through_by_one_job(tmp_path: Path) -> None:
    import token_writers
    from data.test_token_files import ids_of

    path = token_writers.nanogpt(tmp_path / "train", ids_of(["one", "two", "three"]))
    data = data_config(tmp_path, sources={"ids": SourceConfig(path=str(path), validation_fraction=0.01)})
    found = [share(f"{number}/3", data, name="ids") for number in (1, 2, 3)]
    assert len([each for each in found if each is not None]) >= 1
    assert found[-1] is not None or one("ids", "train", data).in_place


def test_chats_keep_the_marks_of_their_assistant(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(40)
    ]
    write_jsonl(tmp_path / "chat.jsonl", rows)
    sources = {"notes": SourceConfig(path=str(tmp_path / "chat.jsonl"))}
    data = data_config(tmp_path, sources=sources)
    wanted = whole(data)
    assert store.LOSS_MASK in wanted
    found = [share(f"{number}/3", data) for number in (2, 3, 1)]
    made = found[-1]
    assert made is not None
    assert content(made.path) == wanted
    assert made.loss_mask is not None
    assert made.loss_mask.any()


def test_what_jobs_left_is_removed_with_what_is_unfinished(data: DataConfig) -> None:
    share("1/2", data)
    (name,) = store.remove_unfinished(data.cache_path())
    assert name.startswith("notes-train-")
    assert left_over(data) == []


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "1/0", "a/b", "1/4/2", "-1/4", "1/1000000"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--shard .*expected I/N"):
        Shard.parse(text)


def test_on_the_command_line_shares_come_to_what_one_preparation_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", texts(100))
    values = {
        "job": "gpt/train/pretrain",
        "training": {"batch_size": 4, "tokens": 4 * 32, "dataset": [{"name": "notes", "style": "PMD"}]},
        "architecture": {"block_size": 32, "n_layers": 1, "n_embd": 32},
        "data": {"root": "root", "max_broken": 0.1},
        "eval": {"evaluations": [], "held_out": ["arithmetic"]},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)

    def types(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "prepare", "x.yaml", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    assert types("data.cache=whole")[0] == 0
    assert types("--shard", "3/2") == (2, "error: --shard 3/2: expected I/N with I from 1 to N, such as 1/4\n")
    said = [types("data.cache=shared", "--shard", f"{number}/2") for number in (2, 1)]
    assert [code for code, _ in said] == [0, 0]
    assert "notes/train: shard 2/2: its share is done" in said[0][1]
    assert "notes/train: shard 1/2: all is there, " in said[1][1]
    wanted, found = (store.store_paths(tmp_path / name) for name in ("whole", "shared"))
    assert len(wanted) == 3
    assert [content(path) for path in found] == [content(path) for path in wanted]


@pytest.mark.slow
def test_four_processes_at_once_killed_at_random_give_the_bytes_of_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", texts(4000))
    wanted = content(one("notes", "train", data_config(tmp_path, cache=str(tmp_path / "one"))).path)
    rng, kills = random.Random(2), 0
    waiting = [1, 2, 3, 4]  # each writes a dozen portions
    while waiting:
        running = {}
        for number in waiting:
            point = f"replace:{rng.randint(2, 10)}" if kills < 5 else ""
            arguments = [str(tmp_path / "root"), str(tmp_path / "cache"), "notes", "bytes", "0", f"{number}/4"]
            environment = {**os.environ, faults.VARIABLE: point}
            running[number] = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], env=environment)
        codes = {number: process.wait(120) for number, process in running.items()}
        assert set(codes.values()) <= {0, -signal.SIGKILL}
        waiting = [number for number, code in codes.items() if code]
        kills += len(waiting)
    assert kills >= 4
    (path,) = store.store_paths(tmp_path / "cache")
    assert content(path) == wanted
