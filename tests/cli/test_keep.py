"""`holdfast keep`: a model that exists, new data, a budget; one line that writes a config, trains and exports."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen as nn

from cli.test_commands import holdfast
from holdfast.cli.keep import Asked
from holdfast.data.tokenizers.bytelevel import BytesTokenizer
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.models.config import ModelSpec
from holdfast.models.family import decoder
from holdfast.models.pretrained import load_spec, save_pretrained
from holdfast.training.runs import open_model

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[3] / "shared"))
STORIES = SHARED / "weights" / "stories260K"
WORDS = ["the", "a", "cat", "dog", "sees", "likes", "old", "new", "house", "tree", "and", "runs", "under", "big"]
LONG = 64  # positions of the models made here


def write_texts(path: Path, seed: int, words: list[str], count: int = 120) -> Path:
    chance = random.Random(seed)
    texts = (" ".join(chance.choice(words) for _ in range(40)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `model`, and two files of texts."""
    folder = tmp_path_factory.mktemp("keep")
    spec = ModelSpec(
        2, 32, 4, 2, 8, 64, vocab_size=320, block_size=LONG, activation="silu_gated", norm="rms", positions="rotary"
    )
    params = nn.unbox(decoder(spec).module.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))["params"]
    save_pretrained(params, spec, folder / "model", BytesTokenizer())
    write_texts(folder / "new.jsonl", 1, [word.upper() for word in WORDS])
    write_texts(folder / "old.jsonl", 2, WORDS)
    write_texts(folder / "few.jsonl", 3, WORDS, 10)
    return folder


def keep(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: object) -> int:
    """The command, from the folder that everything is in."""
    monkeypatch.chdir(place)
    return holdfast(monkeypatch, "keep", *arguments)


