"""Self-replay: what is sampled, whatever the batch and the kills; whole runs with kills are slow tests."""

import functools
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from evaluation.conftest import TOKENIZER, Tiny, make_tiny
from holdfast.analysis.plan import plan_run
from holdfast.cli.plan import self_line
from holdfast.data.sampled import BLOCKS, SampledRows, set_path
from holdfast.data.sampling import SELF
from holdfast.errors import UserError
from holdfast.evaluation.forward import Runner
from holdfast.training import self_replay
from holdfast.training.resolve import curriculum_for, read_options
from holdfast.training.self_replay import make_set, sample_rows
from training import killing, tiny

JOB = "continual/train/abcd_kl"
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32 * 6, "data": [{"name": "lists", "style": "PACKED"}]},
        {"tokens": 8 * 32 * 6, "data": [{"name": "arithmetic", "style": "PADDED"}], "beta": 0.5,
         "update_reference": True, "overlap": 0.5},
        {"tokens": 8 * 32 * 4, "data": [{"name": "lists", "style": "PACKED"}], "beta": 0.5},
    ],
    "training": {"batch_size": 8, "validation_steps": 8, "replay": {"source": "self", "rate": 0.25}},
    "logging": {"report_interval": 1, "checkpoint_interval": 4, "validation_interval": 5},
}  # fmt: skip


class Bigram:
    """Enough of a model to sample from: the next token depends on the last one alone."""

    block_size = 16

    def __init__(self, probabilities: np.ndarray) -> None:
        self.logits = np.log(probabilities).astype(np.float32)

    def init_cache(self, num_rows: int, length: int) -> Any:
        assert length <= self.block_size
        return jnp.zeros((num_rows, 0))

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> Any:
        return jnp.asarray(self.logits)[tokens[:, -1]], cache


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_models_probabilities(temperature: float) -> None:
    """Transitions of a known chain, end of text among them: chi-square of each state against the softmax."""
    probabilities = np.random.default_rng(0).dirichlet(np.ones(5), size=5)
    runner: Runner = Runner(Bigram(probabilities))  # type: ignore[arg-type]  # what sampling uses of a model
    rows = sample_rows(
        runner, None, np.arange(96, dtype=np.int32), seed=2**60 + 5, temperature=temperature, vocab_size=5, eot_id=0
    )
    assert rows.shape == (96 * BLOCKS, 17)
    counts = np.zeros((5, 5))
    np.add.at(counts, (rows[:, :-1], rows[:, 1:]), 1)
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum(1, keepdims=True)
    assert counts.sum() == 96 * BLOCKS * 16
    for state in range(5):
        found = stats.chisquare(counts[state], expected[state] * counts[state].sum())
        assert found.pvalue > 1e-3, state
    starts = np.bincount(rows[1::BLOCKS, 0], minlength=5)
    assert (starts > 0).sum() >= 3, "most rows begin in the middle of a text"
    assert (rows[::BLOCKS, 0] == 0).all(), "a sample begins after an end of text"


@pytest.fixture(scope="module")
def small() -> Tiny:
    return make_tiny("learned", block_size=8)


def sampled(small: Tiny, numbers: range, seed: int = 3) -> np.ndarray:
    return sample_rows(
        small.runner, small.params, np.array(numbers, np.int32), seed=seed, temperature=1.0,
        vocab_size=TOKENIZER.vocab_size, eot_id=TOKENIZER.eot_id,
    )  # fmt: skip


def test_rows_are_blocks_of_samples_that_do_not_depend_on_the_batch(small: Tiny) -> None:
    rows = sampled(small, range(4, 6))
    assert rows.shape == (2 * BLOCKS, 9)
    assert rows.max() < TOKENIZER.vocab_size
    by_sample = rows.reshape(2, BLOCKS, 9)
    np.testing.assert_array_equal(by_sample[:, :-1, -1], by_sample[:, 1:, 0], "a row goes on with the last target")
    assert len({row.tobytes() for row in rows}) == len(rows)
    np.testing.assert_array_equal(rows[BLOCKS:], sampled(small, range(5, 6)))
    assert (rows != sampled(small, range(4, 6), seed=4)).any()


def test_the_cache_and_the_windows_change_no_token(small: Tiny) -> None:
    """The first sample again, by reading everything before each token, with the keys that the documentation names."""
    text = [TOKENIZER.eot_id]
    key = functools.reduce(jax.random.fold_in, (3, 5), jax.random.key(0))  # seed 3: its high and low bits; sample 5
    context: list[int] = []
    for width, count in self_replay.windows(8):
        context = text[-width:]
        for _ in range(count):
            logits = small.logits(context)[-1, : TOKENIZER.vocab_size].astype(np.float32)
            token = int(jax.random.categorical(jax.random.fold_in(key, len(text)), jnp.asarray(logits)))
            text, context = [*text, token], [*context, token]
    rows = sampled(small, range(5, 6))
    assert text[: BLOCKS * 8 + 1] == [*rows[:, :-1].reshape(-1).tolist(), rows[-1, -1]]


class StopError(Exception):
    """A kill, as far as files can tell."""


