"""Token files of other programs: the rows of the same texts prepared here, or a refusal that names the file."""

import json
import random
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import token_writers as writers
from data_examples import GPT2, SHARED, content, data_config, needs_shared, write_jsonl
from holdfast.cli import main
from holdfast.curriculum import Curriculum, Stage
from holdfast.data import mapped, prepare
from holdfast.data import token_files as made_of
from holdfast.data.batches import Batches
from holdfast.data.checksums import PIECE
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.leaks import check_leaks
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.rows import Rows
from holdfast.data.sampling import DatasetStyle, Sampling
from holdfast.data.sources import find_source
from holdfast.data.store import TokenStore
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError

BYTES = load_tokenizer("bytes")
STYLES = (DatasetStyle.PMD, DatasetStyle.PADDED, DatasetStyle.PACKED)
EOT = BYTES.eot_id


def some_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ("alpha", "beta", "γάμμα", "delta", "Ünï", "\n", "  ")
    return [f"{number} " + " ".join(rng.choices(words, k=rng.randint(1, 40))) for number in range(count)]


def ids_of(texts: list[str]) -> list[Any]:
    return [np.array([*text.encode(), EOT]) for text in texts]


def opened(data: DataConfig, split: str = "train", name: str = "ids") -> TokenStore:
    return prepare.prepare(name, split, data=data, tokenizer=BYTES, progress=False)


def source(path: Path | str, **values: Any) -> SourceConfig:
    return SourceConfig(path=str(path), **values)


def config(tmp_path: Path, path: Path | str, **values: Any) -> DataConfig:
    return data_config(tmp_path, sources={"ids": source(path, **values)})


def batches(store: TokenStore, style: DatasetStyle, steps: int = 6) -> Any:
    """Batches of a run that draws from a store, under a name that all stores share."""
    sampling = Sampling("same", 1.0, style)
    curriculum = Curriculum((Stage("s", 4 * 32 * steps, (sampling,)),), 4, 32)
    rows = Rows(store, style, 32)
    (key,) = curriculum.datasets
    plan = DataPlan(curriculum, 0, {key: SourceSize(len(rows), rows.mean_loss_tokens, "same")})
    made = Batches(plan, {key: rows}, 1)
    return [made[step] for step in range(steps)]


def assert_same(one: TokenStore, other: TokenStore) -> None:
    assert (one.num_documents, one.num_tokens, one.num_bytes) == (
        other.num_documents,
        other.num_tokens,
        other.num_bytes,
    )
    for name in ("offsets", "prompt_lengths", "doc_bytes", "keys", "token_bytes"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for style in STYLES:
        for mine, theirs in zip(batches(one, style), batches(other, style), strict=True):
            for name, a, b in zip(mine._fields, mine, theirs, strict=True):
                assert np.array_equal(a, b), (style, name)
                assert a is None or a.dtype == b.dtype
        rows = [Rows(store, style, 32) for store in (one, other)]
        every = np.arange(len(rows[0]))
        assert np.array_equal(rows[0].loss_bytes(every), rows[1].loss_bytes(every))  # what bits per byte divide by
        assert np.array_equal(rows[0].rows(every).y, rows[1].rows(every).y)


TEXTS = {"train": some_texts(60, 0), "validation": some_texts(9, 1)}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStore]:
    """The stores of the same texts, prepared here."""
    folder = tmp_path_factory.mktemp("ours")
    for split, texts in TEXTS.items():
        write_jsonl(folder / f"{split}.jsonl", [{"text": text} for text in texts])
    data = config(folder, folder / "train.jsonl", validation=str(folder / "validation.jsonl"))
    return {split: opened(data, split) for split in TEXTS}


