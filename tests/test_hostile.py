"""Configs and data that nobody means well with: refused in one message before anything is written or filled."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from data_examples import data_config, write_jsonl
from holdfast import registry
from holdfast.cli import main
from holdfast.config import read_yaml, schema
from holdfast.conversion import check_path, from_yaml
from holdfast.data import prepare
from holdfast.data.config import SourceConfig, check_dataset_name
from holdfast.data.sources import find_source
from holdfast.data.sources.templates import Template
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError
from holdfast.training.config import config_classes

BYTES = load_tokenizer("bytes")
SMALL = """job: continual/train/abcd_kl
training: {batch_size: 8, validation_steps: 8}
architecture: {block_size: 32, n_layers: 1, n_embd: 16, n_head: 2}
eval: {evaluations: []}
stages:
- {tokens: 2048, data: [{name: arithmetic, style: PADDED}]}
- {tokens: 2048, data: [{name: lists, style: PADDED}]}
"""


def holdfast(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "config.yaml"
    path.write_text(SMALL)
    return path


HUGE = "x" * 100_000


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("topology.data=0", "topology/data"),
        ("topology.data=1000000000", "topology/data"),
        ("optimization.adamw.beta1=???", "optimization/adamw/beta1"),
        ("optimization.weight_decay=1e308", "optimization/weight_decay"),
        ("architecture.n_embd=2147483648", "architecture/n_embd"),
        ("architecture.n_layers=9223372036854775808", "architecture/n_layers"),
        ("architecture.vocab_size=2147483648", "architecture/vocab_size"),
        ("architecture.block_size=9223372036854775808", "architecture/block_size"),
        ("optimization.lora.rank=2147483648", "optimization/lora/rank"),
        ("training.batch_size=0x" + "f" * 6000, "batch_size"),
        ("training.batch_size=" + "9" * 6000, "batch_size"),
        ("data.root=" + HUGE, "data/root"),
        ("data.cache=" + HUGE, "data/cache"),
        ("tokenizer.name=" + HUGE, "tokenizer/name"),
        ("tokenizer.name=''", "tokenizer/name"),
        ("architecture.from=" + HUGE, "architecture/from"),
        ("optimization.kl.reference_from=" + HUGE, "optimization/kl/reference_from"),
        ("data.sources={x: {path: ''}}", "data/sources/x/path"),
        ("data.sources={x: {path: " + HUGE + "}}", "data/sources/x/path"),
        ("stages.0.data=[{name: ../outside}]", "../outside"),
        ("stages.0.data=[{name: /etc}]", "/etc"),
        ("stages.0.data=[{name: " + HUGE + "}]", "stages/0/data"),
        ("stages.0.tokens=99999999999999999999", "stages/0/tokens"),
        ("eval.held_out=[../outside]", "../outside"),
    ],
    ids=lambda value: value[:45],
)
def test_plan_and_run_refuse_it_in_one_message(
    override: str, named: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "run"):
        assert holdfast(monkeypatch, command, config, override) == 2
        said = capsys.readouterr().err
        assert named in said
        assert "Traceback" not in said
        assert len(said) < 1000
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


def test_plan_asks_for_the_packages_of_trackers(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else object())
    assert holdfast(monkeypatch, "plan", config, "logging.wandb=true") == 2
    assert "holdfast[wandb]" in capsys.readouterr().err


def test_every_number_has_an_upper_bound() -> None:
    documented = (Path(__file__).resolve().parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for job in registry.jobs.names():
        for path, entry in schema(*config_classes(job)).items():
            numeric = any(kind in str(entry.type) for kind in ("int", "float"))
            # Indices of stages are held to the stages that there are.
            # What other tests register stands on no page.
            if numeric and f"`{path}`" in documented and not path.endswith("/stages"):
                assert {"le", "lt"} & entry.bounds.keys(), path


@pytest.mark.parametrize("opened", ["[", "{a: ", "- ", "? "])
def test_deep_yaml_is_refused(opened: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + opened * 50_000 if opened != "- " else opened * 50_000)
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(path)


def test_many_values_are_read_and_too_many_refused(tmp_path: Path) -> None:
    assert len(from_yaml("[" + "1, " * 20_000 + "]")) == 20_000
    path = tmp_path / "many.yaml"
    path.write_text("a: [" + "1, " * 200_000 + "]")
    with pytest.raises(UserError, match="more than 100,000 values"):
        read_yaml(path)
    aliases = "".join(f"k{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" if i else "k0: &a0 [1]\n" for i in range(40))
    path.write_text(aliases)  # a billion laughs
    with pytest.raises(UserError):
        read_yaml(path)


def test_a_thousand_stages_are_planned(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"- {{tokens: 512, name: s{i}, beta: 0.0, lr: 1.0, data: [" for i in range(1000)]
    stage = "{name: arithmetic, rate: 0.5, style: PADDED}, {name: lists, rate: 0.5, style: PADDED}]}"
    config.write_text(SMALL.partition("stages:")[0] + "stages:\n" + "".join(line + stage + "\n" for line in lines))
    assert len(read_yaml(config)["stages"]) == 1000
    from holdfast.cli.configs import read_config

    assert read_config(config, []).resolved().curriculum.total_steps == 2000


def test_a_run_of_too_many_steps_is_refused_and_a_long_one_planned_in_little_memory(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert holdfast(monkeypatch, "plan", config, "stages.0.tokens=10000000000000") == 2
    assert "stages/1/tokens" in capsys.readouterr().err
    assert holdfast(monkeypatch, "plan", config, "stages.0.tokens=512000000", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_steps"] == 2_000_008
    every = plan["steps"]["every"]
    assert every > 1
    assert len(plan["steps"]["beta"]) == -(-plan["total_steps"] // every) <= 100_000
    assert plan["stages"][0]["sources"][0]["rows"] == 2_000_000 * 8
    assert holdfast(monkeypatch, "plan", config, "stages.0.tokens=512000000") == 0


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", ".hidden", "-x", "a\nb", "a\0", "é" * 80]
)
def test_names_that_could_leave_their_folder_are_refused(name: str, tmp_path: Path) -> None:
    outside = write_jsonl(tmp_path / "outside" / "train.jsonl", [{"text": "secret " * 9}] * 9).parent
    (tmp_path / "root").mkdir()
    data = data_config(tmp_path)
    with pytest.raises(UserError, match="expected a name of letters"):
        find_source(name, data)
    for hostile in ("../outside", str(outside)):
        with pytest.raises(UserError, match="expected a name of letters"):
            prepare.prepare(hostile, "train", data=data, tokenizer=BYTES, progress=False)
    with pytest.raises(UserError, match="expected a name of letters"):
        prepare.prepare("arithmetic", "../../x", data=data, tokenizer=BYTES, progress=False)
    assert not (tmp_path / "cache").exists()
    check_dataset_name("my data")


def test_a_registered_dataset_cannot_leave_the_cache_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        name = "../../outside"
        kind = "text"

    monkeypatch.setattr(prepare, "find_source", lambda *_: Hostile())
    with pytest.raises(UserError, match="expected a name of letters"):
        prepare.prepare("innocent", "train", data=data_config(tmp_path), tokenizer=BYTES, progress=False)


@pytest.mark.parametrize("pattern", ["/", "/**", "/**/*.jsonl", "//"])
def test_a_glob_over_the_whole_disk_is_refused(pattern: str, tmp_path: Path) -> None:
    data = data_config(tmp_path, sources={"x": SourceConfig(path=pattern)})
    with pytest.raises(UserError, match=r"data/sources/x/path.*whole disk"):
        find_source("x", data)


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_jsonl(tmp_path / "many" / f"{number}.jsonl", [{"text": "a"}])
    monkeypatch.setattr("holdfast.data.sources.user.MOST_FILES", 3)
    for path in ("many", "many/*"):
        data = data_config(tmp_path, sources={"x": SourceConfig(path=str(tmp_path / path))})
        with pytest.raises(UserError, match="more than 3 files"):
            find_source("x", data)


@pytest.mark.parametrize("label", ["²", "9" * 6000, "٣", "-1", "1.0", "2"])
def test_a_label_that_is_no_index_is_a_broken_row(label: str) -> None:
    from holdfast.data.sources.templates import BrokenRowError

    template = Template(prompt="{q}", choices=("a", "b"))
    with pytest.raises(BrokenRowError) as raised:
        template.document({"q": "?", "label": label}, "x")
    assert raised.value.kind == "label outside the choices"
    assert len(raised.value.detail) < 200
    assert template.document({"q": "?", "label": "1"}, "x").answer == "b"


@pytest.mark.parametrize("ending", ["json.gz", "jsonl.gz", "txt.gz"])
def test_a_broken_archive_is_named(ending: str, tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"text": "words " * 5000}).encode() + b"\n")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (b"", b"\x1f\x8b", b"no archive", whole[:-20], bytes(flipped)):
        file = tmp_path / "root" / "notes" / f"train.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        with pytest.raises(UserError, match="notes"):
            prepare.prepare("notes", "train", data=data_config(tmp_path), tokenizer=BYTES, progress=False)


@pytest.mark.parametrize("meta", ["", "[]", "{}", "null", '{"kind": "library"}', '{"kind": 3, "name": 7}', "[" * 10**5])
def test_a_damaged_tokenizer_file_is_named(meta: str, tmp_path: Path) -> None:
    (tmp_path / "holdfast_tokenizer.json").write_text(meta)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer/name"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["a/" + "x" * 256, "y/" * 2100, "a\0b", "", "  "])
def test_texts_that_are_no_paths(text: str) -> None:
    with pytest.raises(ConfigError):
        check_path(text, "data/root")
    check_path("a/b*c", "data/root")
    check_path(None, "data/root")


def test_huge_values_can_be_shown() -> None:
    value: Any = 16**6000
    assert "too large to show" in str(ConfigError("a/b", value, "a number"))