def test_a_set_is_the_same_whenever_it_was_interrupted(tmp_path: Path) -> None:
    trainer = tiny.trainer(JOB, VALUES, tmp_path, "training.replay.rows=22", "eval.batch_size=2")
    run, made, runner = trainer.resolved, trainer.plan.sampled_sets[1], Runner(trainer.resolved.model, trainer.topology)
    told: list[int] = []

    def stop(done: int) -> None:
        told.append(done)
        raise StopError

    def make(folder: Path, tell: Any, params: Any = None) -> None:
        folder.mkdir(exist_ok=True)
        params = trainer.state.params if params is None else params
        make_set(run, runner, folder, params, made, told=tell, say=said.append)

    said: list[str] = []
    make(tmp_path / "whole", told.append)
    assert told == [8, 16, 22]
    told.clear()
    for _ in range(3):
        with pytest.raises(StopError):
            make(tmp_path / "killed", stop)
    assert told == [8, 16, 22]
    make(tmp_path / "killed", stop)  # only the name is missing
    files = [
        {f.name: f.read_bytes() for f in set_path(tmp_path / name, made).iterdir()} for name in ("whole", "killed")
    ]
    assert files[0] == files[1]
    rows = SampledRows({1: made}, tmp_path / "whole", 32)
    assert len(rows) == 22
    make(tmp_path / "whole", stop)  # there already
    assert said == []
    make(tmp_path / "whole", told.append, jax.tree.map(lambda leaf: leaf * 1.5, trainer.state.params))
    assert "other weights" in said[0]
    assert (set_path(tmp_path / "whole", made) / "tokens.bin").read_bytes() != files[0]["tokens.bin"]


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ("{source: model}", r"training/replay/source: got 'model', expected data .* or self"),
        ("{source: self, rows: 0}", r"training/replay/rows: got 0, expected a number of rows of at least 1"),
        ("{source: self, rows: all}", r"training/replay/rows: got 'all', expected a number, or null"),
        ("{rows: some}", r"training/replay/rows: got 'some'"),
        ("{source: self, temperature: 0}", r"training/replay/temperature: got 0.0, expected a number above 0"),
        ("{temperature: 0.5}", r"training/replay/temperature: got 0.5, expected 1 with source: data"),
        ("{source: self, from: [lists]}", r"training/replay/from: .* expected null with source: self"),
        ("{from: []}", r"training/replay/from: got \[\], expected at least one dataset"),
        ("{from: [topics]}", r"training/replay/from/0: got 'topics', expected a dataset of a stage before the last"),
        ("{source: self, objective: kl}", None),
    ],
)
def test_options_that_make_no_sense_are_refused(replay: str, message: str | None) -> None:
    if message is None:
        tiny.resolved(JOB, VALUES, f"training.replay={replay}")
        with pytest.raises(UserError, match=r"training/replay/objective: .*stage 2 has no penalty"):
            tiny.resolved(JOB, VALUES, f"training.replay={replay}", "stages.2.beta=0")
        return
    with pytest.raises(UserError, match=message):
        tiny.resolved(JOB, VALUES, f"training.replay={replay}")


def test_a_model_that_exists_replays_itself_from_its_first_stage_on() -> None:
    made = tiny.resolved(JOB, VALUES).curriculum
    assert [stage.mixture[-1].name for stage in made.stages] == ["lists", "self", "self"]
    assert made.stages[1].mixture[-1].rate == 0.25
    pretrained = tiny.options(JOB, VALUES, "architecture.from=somewhere")
    made = curriculum_for(JOB, read_options(JOB, pretrained))
    assert [stage.mixture[-1].name for stage in made.stages] == ["self", "self", "self"]
    one = {**VALUES, "stages": [{**VALUES["stages"][1], "overlap": None}], "optimization": {"kl": {"on": "old"}}}
    made = curriculum_for(JOB, read_options(JOB, tiny.options(JOB, one, "architecture.from=somewhere")))
    assert [sampling.name for sampling in made.stages[0].mixture] == ["arithmetic", "self"]
    with pytest.raises(UserError, match="training/replay/source: self"):
        tiny.resolved(JOB, one)


def test_replay_of_datasets_may_have_a_memory() -> None:
    memory = tiny.resolved(JOB, VALUES, "training.replay={rows: 3}").curriculum.memory
    assert memory is not None
    assert memory.rows == 3
    assert [[source.name for source in each] for each in memory.replayed] == [[], ["lists"], ["arithmetic"]]
    assert tiny.resolved(JOB, VALUES, "training.replay={rows: all}").curriculum.memory is None


