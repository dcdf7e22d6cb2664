"""What was lost between two models: zeros for one model twice, the broken skill first, the same bytes."""

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from scipy import stats
from typer.testing import CliRunner

from evaluation.conftest import TOKENIZER, Tiny, make_tiny
from holdfast.analysis.diff import Diff, compare_answers, compare_texts, diff, span_edges, texts_of
from holdfast.cli.app import app
from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.documents import Document
from holdfast.data.sources import documents
from holdfast.data.tokenizers.train import train_tokenizer
from holdfast.evaluation.harness import HarnessModel, run_harness
from holdfast.evaluation.results import Example
from holdfast.evaluation.statistics import mcnemar
from holdfast.evaluation.texts import TextLoss, text_losses
from holdfast.report.diff import sentence, write_diff
from holdfast.training.runs import OpenModel
from holdfast.types import Tree

TEXTS = ["The quick brown fox, 12 times.", "Ein schöner Tag.\nAnd another line of text, longer than a block " * 3, "x"]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    rows = [{"text": text, "kind": kind} for text, kind in zip(TEXTS * 3, "aab" * 3, strict=True)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(sources={"own": SourceConfig(path=str(path), group="{kind}")})


def side(tiny: Tiny, title: str, scale: float = 1.0) -> OpenModel:
    params = jax.tree.map(lambda leaf: leaf * scale, tiny.params)
    return OpenModel(title, tiny.runner, TOKENIZER, params)


def test_one_model_twice_lost_nothing_anywhere(tiny: Tiny, data: DataConfig) -> None:
    found = diff(side(tiny, "a"), side(tiny, "b"), data=data, datasets=["own"], tasks=["lists"], limit=8)
    (own,), (lists,) = found.data, found.tasks
    assert own.rise == 0.0
    assert own.divergence == pytest.approx((0.0, 0.0), abs=1e-6)
    assert all(part.first == part.second for part in own.slices)
    assert (lists.lost, lists.won, lists.p) == (0, 0, 1.0)
    assert own.texts == ()
    assert found.lost == []
    assert sentence(found) == "Nothing was lost beyond 0.05 from a to b."


def test_a_model_that_got_worse_is_named_with_its_texts(tiny: Tiny, data: DataConfig, tmp_path: Path) -> None:
    found = diff(side(tiny, "a"), side(tiny, "<b>", scale=3.0), data=data, datasets=["own"])
    (own,) = found.data
    total = sum(loss.nats.sum() for loss in text_losses(tiny.runner, tiny.params, TOKENIZER, TEXTS * 3))
    size = sum(len(text.encode()) for text in TEXTS * 3)
    assert own.first == pytest.approx(total / np.log(2) / size, rel=1e-9)
    assert own.word == "lost"
    assert own.divergence is not None
    assert min(own.divergence) > 0
    for kind in ("length", "position", "characters", "group"):
        parts = [part for part in own.slices if part.kind == kind]
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert sum(part.share * part.first for part in parts) == pytest.approx(own.first)
        assert sum(part.share * part.second for part in parts) == pytest.approx(own.second)
    page = tmp_path / "diff.html"
    write_diff(found, page)
    assert "&lt;b&gt;" in page.read_text()
    assert "<mark>" in page.read_text()


def test_nats_of_texts_are_those_of_the_harness_adapter(tiny: Tiny) -> None:
    rolling = HarnessModel(tiny.runner, tiny.params, TOKENIZER).loglikelihood_rolling([(text,) for text in TEXTS])
    losses = text_losses(tiny.runner, tiny.params, TOKENIZER, TEXTS)
    for text, loss, total in zip(TEXTS, losses, rolling, strict=True):
        size = len(text.encode())
        assert loss.nats.sum() == pytest.approx(-total, rel=1e-9)
        assert loss.ends[-1] == size
        assert loss.until(np.array([0, size])).tolist() == pytest.approx([0.0, loss.nats.sum()])


HARNESS_TEXT = """
task: own_text
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
test_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
"""


@pytest.mark.extra
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra harness")
def test_bits_of_two_tokenizers_are_the_byte_perplexity_of_the_harness(
    tiny: Tiny, data: DataConfig, tmp_path: Path
) -> None:
    sides = [side(tiny, "a"), OpenModel("b", tiny.runner, train_tokenizer(TEXTS, 300, "other"), tiny.other)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "own.yaml").write_text(HARNESS_TEXT.format(path=path))
    source = DataConfig(sources={"own": SourceConfig(path=str(path))})
    found = diff(*sides, data=source, datasets=["own"])
    documents = texts_of("own", source, None)
    assert sorted(each.text for each in documents) == sorted(TEXTS)
    for each, bits in zip(sides, (found.data[0].first, found.data[0].second), strict=True):
        model = HarnessModel(each.runner, each.params, each.tokenizer)
        theirs = run_harness(model, ["own_text"], include_path=tmp_path)["results"]["own_text"]
        assert bits == pytest.approx(theirs["bits_per_byte,none"], rel=1e-6)
        assert bits == pytest.approx(np.log2(theirs["byte_perplexity,none"]), rel=1e-6)
    assert found.notes == ("The vocabularies differ: bits per byte are of the same bytes, and no KL is measured.",)


SKILLS = ("letters", "digits", "colours", "animals")
KEYS = 24


def questions(folder: Path) -> DataConfig:
    """Four tasks, each a table of keys and answers to be known by heart."""
    sources = {}
    for skill in SKILLS:
        rows = [{"key": f"{skill[0]}{key:02}", "a": "y" if key * 7 % 3 else "n"} for key in range(KEYS)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for split in ("train", "validation"):
            (folder / f"{skill}-{split}.jsonl").write_text(text)
        sources[skill] = SourceConfig(
            path=str(folder / f"{skill}-train.jsonl"),
            validation=str(folder / f"{skill}-validation.jsonl"),
            prompt="{key}=",
            answer="{a}",
            choices=["y", "n"],
        )
    return DataConfig(sources=sources)


def taught(tiny: Tiny, params: Tree, asked: list[tuple[str, str]], steps: int) -> Tree:
    """Parameters after so many steps of Adam on answers of one byte."""
    tokens = np.array([TOKENIZER.encode(prompt) for prompt, _ in asked])
    targets = np.array([TOKENIZER.encode(answer)[0] for _, answer in asked])
    adam = optax.adam(3e-3)

    def loss(params: Tree) -> jax.Array:
        logits = tiny.model.module.apply({"params": params}, tokens)[:, -1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def step(carry: tuple[Tree, Any], _: None) -> tuple[tuple[Tree, Any], None]:
        params, state = carry
        updates, state = adam.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, adam.init(params)), length=steps)[0][0]


def test_a_lost_skill_ranks_first_with_its_examples(tiny: Tiny, tmp_path: Path) -> None:
    """One model is fine-tuned so that exactly one of four tasks breaks; the others are rehearsed."""
    data = questions(tmp_path)
    asked = [
        (skill, document.prompt, document.answer) for skill in SKILLS for document in documents(skill, "train", data)
    ]
    before = taught(tiny, tiny.params, [each[1:] for each in asked], 150)
    opposite = {"y": "n", "n": "y"}
    wrong = [(prompt, opposite[answer] if skill == "colours" else answer) for skill, prompt, answer in asked]
    after = taught(tiny, before, wrong, 300)
    sides = [OpenModel(title, tiny.runner, TOKENIZER, params) for title, params in (("a", before), ("b", after))]
    found = diff(*sides, data=data, datasets=[], tasks=SKILLS)
    assert found.lost == ["colours"]
    worst, *others = found.tasks
    assert worst.name == "colours"
    assert (worst.first, worst.second) == (1.0, 0.0)
    assert (worst.lost, worst.won) == (KEYS, 0)
    assert worst.p == pytest.approx(stats.binomtest(KEYS, KEYS, 0.5).pvalue)
    assert worst.examples
    assert all(one.prompt.startswith("c") and one.chosen == opposite[two.chosen] for one, two, _ in worst.examples)
    assert [(each.lost, each.won, each.word) for each in others] == [(0, 0, "kept")] * 3


@pytest.mark.parametrize(("scale", "code"), [(1.0, 0), (3.0, 3)])
def test_the_command_ends_with_3_only_where_something_was_lost(
    scale: float, code: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"a": side(tiny, "a"), "b": side(tiny, "b", scale)}
    monkeypatch.setattr("holdfast.training.runs.open_model", models.__getitem__)
    texts = tmp_path / "own.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3))
    done = CliRunner().invoke(app, ["diff", "a", "b", "--data", str(texts), "--json"])
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)["data"]["own"]
    assert (found["rise"] == 0.0) == (code == 0)
    assert all((part["first"] == part["second"]) == (code == 0) for part in found["slices"])
    assert bool(found["texts"]) == (code == 3)


