"""Sources: built-in ones, local files of every format, the user's own, and what is said when something is missing."""

import gzip
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_examples import SHARED, data_config, needs_shared, write_jsonl
from holdfast.config import configure, merge
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.documents import STREAM_VALIDATION, Document, SourceContext, read
from holdfast.data.prepare import prepare
from holdfast.data.sources import documents, files, find_source, tables
from holdfast.data.sources.generated import TOPICS
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError
from holdfast.registry import datasets

BYTES = load_tokenizer("bytes")


def user(tmp_path: Path, **source: Any) -> DataConfig:
    """A config, made as a config file's values are, with one source named `mine`."""
    values = {"data": {"cache": str(tmp_path / "cache"), "sources": {"mine": source}}}
    return configure(DataConfig, merge([DataConfig], values))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)


@pytest.mark.parametrize(
    ("name", "smallest"), [("pydocs", 1_000_000), ("docstrings", 1_000_000), ("pycode", 5_000_000)]
)
def test_what_python_carries(name: str, smallest: int, tmp_path: Path) -> None:
    data = data_config(tmp_path)
    source = find_source(name, data)
    every = list(source.documents("train", SourceContext(data)))
    assert sum(len(document.text) for document in every) > smallest
    assert len({document.id for document in every}) == len(every)
    assert all(document.text.strip() for document in every)
    again = source.documents("train", SourceContext(data))
    assert [next(again) for _ in range(50)] == every[:50]
    assert source.fingerprint(SourceContext(data)) == find_source(name, data).fingerprint(SourceContext(data))


@pytest.mark.parametrize(
    ("name", "train", "validation"), [("arithmetic", 14_000, 400), ("lists", 19_000, 400), ("topics", 4_500, 300)]
)
def test_generated_tasks(name: str, train: int, validation: int, tmp_path: Path) -> None:
    data = data_config(tmp_path)
    sides = [list(documents(name, split, data)) for split in ("train", "validation")]
    assert len(sides[0]) > train
    assert len(sides[1]) > validation
    for what in ("prompt", "group"):
        assert not {getattr(document, what) for document in sides[0]} & {getattr(d, what) for d in sides[1]}
    counts = [0] * 4
    for document in sides[1]:
        assert document.label is not None
        assert document.choices[document.label] == document.answer
        assert len(set(document.choices)) == 4
        assert right(document) == document.answer.split()
        counts[document.label] += 1
    assert min(counts) > len(sides[1]) / 8  # no place is favoured
    assert list(documents(name, "validation", data)) == sides[1]


def right(document: Document) -> list[str]:
    """The answer, worked out again from the prompt."""
    if document.prompt.endswith("="):
        return [str(eval(document.prompt[:-1]))]
    if document.prompt.endswith(":"):
        words = document.prompt[:-1].split(", ")
        return [topic for topic, known in TOPICS.items() if set(words) <= set(known.split())]
    operation, *digits = document.prompt.removesuffix("->").split()
    work = {"sort": sorted, "reverse": lambda d: d[::-1], "max": lambda d: [max(d)], "length": lambda d: [str(len(d))]}
    return list(work[operation](digits))