def same_bytes(first: Path, second: Path) -> bool:
    return (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


KEPT = ("model", "--new", "new.jsonl", "--old", "old.jsonl", "--tokens", 45056, "--budget", 0.2)
RUN = Path("runs/general/keep/model-new-old")


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Path, int]:
    """A run that was not disturbed, and its exit code."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        code = keep(monkeypatch, place, *KEPT)
    return place / RUN, code


def test_one_line_trains_within_the_budget_and_exports(
    whole: tuple[Path, int], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, code = whole
    monkeypatch.chdir(place)
    results = json.loads((run / "results.json").read_text())
    (budget,) = results["keep"]["budgets"]
    assert (budget["name"], budget["limit"], code) == ("old", 0.14, 0)
    assert budget["judged"]["high"] <= 0.2
    assert (run / "report.html").is_file()
    assert load_spec(run / "model").block_size == LONG  # as long as it was, though rows were shorter
    final = open_model(f"{run}@final")
    jax.tree.map(np.testing.assert_array_equal, open_model(f"{run}/model").params, final.params)
    capsys.readouterr()
    assert keep(monkeypatch, place, *KEPT) == 0
    *_, learned, lost, where = capsys.readouterr().out.strip().splitlines()
    assert learned.startswith("Learned: new went from ")
    assert lost.startswith("Budget kept: old ")
    assert "within 0.2 bits per byte" in lost
    assert where.startswith(f"The model is in {RUN}/model")


def test_the_config_is_an_ordinary_one(whole: tuple[Path, int], place: Path, monkeypatch: Any, capsys: Any) -> None:
    path = whole[0] / "keep.yaml"
    text = path.read_text()
    assert text.startswith("# holdfast keep model --new new.jsonl --old old.jsonl --budget 0.2 --tokens 45056\n")
    assert "# learning rate: " in text
    assert yaml.safe_load(text)["keep"] == {"old": 0.14, "certify": True}
    monkeypatch.chdir(place)
    assert holdfast(monkeypatch, "plan", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["keep"][0]["drawn"] >= 64


def test_killed_and_typed_again_it_goes_on_to_the_same_end(
    whole: tuple[Path, int], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "new.jsonl", "old.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    again = tmp_path / RUN
    shutil.copytree(whole[0], again)
    for gone in ("model", "evaluations"):
        shutil.rmtree(again / gone)
    (again / "results.json").unlink()
    saved = list_checkpoints(again / "checkpoints")
    middle = [info for info in saved if info.step < saved[-1].step][-1]
    assert 1 < middle.step < saved[-1].step
    for info in saved:
        if info.step > middle.step:
            shutil.rmtree(info.path)
    shutil.copytree(whole[0] / "evaluations", again / "evaluations")
    assert keep(monkeypatch, tmp_path, *KEPT) == 0
    assert same_bytes(again / "model", whole[0] / "model")


def test_another_command_does_not_go_on_with_it(whole: tuple[Path, int], place: Path, monkeypatch: Any) -> None:
    before = (whole[0] / "keep.yaml").read_text()
    assert keep(monkeypatch, place, *KEPT[:-1], 0.1) == 2
    assert (whole[0] / "keep.yaml").read_text() == before


@pytest.mark.slow
def test_without_old_data_a_run_goes_on_from_its_own_samples(
    whole: tuple[Path, int], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """From a run this time, whose model is exported first."""
    code = keep(monkeypatch, place, RUN, "--new", "new.jsonl", "--tokens", 45056, "--name", "own", "--budget", 0.05)
    said = capsys.readouterr().out
    results = json.loads((place / "runs/general/keep/own/results.json").read_text())
    (budget,) = results["keep"]["budgets"]
    assert (budget["name"], code) == ("self", 0)
    assert "no statement about any dataset" in said
    assert same_bytes(place / "runs/general/keep/own/start", place / RUN / "model")
    assert (place / "runs/general/keep/own/model/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model", "--new", "new.jsonl", "--budget", 0), "--budget 0"),
        (("model", "--new", "nowhere"), "there is no dataset 'nowhere'"),
        (("model", "--new", "self"), "--new self"),
        (("model", "--new", "lists", "--old", "lists"), "--old lists"),
        (("model", "--new", "new.jsonl", "--old", "./new.jsonl"), "--old ./new.jsonl: expected other data than --new"),
        (("model", "--new", "new.jsonl", "--old", "few.jsonl", "--tokens", 45056), "give it more data"),
        (("./nothing", "--new", "new.jsonl"), "./nothing: there is no such file or folder"),
        (("model", "--new", "new.jsonl", "--tokens", 100), "--tokens 100"),
        (("model", "--new", "new.jsonl", "training.batch_sise=3"), "training/batch_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_use_is_one_message_and_leaves_nothing(
    arguments: tuple[object, ...], said: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert keep(monkeypatch, place, *arguments, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_that_is_not_there_is_found_out_without_jax(place: Path) -> None:
    code = (
        "import sys; sys.argv = ['holdfast', 'keep', 'model', '--new', 'nowhere']\n"
        "from holdfast.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True, capture_output=True)


def test_runs_are_named_by_what_is_taught_what() -> None:
    assert Asked("owner/SmolLM2-135M", "some/texts", None, 0.05, None, ()).run_name == "SmolLM2-135M-texts"
    assert Asked("runs/a/b/c@final", "tinystories", "*.txt", 0.05, None, ()).run_name == "c_final-tinystories-data"


def transformers_logits(folder: Path, text: str) -> tuple[Any, list[int]]:
    """The logits of a text's tokens and the tokens, as `transformers` has both."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy(), ids


def check_export(run: Path, text: str) -> None:
    """The exported model says what the run's last checkpoint says."""
    logits, ids = transformers_logits(run / "model", text)
    final = open_model(f"{run}@final")
    assert final.run is not None
    assert final.tokenizer.encode(text) == ids
    ours = final.run.model.module.apply({"params": final.params}, np.array([ids], np.int32))[0]
    np.testing.assert_allclose(ours[:, : logits.shape[1]], logits, atol=2e-4)


@pytest.mark.extra
@pytest.mark.slow
def test_a_folder_of_transformers_with_a_tokenizer_json(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs the extra hf: pip install holdfast[hf]")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install holdfast[hf]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(
        tmp_path / "llama"
    )
    options = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONG,
    )
    transformers.LlamaForCausalLM(options).save_pretrained(tmp_path / "llama")
    for name in ("new.jsonl", "old.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    assert keep(monkeypatch, tmp_path, "llama", *KEPT[1:]) in (0, 3)
    check_export(tmp_path / "runs/general/keep/llama-new-old", "the cat SEES")


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("old", [True, False], ids=["with tinystories", "own samples"])
def test_stories_learn_shakespeare_within_the_budget(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A short one; the whole takes minutes."""
    if not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not there")
    named = ("--old", SHARED / "data" / "tinystories") if old else ()
    arguments = (STORIES, "--new", SHARED / "data" / "shakespeare", *named, "--tokens", 90112, "--name", "short")
    assert keep(monkeypatch, tmp_path, *arguments) == 0
    said = capsys.readouterr().out
    assert "\nLearned: shakespeare went from " in said
    assert "\nBudget kept: " in said
    check_export(tmp_path / "runs/general/keep/short", "Once upon a time")