@pytest.mark.parametrize("write", writers.WRITERS, ids=lambda write: write.__name__)
def test_the_rows_of_a_format_are_those_of_the_same_texts_prepared_here(
    tmp_path: Path, write: writers.Writer, ours: dict[str, TokenStore]
) -> None:
    paths = {split: write(tmp_path / split, ids_of(texts)) for split, texts in TEXTS.items()}
    data = config(tmp_path, paths["train"], validation=str(paths["validation"]))
    for split in TEXTS:
        found = opened(data, split)
        assert_same(found, ours[split])
        assert found.in_place == (write is not writers.parquet)
        assert (found.path / "tokens.bin").exists() != found.in_place  # no copy


def test_what_has_no_validation_file_is_divided_as_the_same_texts_are(tmp_path: Path) -> None:
    texts = [*some_texts(200, 3), *some_texts(40, 3)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [{"text": text} for text in texts])
    path = writers.nanogpt(tmp_path / "all", ids_of(texts))
    for more in ({}, {"max_tokens": 900}, {"max_documents": 7}):
        data = data_config(tmp_path, sources={"ids": source(path)}, validation_fraction=0.2, **more)
        for split in ("train", "validation"):
            found, wanted = opened(data, split), opened(data, split, "notes")
            assert_same(found, wanted)
            assert found.ledger["stopped_at_max_tokens"] == wanted.ledger["stopped_at_max_tokens"]
            assert found.ledger["held_out_from_train"]


def test_several_files_are_one_stream_and_folders_tell_their_splits(
    tmp_path: Path, ours: dict[str, TokenStore]
) -> None:
    ids = ids_of(TEXTS["train"])
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, part in enumerate((ids[:11], ids[11:40], ids[40:])):
        writers.llmc(folder / f"train_{number:06}", part)
    writers.llmc(folder / "val_000000", ids_of(TEXTS["validation"]))
    (folder / "input.txt").write_text("what they were made of")
    for data in (config(tmp_path, folder), config(tmp_path, f"{folder}/train_*.bin", validation=f"{folder}/val_*.bin")):
        assert_same(opened(data), ours["train"])
        assert_same(opened(data, "validation"), ours["validation"])


def test_a_saved_dict_has_its_own_splits(tmp_path: Path, ours: dict[str, TokenStore]) -> None:
    from datasets import Dataset, DatasetDict

    parts = {split: Dataset.from_dict({"input_ids": [x.tolist() for x in ids_of(t)]}) for split, t in TEXTS.items()}
    DatasetDict(parts).save_to_disk(str(tmp_path / "dict"))
    for split in TEXTS:
        assert_same(opened(config(tmp_path, tmp_path / "dict"), split), ours[split])


def test_marks_before_and_between_documents(tmp_path: Path) -> None:
    def ends(*ids: int) -> list[int]:
        path = writers.nanogpt(tmp_path / f"x{len(list(tmp_path.iterdir()))}", [np.array(ids)])
        return opened(config(tmp_path, path, validation=str(path.parent / "none.bin"))).offsets[1:].tolist()

    writers.nanogpt(tmp_path / "none", [np.array([1, EOT])])
    assert ends(1, 2, EOT, 3, EOT) == [3, 5]
    assert ends(EOT, 1, EOT, 3) == [3, 4]  # llm.c puts the mark before a document
    assert ends(EOT, EOT, 1, EOT, EOT, 3, EOT, EOT) == [5, 8]
    assert ends(1, 2, 3) == [3]
    assert ends(EOT, EOT) == [2]


def test_a_stream_without_marks_is_said_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(made_of, "LONGEST", 120)
    monkeypatch.setattr(made_of, "SHORTENED", 100)
    monkeypatch.setattr(made_of, "CHUNK", 64)
    path = writers.nanogpt(tmp_path / "train", [np.arange(250) % 200])
    writers.nanogpt(tmp_path / "val", [np.array([1, 2, EOT])])
    found = opened(config(tmp_path, path, validation=str(tmp_path / "val.bin")))
    assert found.offsets.tolist() == [0, 100, 200, 250]
    assert "the end-of-text id 256 is nowhere in it" in capsys.readouterr().err