def test_every_format_gives_the_same_documents(tmp_path: Path, no_network: None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": f"row {index}\nß"} for index in range(300)]
    root = tmp_path / "root"
    write_jsonl(root / "lines" / "train.jsonl", rows)
    for name, file, lines in (
        ("packed", "train.json.gz", [json.dumps(row) for row in rows]),
        ("array", "train.json", [json.dumps(rows)]),
    ):
        (root / name).mkdir()
        content = "\n".join(lines).encode()
        (root / name / file).write_bytes(gzip.compress(content) if file.endswith("gz") else content)
    table = pa.table({"text": [row["text"] for row in rows]})
    (root / "columns").mkdir()
    for shard in (0, 1):
        pq.write_table(table.slice(shard * 150, 150), root / "columns" / f"train-0000{shard}-of-00002.parquet")
    (root / "memory" / "train").mkdir(parents=True)
    with (
        pa.OSFile(str(root / "memory" / "train" / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (root / "comma").mkdir()
    (root / "comma" / "train.csv").write_text(
        "text\n" + "".join(f'"{row["text"]}"\n' for row in rows), encoding="utf-8"
    )
    data = data_config(tmp_path)
    for name in ("lines", "packed", "array", "columns", "memory", "comma"):
        context = SourceContext(data)
        found = [document.text for document in find_source(name, data).documents("train", context)]
        assert found == [row["text"] for row in rows], name
        assert context.fraction == pytest.approx(1)
        assert prepare(name, "train", data=data, tokenizer=BYTES, progress=False).num_documents > 250


def test_plain_text_is_cut_between_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {index}. " + "word ß " * (index % 70) for index in range(3000)]
    content = "\n\n".join(paragraphs)
    (tmp_path / "root" / "book").mkdir(parents=True)
    (tmp_path / "root" / "book" / "train.txt").write_text(content, encoding="utf-8")
    found = list(find_source("book", data_config(tmp_path)).documents("train", SourceContext(data_config(tmp_path))))
    assert "\n\n".join(document.text for document in found) == content
    sizes = [len(document.text.encode()) for document in found]
    assert max(sizes) < files.LONGEST_CHUNK
    assert min(sizes[:-1]) >= files.CHUNK - 2
    for document in found[::97]:
        line = int(document.id.rpartition(":")[2])
        assert content.split("\n")[line - 1] == document.text.split("\n")[0]


@pytest.mark.parametrize("text", ["x" * 100_000, "ß" * 70_000, "word " * 30_000, "line\n" * 30_000, "", "\n\n\n"])
def test_texts_without_paragraphs_lose_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    context = SourceContext(data_config(tmp_path))
    found = [row.fields["text"] for row in files.read_files([tmp_path / "t.txt"], files.BY_ENDING, context)]
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(len(piece.encode()) <= files.LONGEST_CHUNK for piece in found)
    assert context.broken.total == 0


def test_lines_and_files_as_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\n")
    (folder / "b.txt").write_text("three")
    (folder / "ignored.dat").write_text("no")
    for sample_by, expected in (("line", ["one", "two", "three"]), ("file", ["one\n\ntwo", "three"])):
        data = user(tmp_path, path=str(folder), sample_by=sample_by)
        assert [d.text for d in find_source("mine", data).documents("train", SourceContext(data))] == expected


BROKEN: list[tuple[bytes, str | None]] = [
    (b'{"q": "a?", "label": 0}', None),
    (b"{bad json", "bad JSON"),
    (b'{"q": "caf\xe9?", "label": 0}', "invalid UTF-8"),
    (b'{"q": "half \\ud800 pair", "label": 0}', "invalid UTF-8"),
    (b'["a", "list"]', "not a mapping"),
    (b'{"label": 0}', "missing field"),
    (b'{"q": null, "label": 0}', "missing field"),
    (b'{"q": "b?"}', "missing field"),
    (b'{"q": "  \\n ", "label": 0}', "empty text"),
    (b'{"q": "c?", "label": 7}', "label outside the choices"),
    (b"", "empty line"),
    (b'{"q": "d?", "label": "1"}', None),
    (b"[" * 100_000, "bad JSON"),
    (b'{"q": "e?", "label": 1}', None),
]


def test_every_kind_of_broken_row_is_counted_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [line for line, _ in BROKEN])
    good = write_jsonl(tmp_path / "good.jsonl", [b'{"q": "v?", "label": 0}'])
    source = {"path": str(path), "validation": str(good), "prompt": "{q}", "labels": {0: " no", 1: " yes"}}
    data = user(tmp_path, **source)
    with pytest.raises(UserError, match="data/max_broken: 11 of 14 rows"):
        prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)
    data = DataConfig(cache=data.cache, sources=data.sources, max_broken=1.0)
    report = prepare("mine", "train", data=data, tokenizer=BYTES).ledger["broken"]
    expected: dict[str, list[int]] = {}
    for number, (_, kind) in enumerate(BROKEN, 1):
        if kind is not None:
            expected.setdefault(kind, []).append(number)
    assert report["counts"] == {kind: len(lines) for kind, lines in expected.items()}
    assert {kind: [e["line"] for e in examples] for kind, examples in report["examples"].items()} == expected
    said = capsys.readouterr().err
    named = [
        int(number) for places in re.findall(r"rows.jsonl, lines? ([\d, ]+)", said) for number in places.split(", ")
    ]
    assert sorted(named) == sorted(number for lines in expected.values() for number in lines)


def test_rows_too_long_to_hold_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST", 100)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x" * 500}, {"text": "short"}, {"text": "y" * 150}])
    context = SourceContext(data_config(tmp_path))
    assert [row.fields["text"] for row in files.read_files([path], files.Reading(), context)] == ["short"]
    assert [e["line"] for e in context.broken.examples["too long"]] == [1, 3]


