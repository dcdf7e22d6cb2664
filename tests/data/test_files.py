"""Files as people have them: tables of every dialect, packed files, saved datasets, folders of all sorts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data_examples import data_config, write_jsonl
from holdfast.config import configure, merge
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.documents import SourceContext
from holdfast.data.prepare import prepare
from holdfast.data.sources import files, find_source
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError

BYTES = load_tokenizer("bytes")
TEXTS = ["Ebbe und Flut", 'he said "hi", twice', "two\nlines", "größer; kleiner"]


def user(tmp_path: Path, **source: Any) -> DataConfig:
    values = {"data": {"cache": str(tmp_path / "cache"), "sources": {"mine": source}}}
    return configure(DataConfig, merge([DataConfig], values))


def texts(tmp_path: Path, path: Path, **source: Any) -> list[str]:
    """The texts of a source of one path, none of whose rows is broken."""
    data = user(tmp_path, path=str(path), **source)
    context = SourceContext(data)
    found = [document.full_text for document in find_source("mine", data).documents("train", context)]
    assert not context.broken.total, context.broken.lines()
    return found


def table(delimiter: str, end: str = "\n") -> str:
    quoted = ('"' + text.replace('"', '""') + '"' for text in TEXTS)
    return f"id{delimiter}text{end}" + "".join(f"{at}{delimiter}{text}{end}" for at, text in enumerate(quoted))


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding", "options"),
    [
        ("a.csv", ",", "utf-8", {}),
        ("a.csv", ",", "utf-8-sig", {}),
        ("a.csv", ",", "utf-16", {}),
        ("a.csv", ";", "cp1252", {"encoding": "cp1252"}),
        ("a.csv", ";", "cp1252", {"encoding": "utf-8, cp1252", "delimiter": ";"}),
        ("a.csv", "|", "utf-8", {}),
        ("a.csv", "^", "utf-8", {"delimiter": "^"}),
        ("a.tsv", "\t", "utf-8", {}),
        ("a.data", ";", "utf-16-le", {"format": "csv", "encoding": "utf-16-le"}),
    ],
)
def test_tables_of_every_dialect(name: str, delimiter: str, encoding: str, options: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(table(delimiter, "\r\n").encode(encoding))
    assert texts(tmp_path, tmp_path / name, **options) == TEXTS
    assert texts(tmp_path, tmp_path / name, text="{id}: {text}", **options)[0] == "0: Ebbe und Flut"


def test_an_encoding_that_must_be_named_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "excel.csv").write_bytes(table(";").encode("cp1252"))
    with pytest.raises(UserError, match=r"1 × invalid UTF-8\n.*excel\.csv, line 6: .*encoding: cp1252"):
        prepare("mine", "train", data=user(tmp_path, path=str(tmp_path / "excel.csv")), tokenizer=BYTES, progress=False)


def test_rows_with_other_columns_are_broken_and_the_delimiter_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,text\n1,one\n2,two,three\n4,\n5,five\n")
    data = user(tmp_path, path=str(tmp_path / "a.csv"))
    context = SourceContext(data)
    assert [each.text for each in find_source("mine", data).documents("train", context)] == ["one", "five"]
    assert context.broken.counts == {"other columns": 1, "missing field": 1}
    assert "',' not the delimiter? set delimiter" in context.broken.examples["other columns"][0]["detail"]
    assert context.broken.examples["other columns"][0]["line"] == 3
    (tmp_path / "a.csv").write_text("a,a\n1,one\n")
    with pytest.raises(UserError, match="'a' twice"):
        list(find_source("mine", data).documents("train", context))


def test_packed_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    contents = {"a.jsonl": lines, "b.csv": table(",").encode(), "c.txt": b"one text", "d.md": b"# A head"}
    for name, content in contents.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        frames = [pa.compress(part, "zstd", asbytes=True) for part in (content[:20], content[20:]) if part]
        (tmp_path / f"{name}.zst").write_bytes(b"".join(frames))
        expected = TEXTS if name[0] in "ab" else [content.decode()]
        for ending in (".gz", ".zst"):
            assert texts(tmp_path, tmp_path / f"{name}{ending}") == expected, name + ending
    for ending in (".gz", ".zst"):
        (tmp_path / f"a.jsonl{ending}").write_bytes((tmp_path / f"a.jsonl{ending}").read_bytes()[:-9])
        with pytest.raises(UserError, match=rf"a\.jsonl\{ending}: cannot be read"):
            texts(tmp_path, tmp_path / f"a.jsonl{ending}")
        (tmp_path / f"a.jsonl{ending}").write_bytes(b"nothing of the kind")
        with pytest.raises(UserError, match=rf"a\.jsonl\{ending}: cannot be read"):
            texts(tmp_path, tmp_path / f"a.jsonl{ending}")


@pytest.mark.parametrize("name", ["weights.npz", "corpus", "page.html", "a.parquet.gz"])
def test_an_unknown_kind_of_file_is_told_the_known_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\0\1\2\3")
    data = user(tmp_path, path=str(tmp_path / name))
    with pytest.raises(
        UserError, match=rf"data/sources/mine/path: .*{name}.* not known; known are \.jsonl.*\.tsv.*\.zst"
    ):
        find_source("mine", data)
    if not name.endswith(".gz"):
        (tmp_path / name).write_text("plain")
        assert texts(tmp_path, tmp_path / name, format="txt") == ["plain"]


def test_a_folder_takes_texts_of_all_endings_and_says_what_it_leaves_out(tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("from txt")
    (folder / "deep" / "b.md").write_text("# from md")
    (folder / "c.png").write_bytes(b"\x89PNG")
    (folder / "LICENSE").write_text("mine")
    assert texts(tmp_path, folder) == ["from txt", "# from md"]
    assert texts(tmp_path, folder) == ["from txt", "# from md"]
    said = capfd.readouterr().err
    assert said.count("left out: 1 × .png, 1 × without an ending") == 1 or "1 × without an ending, 1 × .png" in said
    assert said.count("data/sources/mine/path") == 1  # told once
    (folder / "a.txt").unlink()
    assert texts(tmp_path, folder) == ["# from md"]
    (folder / "deep" / "b.md").unlink()
    with pytest.raises(UserError, match=r"only unknown kinds of files \(.*1 × \.png.*known are"):
        find_source("mine", user(tmp_path, path=str(folder)))


def test_a_folder_of_mixed_encodings(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, encoding in (("a", "utf-8"), ("b", "cp1252"), ("c", "utf-16"), ("d", "utf-8-sig")):
        (folder / f"{name}.txt").write_bytes("Größe".encode(encoding))
    assert texts(tmp_path, folder, encoding="utf-8, cp1252") == ["Größe"] * 4
    data = user(tmp_path, path=str(folder))
    context = SourceContext(data)
    assert len(list(find_source("mine", data).documents("train", context))) == 3
    assert context.broken.examples["invalid UTF-8"][0]["file"] == "b.txt"


def test_datasets_that_were_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"Text {number}."} for number in range(30)]
    whole = datasets.Dataset.from_list(rows)
    whole.select(range(20, -1, -1)).save_to_disk(tmp_path / "one", num_shards=2)
    assert texts(tmp_path, tmp_path / "one") == [f"Text {number}." for number in range(20, -1, -1)]
    parts = datasets.DatasetDict({"train": whole.select(range(20)), "validation": whole.select(range(20, 30))})
    parts.save_to_disk(tmp_path / "two")
    data = user(tmp_path, path=str(tmp_path / "two"))
    source = find_source("mine", data)
    assert source.splits(SourceContext(data)) == ("train", "validation")
    assert len(list(source.documents("validation", SourceContext(data)))) == 10
    chats = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}] * 3
    datasets.Dataset.from_list(chats).save_to_disk(tmp_path / "three")
    assert find_source("mine", user(tmp_path, path=str(tmp_path / "three"))).kind == "chat"
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../two/train/data-00000-of-00001.arrow"
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="names files outside of its folder"):
        find_source("mine", user(tmp_path, path=str(tmp_path / "one")))


def test_templates_make_texts_of_fields_and_places_in_them(tmp_path: Path) -> None:
    row = {
        "Title": "Tides",
        "Text": "They rise.",
        "messages": [{"content": "first"}, {"content": "last"}],
        "n": {"a b": 3},
    }
    write_jsonl(tmp_path / "a.jsonl", [row])
    path = tmp_path / "a.jsonl"
    assert texts(tmp_path, path, text="{Title}: {Text}") == ["Tides: They rise."]
    assert texts(tmp_path, path, text="{messages[0][content]}, {messages[-1][content]}; {n[a b]} {{}}") == [
        "first, last; 3 {}"
    ]
    assert texts(tmp_path, path, prompt="{messages[0][content]}:", answer=" {messages[1][content]}") == ["first: last"]
    data = user(tmp_path, path=str(path), text="{messages[7][content]}")
    context = SourceContext(data)
    assert not list(find_source("mine", data).documents("train", context))
    assert context.broken.counts == {"missing field": 1}


@pytest.mark.parametrize("template", ["{a.__class__}", "{a[0].x}", "{a[]}", "{a!r}", "{0}", "{", "{a[0]b}"])
def test_templates_reach_no_attributes(template: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"a": ["x"]}])
    with pytest.raises(ConfigError, match="data/sources/mine/text"):
        find_source("mine", user(tmp_path, path=str(tmp_path / "a.jsonl"), text=template))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoding": "klingon"}, "encoding"),
        ({"encoding": "hex"}, "encoding"),
        ({"delimiter": ";;"}, "delimiter"),
        ({"loss_turns": "first"}, "loss_turns"),
        ({"messages": "m", "text": "t"}, "messages"),
        ({"chat_template": "chatml", "prompt": "{p}", "answer": "{a}"}, "chat_template"),
    ],
)
def test_options_that_do_not_fit_are_named(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SourceConfig("x.csv", **options)


def test_endings_of_a_root_are_the_same(tmp_path: Path) -> None:
    for name, content in (("train.tsv", table("\t")), ("train.csv", table(","))):
        folder = tmp_path / "root" / name.replace(".", "-")
        folder.mkdir(parents=True)
        (folder / name).write_text(content, encoding="utf-8")
        data = data_config(tmp_path)
        found = find_source(folder.name, data).documents("train", SourceContext(data))
        assert [each.text for each in found] == TEXTS
    assert files.format_of(Path("A.TSV")) == "tsv"