def test_nats_until_a_byte() -> None:
    loss = TextLoss(np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 2, 4, 5]))
    assert loss.until(np.array([0, 1, 2, 3, 4, 5])).tolist() == [0.0, 1.5, 3.0, 5.0, 7.0, 15.0]
    assert TextLoss(np.zeros(0), np.zeros(0, np.int64)).until(np.array([0])).tolist() == [0.0]


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (9, 1), (30, 12), (200, 200)])
def test_mcnemar_is_the_binomial_test(lost: int, won: int) -> None:
    wanted = stats.binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(wanted, rel=1e-9)


def answers(right: list[bool], task: str = "t") -> list[Example]:
    scores = [(-1.0, -2.0) if each else (-2.0, -1.0) for each in right]
    return [
        Example(f"{task}{i}", f"question {i}", "yes", "yes" if each else "no", each, "", ("yes", "no"), 0, scores[i])
        for i, each in enumerate(right)
    ]


def test_the_broken_task_ranks_first_and_noise_is_no_loss() -> None:
    rng = np.random.default_rng(0)
    before = (rng.random(200) < 0.9).tolist()
    broken = compare_answers("broken", answers(before), answers((rng.random(200) < 0.5).tolist()), 0.5, 0.05)
    noisy = list(before)
    noisy[0], noisy[1] = not noisy[0], not noisy[1]
    same = compare_answers("same", answers(before), answers(noisy), 0.5, 0.05)
    assert (broken.word, same.word) == ("lost", "kept")
    assert broken.examples
    assert all(each.first.right and not each.second.right for each in broken.examples)
    assert broken.known[1] == pytest.approx(max(broken.second - 0.5, 0) / 0.5)
    found = Diff("a", "b", 0.05, tasks=(broken, same))
    assert found.lost == ["broken"]
    assert "broken" in sentence(found)


def test_a_small_doubtful_rise_is_undecided() -> None:
    documents = [Document(str(i), text="abcd") for i in range(4)]
    first = [TextLoss(np.full(4, 1.0), np.arange(1, 5)) for _ in documents]
    second = [TextLoss(np.full(4, 1.0 + rise), np.arange(1, 5)) for rise in (0.5, -0.1, 0.0, 0.2)]
    assert compare_texts("own", documents, (first, second), 0.05).word == "undecided"


def test_spans_cover_the_text() -> None:
    text = "word " * 40 + "x" * 150
    edges = span_edges(text)
    assert (edges[0], edges[-1]) == (0, len(text))
    assert all(0 < b - a <= 60 for a, b in itertools.pairwise(edges))


def test_models_that_are_no_runs_need_something_to_be_compared_on(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code != 0