def test_the_plan_tells_what_sampling_costs() -> None:
    plan = plan_run(tiny.resolved(JOB, VALUES, "training.replay.rows=100"))
    first, second = plan["self_replay"]
    assert (first["stage"], first["step"], first["rows"], first["drawn"]) == (1, 6, 100, 11)  # fewer in the fade
    assert first["tokens"] == self_replay.cost_of(100, 32)[0] >= 100 * 32
    assert first["share"] == first["flops"] / plan["total_flops"] == second["share"]
    assert 0.05 < first["share"] < 0.5
    assert "stage 1 draws 11 rows of self and samples 100" in " ".join(plan["warnings"])
    assert "as PADDED or PACKED rows lists, arithmetic never show how a text begins" in " ".join(plan["warnings"])
    assert not any("self is not prepared" in warning for warning in plan["warnings"])
    shown = [source for source in plan["stages"][1]["sources"] if source["name"] == "self"]
    assert [(each["rows"], each["loss_tokens"], each["epochs"]) for each in shown] == [(11, 11 * 32, 0.11)]
    assert "before stage 1 (step 6) 100 rows are sampled from the model" in self_line(first)


# Whole runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("self"))
    made.run()
    return made


@pytest.mark.slow
def test_a_run_trains_on_what_it_sampled(whole: Any) -> None:
    records = killing.train_records(whole.spec.run_dir)
    assert [record["rows"][SELF.name] for record in records[:6]] == [0] * 6
    assert sum(record["rows"][SELF.name] for record in records[6:12]) == whole.plan.sampled_sets[1].num_rows > 6
    batch = whole.batches[8]
    marked = batch.x[0][(batch.segment_ids[0] == 1).all(-1)]
    stored = {row.x.tobytes() for row in (whole.sampled.rows([i]) for i in range(len(whole.sampled)))}
    assert any(row.astype(np.int32).tobytes() in stored for row in marked)
    results = json.loads((whole.spec.run_dir / "results.json").read_text())
    assert results["tasks"] == ["arithmetic", "lists"], "no column in the matrix"
    validation = [record for record in killing.records(whole.spec.run_dir) if record["kind"] == "validation"]
    assert all(set(record["losses"]) == {"lists", "arithmetic"} for record in validation)


@pytest.mark.slow
def test_damage_is_found_before_a_step_is_taken(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole.spec.run_dir.parents[2], tmp_path / "runs")
    again = tiny.trainer(JOB, VALUES, tmp_path / "runs")
    shutil.rmtree(again.checkpoint_dir / "16")
    made = again.plan.sampled_sets[2]
    path = set_path(again.spec.run_dir, made) / "tokens.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match=r"self-2-\w+: the rows .* are damaged"):
        tiny.resume(again)
    path.write_bytes(good)
    tiny.resume(again)


@pytest.mark.slow
def test_a_branch_copies_the_rows(whole: Any, tmp_path: Path) -> None:
    parent = whole.spec.run_dir
    branch = tiny.trainer(JOB, VALUES, tmp_path, name="branch", parent=f"{parent}@10")
    branch.run()
    assert killing.losses(branch.spec.run_dir) == killing.losses(parent)
    for made in whole.plan.sampled_sets.values():
        copied, own = set_path(branch.spec.run_dir, made), set_path(parent, made)
        assert (copied / "tokens.bin").read_bytes() == (own / "tokens.bin").read_bytes()
    with pytest.raises(UserError, match=r"training/replay/temperature: was None, is 0\.5"):
        tiny.trainer(
            JOB, VALUES, tmp_path, "training.replay.temperature=0.5", name="other", parent=f"{parent}@10"
        ).run()


CONFIG = """
job: continual/train/abcd_kl
stages:
- {tokens: 1536, data: [{name: lists, style: PACKED}]}
- {tokens: 2560, data: [{name: arithmetic, style: PADDED}], beta: 0.5, update_reference: true, overlap: 0.5}
- {tokens: 1536, data: [{name: lists, style: PACKED}], beta: 0.5}
training: {batch_size: 8, validation_steps: 8, evaluate: false, replay: {source: self, rate: 0.25, rows: 400}}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 64, n_head: 4}
optimization: {kl: {estimator: forward, on: old}}
logging: {report_interval: 1, checkpoint_interval: 3, validation_interval: 50}
eval: {evaluations: [], batch_size: 4}
"""


@pytest.mark.slow
def test_kills_while_rows_are_sampled_and_after_change_nothing(tmp_path: Path) -> None:
    """On four devices; one is a mesh like any other here."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG + "topology: {data: 2, fsdp: 2}\n")
    env = killing.environment(tmp_path / "cache", 4)
    whole = killing.finish(config, tmp_path / "whole", env)
    run_dir = tmp_path / "killed" / "general" / "default" / "run"

    def kill_when(happened: Any) -> None:
        process = killing.start(config, tmp_path / "killed", env)
        while process.poll() is None and not happened():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    def parts() -> int:
        return len(list(run_dir.glob("replay/.self-*.partial/part-*.bin")))

    kill_when(lambda: parts() >= 3)
    assert killing.last_step(run_dir) == 6
    had = parts()
    kill_when(lambda: parts() > had)
    kill_when(lambda: killing.last_step(run_dir) >= 9)
    killing.finish(config, tmp_path / "killed", env)
    killing.assert_identical(whole, run_dir)
    made = [
        {path.parent.name: path.read_bytes() for path in folder.glob("replay/*/tokens.bin")}
        for folder in (whole, run_dir)
    ]
    assert made[0] == made[1]
    assert len(made[0]) == 2
