"""Damaged stores: nothing of them is used, they are named and made again; what cannot be checked says so."""

import errno
import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_examples import content, data_config, write_jsonl
from holdfast.data import prepare, store
from holdfast.data.checksums import PIECE, Blocks, PieceSums, checksums
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.leaks import check_leaks
from holdfast.data.rows import RowArrays, Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.data.store import DamagedStore, TokenStore
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import RunError, UserError

BYTES = load_tokenizer("bytes")


def opened(data: DataConfig, name: str = "sums") -> TokenStore:
    return prepare.prepare(name, "train", data=data, tokenizer=BYTES, progress=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, TokenStore]:
    """A store of several blocks, whose documents have prompts."""
    folder = tmp_path_factory.mktemp("damage")
    rng = random.Random(0)
    rows = [{"question": f"{i} " + "x" * rng.randint(0, 300), "answer": str(rng.random())} for i in range(1500)]
    file = write_jsonl(folder / "qa.jsonl", rows)
    data = data_config(folder, sources={"sums": SourceConfig(path=str(file), prompt="{question}", answer="{answer}")})
    return data, opened(data)


@pytest.fixture
def kept(made: tuple[DataConfig, TokenStore]) -> Iterator[tuple[DataConfig, Path, dict[str, bytes]]]:
    """Its files, which are there again after the test."""
    data, found = made
    good = content(found.path)
    yield data, found.path, good
    shutil.rmtree(found.path, ignore_errors=True)
    found.path.mkdir()
    for name, written in good.items():
        (found.path / name).write_bytes(written)


def flip(path: Path, place: int, bit: int = 0) -> None:
    whole = bytearray(path.read_bytes())
    whole[place] ^= 1 << bit
    path.write_bytes(bytes(whole))


def all_rows(found: TokenStore) -> list[RowArrays]:
    styles = (DatasetStyle.PMD, DatasetStyle.PADDED, DatasetStyle.PACKED)
    return [(rows := Rows(found, style, 96)).rows(range(len(rows))) for style in styles]


def same(one: list[RowArrays], other: list[RowArrays]) -> bool:
    return all(np.array_equal(x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))