def test_broken_bytes_in_plain_text_and_tables(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"good line\nbad \xff line\nlast\n")
    context = SourceContext(data_config(tmp_path))
    rows = list(files.read_files([tmp_path / "t.txt"], files.Reading(sample_by="line"), context))
    assert [row.line for row in rows] == [1, 3]
    assert context.broken.examples["invalid UTF-8"][0]["line"] == 2
    (tmp_path / "t.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match=r"t\.parquet: cannot be read as parquet"):
        list(files.read_files([tmp_path / "t.parquet"], files.BY_ENDING, context))
    (tmp_path / "t.jsonl.gz").write_bytes(b"not gzip at all")
    with pytest.raises(UserError, match=r"t\.jsonl\.gz: cannot be read"):
        list(files.read_files([tmp_path / "t.jsonl.gz"], files.BY_ENDING, context))


@pytest.mark.parametrize(
    ("source", "row", "prompt", "answer", "choices", "label"),
    [
        ({"prompt": "{q}=", "answer": "{a}"}, {"q": "1+1", "a": 2}, "1+1=", "2", (), None),
        ({"prompt": "{q}", "answer": " {a}", "choices": [" x", " y"]}, {"q": "?", "a": "y"},
         "?", " y", (" x", " y"), 1),
        ({"prompt": "{q}", "labels": {"0": " no", "1": " yes"}}, {"q": "?", "label": 1},
         "?", " yes", (" no", " yes"), 1),
        ({"prompt": "{q}", "labels": {"t": "yes", "f": "no"}, "answer": " {label}."}, {"q": "?", "label": "f"},
         "?", " no.", (" yes.", " no."), 1),
        ({"prompt": "{q}", "labels": {"A": " {a}", "B": " {b}"}}, {"q": "?", "label": "B", "a": 1, "b": 2},
         "?", " 2", (" 1", " 2"), 1),
        ({"prompt": "{q}", "choices": [" {ends}"]}, {"q": "?", "label": "1", "ends": ["x", "y", "z"]},
         "?", " y", (" x", " y", " z"), 1),
        ({"prompt": "{q}", "choices": ["a", "b"], "label": "gold"}, {"q": "?", "gold": 0}, "?", "a", ("a", "b"), 0),
    ],
)  # fmt: skip
def test_templates_of_ones_own_tasks(
    tmp_path: Path, source: Any, row: Any, prompt: str, answer: str, choices: tuple[str, ...], label: int | None
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    data = user(tmp_path, path=str(path), **source)
    context = SourceContext(data)
    (document,) = find_source("mine", data).documents("train", context)
    assert document == Document("rows.jsonl:1", "", prompt, answer, choices, label, "")
    assert find_source("mine", data).kind == "task"


def test_ones_own_data_by_file_by_folder_and_by_fraction(tmp_path: Path, no_network: None) -> None:
    for index in range(6):
        write_jsonl(tmp_path / "raw" / f"part{index}.jsonl", [{"body": f"text {index} {n}"} for n in range(50)])
    by_file = user(tmp_path, path=f"{tmp_path}/raw/*.jsonl", validation=f"{tmp_path}/raw/part3.jsonl", text="body")
    sides = [[d.text for d in documents("mine", split, by_file)] for split in ("train", "validation")]
    assert len(sides[0]) == 250
    assert [text.split()[1] for text in sides[1]] == ["3"] * 50
    by_fraction = user(tmp_path, path=str(tmp_path / "raw"), text="body", validation_fraction=0.5)
    sides = [[d.text for d in documents("mine", split, by_fraction)] for split in ("train", "validation")]
    assert len(sides[0]) + len(sides[1]) == 300
    assert 100 < len(sides[1]) < 200
    (tmp_path / "raw" / "part0.jsonl").rename(tmp_path / "raw" / "train.jsonl")
    (tmp_path / "raw" / "part1.jsonl").rename(tmp_path / "raw" / "validation.jsonl")
    by_name = user(tmp_path, path=str(tmp_path / "raw"), text="body")
    assert [len(list(documents("mine", split, by_name))) for split in ("train", "validation")] == [50, 50]


def test_a_jsonl_a_text_folder_and_a_parquet_file_by_config_alone(tmp_path: Path, no_network: None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_jsonl(tmp_path / "quiz.jsonl", [{"question": f"{n} or {n + 1}?", "gold": n % 2} for n in range(200)])
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number}.\n\nIts second paragraph.")
    pq.write_table(pa.table({"body": [f"row {n}" for n in range(200)]}), tmp_path / "rows.parquet")
    sources = {
        "quiz": {
            "path": str(tmp_path / "quiz.jsonl"),
            "prompt": "{question}",
            "choices": [" a", " b"],
            "label": "gold",
        },
        "texts": {"path": str(tmp_path / "texts"), "validation_fraction": 0.3},
        "rows": {"path": str(tmp_path / "*.parquet"), "text": "body"},
    }
    values = {"data": {"cache": str(tmp_path / "cache"), "sources": sources}}
    data = configure(DataConfig, merge([DataConfig], values))
    for name, count in (("quiz", 200), ("texts", 30), ("rows", 200)):
        made = [prepare(name, split, data=data, tokenizer=BYTES, progress=False) for split in ("train", "validation")]
        assert sum(store.num_documents for store in made) == count
        assert made[0].kind == ("task" if name == "quiz" else "text")
    assert all(document.choices == (" a", " b") for document in documents("quiz", "validation", data))


def test_groups_are_never_divided(tmp_path: Path) -> None:
    rows = [{"p": f"premise {n % 40}", "h": f"hypothesis {n}", "label": n % 2} for n in range(400)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = user(
        tmp_path, path=str(path), prompt="{p} {h}", labels={0: "a", 1: "b"}, group="{p}", validation_fraction=0.3
    )
    sides = [{d.group for d in documents("mine", split, data)} for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 40


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "no/such/file.jsonl"}, "data/sources/mine/path: got 'no/such/file.jsonl'"),
        ({"path": "x", "format": "docx"}, "data/sources/mine/format: got 'docx'"),
        ({"path": "x", "answer": "{a}"}, "data/sources/mine/prompt"),
        ({"path": "x", "prompt": "{a}"}, "data/sources/mine/answer"),
        ({"path": "x", "prompt": "{a}", "answer": "{b}", "text": "c"}, "data/sources/mine/text"),
        ({"path": "a/b", "prompt": "{a", "answer": "{b}"}, "data/sources/mine/prompt: got '{a'"),
        ({"path": "a/b", "prompt": "{a.x}", "answer": "{b}"}, "data/sources/mine/prompt"),
        ({"path": "a/b", "prompt": "{a}", "labels": {"0": "{}"}}, "data/sources/mine/labels/0"),
        ({"path": "x", "validation_fraction": 2}, "data/sources/mine/validation_fraction"),
        ({"path": "x", "txet": "t"}, "data/sources/mine/txet.*data/sources/mine/text"),
    ],
)
def test_mistakes_in_ones_own_sources_are_named(tmp_path: Path, source: Any, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("{", r"\{")):
        find_source("mine", user(tmp_path, **source))


