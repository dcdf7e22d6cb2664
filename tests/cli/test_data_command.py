"""`holdfast data` and `holdfast tokenizer`: what the cache holds, and tokenizers made from a config."""

import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_examples import data_config, write_jsonl
from holdfast.cli import data as data_command
from holdfast.cli import main
from holdfast.cli import tokenizer as tokenizer_command
from holdfast.data import store
from holdfast.data.prepare import prepare
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import UserError

BYTES = load_tokenizer("bytes")


def run(app: object, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)  # type: ignore[arg-type]  # a Typer app
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def cache(tmp_path: Path) -> str:
    rows = [{"text": f"note {'very ' * n}long"} for n in range(100)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*rows, b"{broken"])
    data = data_config(tmp_path)
    for name, split in (("notes", "train"), ("arithmetic", "validation")):
        prepare(name, split, data=data, tokenizer=BYTES, progress=False)
    return str(tmp_path / "cache")


def test_list(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in run(data_command.app, "list", "--json", "--cache", cache).splitlines()]
    assert [(line["source"], line["split"]) for line in lines] == [("arithmetic", "validation"), ("notes", "train")]
    assert lines[1]["tokens"] == lines[1]["bytes"] + lines[1]["documents"]
    assert lines[1]["disk"] > 2 * lines[1]["tokens"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HOLDFAST_CACHE", cache)
    assert "notes-train-" in run(data_command.app, "list")
    assert "nothing is prepared" in run(data_command.app, "list", "--cache", cache + "/empty")


def test_show(cache: str) -> None:
    said = run(data_command.app, "show", "notes", "--cache", cache, "--examples", "2")
    assert "tokens a document: 5 %:" in said
    assert "train.jsonl, line 101" in said
    assert "'note long'" in said
    said = run(data_command.app, "show", "arithmetic", "--cache", cache)
    assert "=' ⟶ '" in said
    with pytest.raises(UserError, match="nosuch: there is no such store"):
        run(data_command.app, "show", "nosuch", "--cache", cache)


def test_list_shows_the_names_that_show_takes(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = run(data_command.app, "list", "--cache", cache)
    names = [found.path.name for found in store.stores(Path(cache))]
    assert all(name in said for name in names), said
    assert all(len(line) <= 80 for line in said.splitlines()), said


def test_show_says_which_of_several_are_meant(cache: str, tmp_path: Path) -> None:
    rows = [{"text": f"other note {n}"} for n in range(100)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", rows)
    prepare("notes", "train", data=data_config(tmp_path), tokenizer=BYTES, progress=False)
    names = [found.path.name for found in store.stores(Path(cache)) if found.name == "notes"]
    assert len(names) == 2
    said = run(data_command.app, "show", "notes-train", "--cache", cache)
    assert said.startswith(f"2 stores begin with notes-train: {', '.join(names)}\n")
    assert said.count("tokens a document:") == 2
    assert "begin with" not in run(data_command.app, "show", names[0], "--cache", cache)


def test_show_groups_broken_rows_of_one_reason(tmp_path: Path) -> None:
    good = [{"text": f"note {n}"} for n in range(4000)]
    write_jsonl(tmp_path / "root" / "notes" / "train.jsonl", [*good, *({"body": "no text"} for _ in range(30))])
    prepare("notes", "train", data=data_config(tmp_path), tokenizer=BYTES, progress=False)
    said = run(data_command.app, "show", "notes", "--cache", str(tmp_path / "cache"))
    broken = [line for line in said.splitlines() if "broken:" in line]
    assert len(broken) == 2, broken
    assert "30 ×" in broken[0]
    assert "train.jsonl, lines 4001, 4002, 4003, …" in broken[1]


def test_remove(cache: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(data_command.app, ["remove", "notes", "--cache", cache], input="n\n")
    assert refused.exit_code == 1
    assert len(list(store.stores(Path(cache)))) == 2
    run(data_command.app, "remove", "notes", "--cache", cache, "--yes")
    assert [found.name for found in store.stores(Path(cache))] == ["arithmetic"]
    with pytest.raises(UserError, match="--unfinished"):
        run(data_command.app, "remove", "--cache", cache)


def test_remove_what_killed_preparations_left_but_not_what_is_being_made(cache: str) -> None:
    folder = store.stores_folder(Path(cache))
    for name in ("dead", "alive"):
        store.partial_path(folder / name).mkdir()
    with store.lock(folder / "alive") as mine:
        assert mine
        assert "dead: unfinished, removed" in run(data_command.app, "remove", "--unfinished", "--cache", cache)
    assert [path.name for path in folder.glob(".*.partial")] == [".alive.partial"]
    assert len(list(store.stores(Path(cache)))) == 2


def test_a_tokenizer_is_trained_on_a_configs_mixture(tmp_path: Path) -> None:
    for name, word in (("greek", "λόγος "), ("latin", "verbum ")):
        write_jsonl(tmp_path / "root" / name / "train.jsonl", [{"text": word * 30 + str(n)} for n in range(50)])
    config = tmp_path / "config.yaml"
    dataset = "[[{name: greek, rate: 1.0}], [{name: greek, rate: 0.5}, {name: latin, rate: 0.5}]]"
    config.write_text(f"data: {{root: {tmp_path / 'root'}}}\ntraining: {{dataset: {dataset}, batch_size: 8}}\n")
    out = tmp_path / "made"
    said = run(tokenizer_command.app, "train", str(config), str(out), "--vocab-size", "280")
    assert "greek, latin" in said
    tokenizer = load_tokenizer(out)
    assert tokenizer.vocab_size <= 280
    for text in ("λόγος λόγος", "verbum verbum"):
        assert len(tokenizer.encode(text)) <= 4
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(UserError, match="is there already"):
        run(tokenizer_command.app, "train", str(config), str(out), "--vocab-size", "280")


def test_a_config_without_datasets_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("training: {batch_size: 8}\n")
    with pytest.raises(UserError, match="training/dataset"):
        run(tokenizer_command.app, "train", str(config), str(tmp_path / "made"), "--vocab-size", "300")


def test_texts_of_a_mixture_follow_the_rates(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / "root" / name / "train.jsonl", [{"text": f"{name} {n:05}"} for n in range(2000)])
    data = data_config(tmp_path)
    texts = list(tokenizer_command.mixture_texts({"a": 3.0, "b": 1.0}, data, max_bytes=4000))
    assert sum(map(len, texts)) == pytest.approx(4000, abs=7)
    assert sum(text.startswith("a") for text in texts) == pytest.approx(len(texts) * 3 / 4, abs=1)
    everything = list(tokenizer_command.mixture_texts({"a": 3.0, "b": 1.0}, data, max_bytes=10**9))
    assert len(everything) > 3700


def test_a_damaged_store_is_named_beside_the_others_and_can_be_removed(cache: str) -> None:
    (damaged,) = (path for path in store.store_paths(Path(cache)) if path.name.startswith("notes"))
    (damaged / store.LEDGER).write_text("{")
    said = run(data_command.app, "list", "--json", "--cache", cache)
    assert f"{damaged}: a damaged store" in said
    assert '"source": "arithmetic"' in said
    run(data_command.app, "remove", "notes", "--yes", "--cache", cache)
    assert [path.name.partition("-")[0] for path in store.store_paths(Path(cache))] == ["arithmetic"]


def test_prepare_looks_through_stores_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "job: gpt/train/pretrain\n"
        "training: {batch_size: 8, tokens: 2048, dataset: [{name: arithmetic, style: PADDED}]}\n"
        f"architecture: {{block_size: 32}}\ndata: {{max_documents: 200, cache: {tmp_path / 'cache'}}}\n"
    )
    monkeypatch.setattr("sys.argv", ["holdfast", "prepare", str(config)])
    with contextlib.suppress(SystemExit):
        main()
    tokens = next((tmp_path / "cache" / "prepared").glob("arithmetic-validation-*")) / "tokens.bin"
    good = tokens.read_bytes()
    tokens.write_bytes(good[:9] + bytes([good[9] ^ 1]) + good[10:])
    assert "damaged" not in capsys.readouterr().err
    with contextlib.suppress(SystemExit):
        main()
    assert f"{tokens.parent}: the store is damaged" in capsys.readouterr().err
    assert tokens.read_bytes() == good