def test_a_flipped_bit_in_any_file_is_noticed_and_the_store_made_again(
    kept: tuple[DataConfig, Path, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    data, path, good = kept
    wanted, keys = all_rows(opened(data)), np.array(opened(data).keys)
    rng = random.Random(1)
    for name in good:
        for place in (0, len(good[name]) - 1, rng.randrange(len(good[name]))):
            flip(path / name, place, rng.randrange(8))
            found = opened(data)
            assert same(all_rows(found), wanted), (name, place)
            assert np.array_equal(found.keys, keys), (name, place)
            assert found.doc_bytes.sum() == found.num_bytes
            said = capsys.readouterr().err
            assert str(path) in said, (name, place)
            assert "damaged" in said
            assert "made again" in said
            assert content(path) == good
    assert sorted(item.name for item in path.parent.iterdir() if "lock" not in item.name) == [path.name]


def test_only_blocks_that_are_used_are_looked_at(kept: tuple[DataConfig, Path, dict[str, bytes]]) -> None:
    data, path, good = kept
    assert len(good["tokens.bin"]) > 3 * PIECE
    flip(path / "tokens.bin", 3 * PIECE)
    found = TokenStore.open(path)
    rows = Rows(found, DatasetStyle.PMD, 64)
    rows.rows([0, 1, 2])
    with pytest.raises(DamagedStore, match=r"block 3 of .* of tokens.bin does not have its checksum") as raised:
        rows.rows([0, 3 * PIECE // 2 // 64])
    assert str(path) in str(raised.value)
    assert "remove" not in str(raised.value)
    assert data.cache_path() in path.parents


def test_damage_in_the_middle_of_a_run_is_mended_without_a_word_of_it_being_used(
    kept: tuple[DataConfig, Path, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    data, path, _ = kept
    wanted = all_rows(opened(data))
    found = opened(data)
    for name in ("tokens.bin", "keys.npy"):
        flip(path / name, 2 * PIECE % (path / name).stat().st_size)
    assert same(all_rows(found), wanted)
    assert found.keys[:, 0].sum() == opened(data).keys[:, 0].sum()
    assert capsys.readouterr().err.count("made again") == 1


def test_short_long_and_missing_files(kept: tuple[DataConfig, Path, dict[str, bytes]]) -> None:
    data, path, good = kept
    wanted = all_rows(opened(data))
    for name, written in good.items():
        for damaged in (written[:-2], written + b"\0\0", b"", None):
            (path / name).unlink()
            if damaged is not None:
                (path / name).write_bytes(damaged)
            found = opened(data)
            assert same(all_rows(found), wanted), name
            found.check()
            assert content(path) == good


def test_what_cannot_be_made_again_is_named_and_kept(
    kept: tuple[DataConfig, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path, _ = kept
    found = opened(data)
    flip(path / "tokens.bin", 5)
    damaged = content(path)

    def gone(*_: object) -> None:
        raise UserError("its file is gone")

    monkeypatch.setattr(prepare, "_make", gone)
    with pytest.raises(UserError, match="cannot be made again: its file is gone") as raised:
        all_rows(found)
    assert str(path) in str(raised.value)
    assert content(path) == damaged


def test_a_source_that_gives_other_documents_now_does_not_pass_for_the_same(
    kept: tuple[DataConfig, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path, _ = kept
    found = opened(data)
    flip(path / "tokens.bin", 5)
    monkeypatch.setattr(prepare, "encode_all", _reversed)
    with pytest.raises(RunError, match="not what it was"):
        all_rows(found)


def _reversed(parts: Iterator[list[object]], tokenizer: object, *_: object) -> Iterator[object]:
    from holdfast.data.encode import encode_documents

    for part in parts:
        yield encode_documents(part[::-1], tokenizer)  # type: ignore[arg-type]


def without_checksums(path: Path) -> None:
    """Make a store one of the previous version."""
    ledger = json.loads((path / store.LEDGER).read_text())
    for key in ("checksums", "ledger_checksum"):
        del ledger[key]
    (path / store.LEDGER).write_text(json.dumps(ledger))


def test_a_store_of_the_previous_version_works_and_says_once_that_it_cannot_be_checked(
    kept: tuple[DataConfig, Path, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    data, path, good = kept
    wanted = all_rows(opened(data))
    without_checksums(path)
    old = content(path)
    prepare._say_unchecked.cache_clear()
    assert same(all_rows(opened(data)), wanted)
    opened(data)
    said = capsys.readouterr().err
    assert said.count("cannot be checked") == 1
    assert content(path) == old
    for name, place, value in (
        ("tokens.bin", 100, np.array([300], "<u2")),  # beyond the 258 ids of bytes
        ("offsets.npy", 128 + 8 * 7, np.array([10**12], "<i8")),
        ("prompt_lengths.npy", 128 + 4 * 7, np.array([10**9], "<u4")),
    ):
        if TokenStore.open(path).can_be_checked:  # made again by the round before
            without_checksums(path)
        whole = bytearray((path / name).read_bytes())
        whole[place : place + value.nbytes] = value.tobytes()
        (path / name).write_bytes(bytes(whole))
        assert same(all_rows(opened(data)), wanted), name
        assert content(path) == good
        assert "made again" in capsys.readouterr().err


def test_a_damaged_part_of_a_killed_preparation_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [{"text": f"text {i} " * 50} for i in range(400)])
    data = data_config(tmp_path)
    monkeypatch.setattr(prepare, "JOURNAL_SECONDS", -1.0)
    monkeypatch.setattr("holdfast.data.encode.BATCH_DOCUMENTS", 100)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(data, "notes")
    (partial,) = store.stores_folder(data.cache_path()).glob(".*.partial")
    kept = tmp_path / "kept"
    shutil.copytree(partial, kept)
    before = (kept / "tokens.bin").read_bytes()
    for name in ("tokens.bin", "documents.bin", "journal"):
        for damage in (flip, lambda path, _: path.write_bytes(b""), lambda path, _: path.unlink()):
            shutil.rmtree(partial.parent)
            shutil.copytree(kept, partial)
            damage(partial / name, 7)
            found = opened(data, "notes")
            said = capsys.readouterr().err
            assert "damaged" in said or name == "journal"  # without one nothing was promised
            assert (found.path / "tokens.bin").read_bytes() == before
            assert found.num_bytes == found.doc_bytes.sum()
            found.check()


def test_few_file_handles_and_little_memory_are_no_damage(
    kept: tuple[DataConfig, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, good = kept
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(RunError) as raised:
            TokenStore.open(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "open more files" in str(raised.value)
    for error in (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()):

        def refused(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(np, "memmap", refused)
            with pytest.raises(RunError) as raised:
                TokenStore.open(path)
        assert "too little memory" in str(raised.value)
        assert "remove" not in str(raised.value)
    assert content(path) == good


def test_damaged_notes_of_leaks_are_found_anew(kept: tuple[DataConfig, Path, dict[str, bytes]], tmp_path: Path) -> None:
    data, _, _ = kept
    found = opened(data)

    def leaks() -> list[object]:
        return list(check_leaks({"sums": found}, {"sums": found}, BYTES, cache=tmp_path))

    wanted = leaks()
    (note,) = (tmp_path / "leaks").iterdir()
    good = note.read_bytes()
    for place in range(0, len(good), 19):
        flip(note, place, place % 8)
        assert leaks() == wanted
        note.write_bytes(good)
    without = json.loads(good)
    del without["checksum"]
    note.write_text(json.dumps(without))  # of the previous version
    assert leaks() == wanted


def test_blocks_of_many_pieces_have_the_sums_of_their_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("holdfast.data.checksums.MOST_BLOCKS", 2)
    data = np.random.default_rng(0).integers(0, 256, 7 * PIECE + 11, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    sums = PieceSums()
    for part in np.array_split(data, 29):
        sums.update(part.tobytes())
    assert sums.total() == PieceSums.of(tmp_path / "file").total()
    known = checksums({"file": sums}, {"file": len(data)})["file"]
    assert known["pieces"] == 4
    blocks = Blocks(data, known)
    assert blocks.count == 2
    assert [blocks.holds(block) for block in range(2)] == [True, True]
    data[5 * PIECE] ^= 1
    assert [blocks.holds(block) for block in range(2)] == [True, False]
    assert list(blocks.unseen(np.array([0, 10]), np.array([10, 5 * PIECE]))) == [0, 1]
    blocks.mark(0)
    assert list(blocks.unseen(np.array([0]), np.array([5 * PIECE]))) == [1]
    assert blocks.left == 1
