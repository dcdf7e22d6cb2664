"""A text stage, a chat stage and a task in one run, from a small pretrained model with a chat template of its own."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen as nn

from data_examples import write_jsonl
from holdfast.cli import main
from holdfast.data.tokenizers import load_tokenizer
from holdfast.models import ArchitectureConfig, Decoder, resolve
from holdfast.models.pretrained import save_pretrained

CHATS = Path(__file__).parents[1] / "data" / "chats"


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints, and that it ends as it should."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["holdfast", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err + printed.out
    assert "Traceback" not in printed.err
    return printed.out + printed.err


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of three stages, its data and its model; everything lies beside it."""
    folder = tmp_path_factory.mktemp("chat")
    source = folder / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((CHATS / "bytelevel" / name).read_bytes())
    (source / "chat_template.jinja").write_bytes((CHATS / "llama3.jinja").read_bytes())
    tokenizer = load_tokenizer(source)
    small = ArchitectureConfig(preset="tiny", n_layers=2, n_embd=16, n_head=2, n_ff=24)
    spec = resolve(small, block_size=64, vocab_size=tokenizer.vocab_size)
    shapes = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.1 * random.normal(size=leaf.shape).astype("f4"), nn.meta.unbox(shapes))
    save_pretrained(params, spec, folder / "model", tokenizer)
    write_jsonl(
        folder / "notes.jsonl", [{"Title": f"Note {n}", "Text": f"tide {n * 7 % 100} feet"} for n in range(150)]
    )
    write_jsonl(
        folder / "talk.jsonl",
        [
            {"messages": [{"role": "user", "content": f"Tide {n}?"}, {"role": "assistant", "content": f"{n * 7} feet"}]}
            for n in range(150)
        ],
    )
    write_jsonl(folder / "parity.jsonl", [{"number": n, "odd": n % 2} for n in range(150)])
    tokens = 8 * 64 * 2
    values: dict[str, Any] = {
        "job": "continual/train/abcd",
        "architecture": {"from": str(folder / "model"), "block_size": 64},
        "data": {
            "cache": str(folder / "cache"),
            "max_leak": 1.0,
            "validation_fraction": 0.2,
            "sources": {
                "notes": {"path": str(folder / "notes.jsonl"), "text": "{Title}: {Text}"},
                "talk": {"path": str(folder / "talk.jsonl")},
                "parity": {
                    "path": str(folder / "parity.jsonl"),
                    "prompt": "{number} is",
                    "label": "odd",
                    "labels": {"0": " even", "1": " odd"},
                },
            },
        },
        "stages": [
            {"tokens": tokens, "data": [{"name": "notes", "style": "PMD"}]},
            {"tokens": tokens, "data": [{"name": "talk", "style": "PACKED"}]},
            {"tokens": tokens, "data": [{"name": "parity", "style": "PADDED"}]},
        ],
        "training": {"batch_size": 8, "validation_steps": 8},
        "eval": {"evaluations": ["parity"], "limit": 8},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "run.yaml"


@pytest.mark.slow
def test_text_chat_and_task_end_in_one_matrix(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = str(config.parent / "runs")
    prepared = said_by(capsys, "prepare", str(config))
    (line,) = [line for line in prepared.splitlines() if line.startswith("talk (PACKED)")]
    share = float(line.rpartition("; ")[2].partition("%")[0])
    assert 5 < share < 60
    plan = json.loads(said_by(capsys, "plan", str(config), "--json"))
    by_name = {source["name"]: source for stage in plan["stages"] for source in stage["sources"]}
    assert f"{by_name['talk']['in_loss']:.1%}" == f"{share}%"
    assert by_name["notes"]["in_loss"] == 1
    said_by(capsys, "run", str(config), "--out", out, "--name", "chat", "--quiet")
    run = config.parent / "runs" / "general" / "default" / "chat"
    results = json.loads((run / "results.json").read_text())
    assert len(results["stages"]) == 3
    bits = results["matrix"]["bits_per_byte"]
    assert {"notes", "talk", "parity"} <= set(results["tasks"])
    assert len(bits) == 4  # before the first stage, and after each
    assert all(cell is not None for row in bits for cell in row)
    assert load_tokenizer(run / "tokenizer").chat.templates.keys() == {"default"}
    shown = said_by(capsys, "data", "show", "talk-train", "--cache", str(config.parent / "cache"), "--examples", "1")
    assert "the assistant says" in shown
    assert "assistant<|end_header_id|>\\n\\n' ⟶ '0 feet<|eot_id|>'" in shown
    said = said_by(capsys, "generate", str(run), "Tide 3?", "--chat", "--tokens", "5")
    assert said.startswith("Tide 3?\n")


def test_an_export_takes_the_template_along(config: Path) -> None:
    template = (CHATS / "llama3.jinja").read_text(encoding="utf-8")
    assert (config.parent / "model" / "chat_template.jinja").read_text(encoding="utf-8") == template
    written = json.loads((config.parent / "model" / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"]) == ("<s>", "</s>")
    assert load_tokenizer(config.parent / "model").chat.tokens["bos_token"] == "<s>"


def test_a_stage_without_a_token_in_the_loss_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = config.parent / "silent.jinja"
    silent.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}")
    change = f"data.sources.talk.chat_template={silent}"
    for command in ("prepare", "plan"):  # plan refuses what it finds prepared
        said = said_by(capsys, command, str(config), change, code=2)
        assert "dataset talk/train: none of its" in said
        assert "data/sources/talk/chat_template" in said