def test_names_that_could_be_paths_are_refused() -> None:
    with pytest.raises(ConfigError, match="data/sources/"):
        DataConfig(sources={"../up": SourceConfig("x")})


def test_an_unknown_dataset_is_told_what_there_is(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "root" / "poems" / "train.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match=r"no dataset 'poem'; did you mean 'poems'\?.*arithmetic.*data/sources/poem"):
        find_source("poem", data_config(tmp_path))


def test_without_network_and_files_the_error_says_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    data = data_config(tmp_path)
    for name, hub in (("fineweb", "HuggingFaceFW/fineweb"), ("mnli", "nyu-mll/multi_nli"), ("qqp", "nyu-mll/glue")):
        with pytest.raises(UserError) as caught:
            prepare(name, "train", data=data, tokenizer=BYTES, progress=False)
        said = str(caught.value)
        assert f"train.{tables.ANY_ENDING} in {tmp_path / 'root' / name}" in said
        assert hub in said
    with pytest.raises(UserError, match="data/root"):
        list(documents("mnli", "train", DataConfig(cache=str(tmp_path))))


class FakeHub:
    """Stands in for a dataset of the hub, as the `datasets` library gives it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.read = 0

    def __len__(self) -> int:
        return len(self._rows)

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        for start in range(0, len(self._rows), batch_size):
            part = self._rows[start : start + batch_size]
            self.read += len(part)
            yield {name: [row[name] for row in part] for name in part[0]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that answers with what the test puts into it, and notes what it was asked."""
    import datasets as library
    import huggingface_hub

    seen: dict[str, Any] = {"asked": []}

    def load(name: str, config: str | None = None, **options: Any) -> FakeHub:
        seen["asked"].append((name, config, options["split"], bool(options.get("streaming"))))
        fake: FakeHub = seen["rows"]
        return fake

    monkeypatch.setattr(library, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    return seen


def test_fineweb_is_streamed_only_as_far_as_needed(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["rows"] = FakeHub([{"text": f"page {index}", "url": "u"} for index in range(100_000)])
    data = DataConfig(cache=str(tmp_path), max_documents=50)
    train = prepare("fineweb", "train", data=data, tokenizer=BYTES, progress=False)
    assert BYTES.decode(train.tokens(0)) == f"page {STREAM_VALIDATION}"
    assert train.num_documents == 50
    assert hub["rows"].read < 3000
    validation = prepare("fineweb", "validation", data=data, tokenizer=BYTES, progress=False)
    assert [BYTES.decode(validation.tokens(index)) for index in (0, 49)] == ["page 0", "page 49"]
    assert hub["asked"] == [("HuggingFaceFW/fineweb", "sample-10BT", "train", True)] * 2


def test_tasks_of_the_hub_use_its_split_names(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["rows"] = FakeHub([{"premise": f"p{n}", "hypothesis": f"h{n}", "label": n % 3} for n in range(300)])
    data = DataConfig(cache=str(tmp_path))
    found = list(documents("mnli", "validation", data))
    assert hub["asked"] == [("nyu-mll/multi_nli", None, "validation_matched", False)]
    assert [document.label for document in found[:3]] == [0, 1, 2]
    assert found[1].group == "p1"
    mine = user(tmp_path, path="owner/name", config="small", train="main", text="premise", max_documents=10)
    assert [d.text for d in read(find_source("mine", mine), "validation", SourceContext(mine))][:2] == ["p0", "p1"]
    assert hub["asked"][-1] == ("owner/name", "small", "main", True)


def test_all_names_of_the_spec_are_registered() -> None:
    assert {"fineweb", "mnli", "qqp", "sst2", "siqa", "tinystories", "pydocs", "pycode", "arithmetic", "lists"} <= set(
        datasets.names()
    )
    assert all(datasets.help(name) for name in datasets.names())


ROWS = {"fineweb": (399, 35), "mnli": (8999, 483), "qqp": (8999, 454), "sst2": (30_000, 436), "siqa": (10_000, 977),
        "tinystories": (2130, 186), "speeches": (858, 75), "shakespeare": (490, 43), "german": (165, 15)}  # fmt: skip


@needs_shared
@pytest.mark.parametrize("name", list(ROWS))
def test_the_real_data_is_read_whole(name: str, tmp_path: Path, no_network: None) -> None:
    data = DataConfig(root=str(SHARED / "data"), cache=str(tmp_path))
    source = find_source(name, data)
    for split, count in zip(("train", "validation"), ROWS[name], strict=True):
        context = SourceContext(data)
        found = list(read(source, split, context))
        assert len(found) == count
        assert context.broken.total == 0
        if source.kind == "task":
            assert all(d.label is not None and d.choices[d.label] == d.answer for d in found)
            assert len({document.label for document in found}) == len(found[0].choices)


@needs_shared
def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(SHARED / "data"))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    made = prepare("siqa", "validation", data=DataConfig(), tokenizer=BYTES, progress=False)
    assert made.path.parent.parent == tmp_path
    assert made.num_documents == 977