def test_more_files_than_a_process_may_open(tmp_path: Path, ours: dict[str, TokenStore]) -> None:
    files = [writers.nanogpt(tmp_path / f"{n:03}", [ids]) for n, ids in enumerate(ids_of(TEXTS["train"]))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_now = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 60
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened_now + len(files) // 2, hard))
        found = opened(config(tmp_path, f"{tmp_path}/*.bin", validation_fraction=1e-9))
        assert found.flat[: found.num_tokens].tolist() == ours["train"].flat.tolist()
        found.check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ids_that_the_vocabulary_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    good = writers.nanogpt(tmp_path / "val", ids_of(TEXTS["validation"]))
    for write in writers.WRITERS:
        folder = tmp_path / write.__name__
        folder.mkdir()
        path = write(folder / "train", [*ids_of(["fine"]), np.array([1, 258, EOT])])
        with pytest.raises(UserError, match=r"train.*the id 258 .*not in the vocabulary .* bytes, which has 258 ids"):
            opened(config(tmp_path, path))
        assert not list((tmp_path / "cache" / "prepared").glob("[!.]*")), "nothing is left behind"
    negative = tmp_path / "n.npy"
    np.save(negative, np.array([3, -1, EOT], "<i4"))
    with pytest.raises(UserError, match=r"n\.npy: the id 4294967295"):
        opened(config(tmp_path, negative))
    writers.nanogpt(tmp_path / "val", ids_of(["odd"]))
    with pytest.raises(UserError, match=r"read as uint32.*data/sources/ids/dtype"):
        opened(config(tmp_path, good, dtype="uint32"))


@pytest.mark.parametrize("write", writers.WRITERS, ids=lambda write: write.__name__)
def test_what_is_cut_short_is_refused_by_name(tmp_path: Path, write: writers.Writer) -> None:
    write(tmp_path / "train", ids_of(TEXTS["train"]))
    named = {path for path in tmp_path.rglob("train*") if path.is_file() and not path.name.endswith(".metadata")}
    named |= set(tmp_path.rglob("*.arrow"))
    assert named
    for path in named:
        whole = path.read_bytes()
        for left in (len(whole) - 1, len(whole) // 2 // 8 * 8 + 1):
            path.write_bytes(whole[:left])
            with pytest.raises(UserError, match=path.name.partition(".")[0]):
                opened(config(tmp_path, _path_of(tmp_path, write)))
        path.write_bytes(whole)
    opened(config(tmp_path, _path_of(tmp_path, write)))


def _path_of(folder: Path, write: writers.Writer) -> Path:
    ending = {writers.megatron: "", writers.megatron_wide: "", writers.saved_to_disk: "", writers.datatrove: ".ds",
              writers.parquet: ".parquet", writers.olmo: ".npy", writers.olmo_indexed: ".npy",
              writers.numpy_file: ".npy"}.get(write, ".bin")  # fmt: skip
    return folder / f"train{ending}"


def test_an_arrow_stream_that_ends_between_two_batches_is_noticed(tmp_path: Path) -> None:
    writers.saved_to_disk(tmp_path / "d", ids_of(TEXTS["train"]))
    file = sorted((tmp_path / "d").glob("*.arrow"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=rf"{file.name}: it was cut short"):
        opened(config(tmp_path, tmp_path / "d"))


def test_masks_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = {"input_ids": [[1, 2, 3, EOT], [4, 5, EOT]], "attention_mask": [[1] * 4, [1] * 3]}
    Dataset.from_dict({**rows, "labels": rows["input_ids"]}).save_to_disk(str(tmp_path / "plain"))
    assert opened(config(tmp_path, tmp_path / "plain", validation_fraction=0.01)).num_tokens == 7
    for name, masked in (("labels", [[-100, 2, 3, EOT], [4, 5, EOT]]), ("attention_mask", [[1] * 4, [1, 1, 0]])):
        Dataset.from_dict({**rows, name: masked}).save_to_disk(str(tmp_path / name))
        with pytest.raises(UserError, match=f"its column {name} masks some ids"):
            opened(config(tmp_path, tmp_path / name))
    (tmp_path / "x.ds.loss").write_bytes(b"\x01\x00")
    path = writers.datatrove(tmp_path / "x", [np.array([1, EOT])])
    with pytest.raises(UserError, match=r"x\.ds\.loss .* which is not read"):
        opened(config(tmp_path, path))


@pytest.fixture
def large(tmp_path: Path) -> tuple[DataConfig, Path]:
    """A file of several blocks."""
    path = writers.nanogpt(tmp_path / "train", ids_of(some_texts(1500, 7)))
    writers.nanogpt(tmp_path / "val", ids_of(TEXTS["validation"]))
    assert path.stat().st_size > 3 * PIECE
    return config(tmp_path, path, validation=str(tmp_path / "val.bin")), path


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1]))


def test_damage_is_noticed_before_the_first_row_of_a_block_is_used(large: tuple[DataConfig, Path]) -> None:
    data, path = large
    rows = Rows(opened(data), DatasetStyle.PMD, 64)
    noted = content(rows.prepared.path)
    flip(path, 3 * PIECE + 7)
    rows.rows([0, 1, 2])
    with pytest.raises(UserError, match=r"train\.bin: not as it was .* block 3 of .* does not have its checksum"):
        rows.rows([0, 3 * PIECE // 2 // 64])
    with pytest.raises(UserError, match=r"train\.bin: not as it was"):
        TokenStore.open(rows.prepared.path).check()
    assert content(rows.prepared.path) == noted, "the sums of the good file stay"
    flip(path, 3 * PIECE + 7)
    TokenStore.open(rows.prepared.path).check()


def test_a_file_that_shrinks_or_goes_away_is_named(large: tuple[DataConfig, Path]) -> None:
    data, path = large
    store = opened(data).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"train\.bin: not as it was .*cut short"):
        _ = TokenStore.open(store).flat
    path.unlink()
    with pytest.raises(UserError, match=r"train\.bin: the file is gone"):
        _ = TokenStore.open(store).flat
    with pytest.raises(ConfigError, match=r"data/sources/ids/path: .*train\.bin.*token files that exist"):
        opened(data)


def test_a_damaged_index_in_the_cache_is_made_again(
    large: tuple[DataConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = large
    path = opened(data).path
    good = content(path)
    for name in good:
        flip(path / name, len(good[name]) - 1) if name != mapped.FILES else (path / name).unlink()
        opened(data).check()
        assert {key: value for key, value in content(path).items() if key != mapped.FILES or name != key} == {
            key: value for key, value in good.items() if key != mapped.FILES or name != key
        }
    assert "made again" in capsys.readouterr().err


def test_a_file_that_was_moved_is_the_same_store(large: tuple[DataConfig, Path], tmp_path: Path) -> None:
    data, path = large
    store = opened(data)
    moved = tmp_path / "elsewhere" / "train.bin"
    moved.parent.mkdir()
    shutil.move(path, moved)
    found = opened(config(tmp_path, moved, validation=str(tmp_path / "val.bin")))
    assert found.path == store.path
    found.check()
    TokenStore.open(store.path).check()  # `holdfast data show` finds it too


def test_texts_of_ids_are_not_asked_for_in_vain(tmp_path: Path) -> None:
    from holdfast.data.documents import SourceContext

    path = writers.nanogpt(tmp_path / "train", ids_of(["a"]))
    data = config(tmp_path, path)
    with pytest.raises(UserError, match=r"data/sources/ids: .*train\.bin holds ids"):
        find_source("ids", data).documents("train", SourceContext(data))


def test_mistakes_in_a_section_are_named(tmp_path: Path) -> None:
    path = writers.nanogpt(tmp_path / "train", ids_of(["a"]))
    with pytest.raises(ConfigError, match=r"dtype: .*uint16, uint32"):
        source(path, dtype="int7")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": str(tmp_path / "gone.bin")}, "data/sources/ids/path"),
        ({"path": str(path), "validation": str(tmp_path / "gone.bin")}, "data/sources/ids/validation"),
        ({"path": str(path), "validation": str(path)}, "data/sources/ids/validation"),
        ({"path": str(path), "format": "bin", "text": "x"}, "data/sources/ids/text"),
    ]
    for values, where in cases:
        with pytest.raises(ConfigError, match=where):
            opened(data_config(tmp_path, sources={"ids": SourceConfig(**values)}))
    shutil.copy(path, other := tmp_path / "tokens.dat")
    data = config(tmp_path, other, format="bin", validation=str(path))
    assert opened(data).num_tokens == 2


@pytest.mark.parametrize("write", [writers.saved_to_disk, writers.megatron], ids=lambda write: write.__name__)
def test_leaks_are_found_in_ids_as_in_texts(tmp_path: Path, write: writers.Writer, ours: dict[str, TokenStore]) -> None:
    path = write(tmp_path / "train", ids_of([*TEXTS["train"], *TEXTS["validation"][:3]]))
    theirs = opened(config(tmp_path, path, validation_fraction=1e-9))
    (leak,) = check_leaks({"notes": ours["validation"]}, {"ids": theirs}, BYTES)
    assert leak.exact == 3
    (back,) = check_leaks({"ids": theirs}, {"notes": ours["train"]}, BYTES)
    assert back.exact == len(TEXTS["train"])


def test_on_the_command_line_a_bad_file_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writers.nanogpt(tmp_path / "train", ids_of(TEXTS["train"]))
    writers.llmc(tmp_path / "val", ids_of(TEXTS["validation"]))
    writers.nanogpt(tmp_path / "high", [np.array([1, 300])])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "val.bin").read_bytes()[:-2])
    monkeypatch.chdir(tmp_path)
    section = {"path": "train.bin", "validation": "val.bin"}
    values = {
        "job": "gpt/train/pretrain",
        "training": {"batch_size": 4, "tokens": 4 * 32, "dataset": [{"name": "ids", "style": "PMD"}]},
        "architecture": {"block_size": 32, "n_layers": 1, "n_embd": 32},
        "data": {"cache": "cache", "sources": {"ids": section}},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(values))

    def types(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    for override, told in (
        ("path=high.bin", "high.bin: the id 300"),
        ("path=cut.bin", "cut.bin: its header tells of"),
        ("validation=cut.bin", "cut.bin: its header tells of"),
        ("path=gone.bin", "data/sources/ids/path"),
    ):
        code, said = types("prepare", "x.yaml", f"data.sources.ids.{override}")
        assert (code, told in said, "Traceback" in said) == (2, True, False), said
    for command in ("prepare", "plan"):
        code, said = types(command, "x.yaml")
        assert code == 0, said
    code, said = types("data", "show", "ids-validation", "--cache", "cache", "--examples", "1")
    assert code == 0
    assert f"read in place: {tmp_path / 'val.bin'}" in said
    assert TEXTS["validation"][0].split()[0] in said


@needs_shared
def test_gpt2_files_of_real_texts_have_the_rows_that_are_prepared_here(tmp_path: Path) -> None:
    gpt2 = load_tokenizer(GPT2)
    texts = [row["text"] for row in map(json.loads, (SHARED / "data/tinystories/train.jsonl").open()) if row["text"]]
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in texts[:200]])
    write_jsonl(tmp_path / "validation.jsonl", [{"text": text} for text in texts[200:220]])
    parts = (texts[:200], texts[200:220])
    ids = [[np.array([*found, gpt2.eot_id]) for found in gpt2.encode_batch(part)] for part in parts]
    writers.llmc(tmp_path / "train", ids[0])
    writers.llmc(tmp_path / "val", ids[1])
    ours = source(tmp_path / "train.jsonl", validation=str(tmp_path / "validation.jsonl"))
    theirs = source(tmp_path / "train.bin", validation=str(tmp_path / "val.bin"))
    data = data_config(tmp_path, sources={"ours": ours, "theirs": theirs})
    for split in TEXTS:
        found = [prepare.prepare(name, split, data=data, tokenizer=gpt2, progress=False) for name in ("ours", "theirs")]
        assert_same(*found)
