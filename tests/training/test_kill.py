"""Kill a run at any instant, start the same command again: bit-identical losses, parameters and scores."""

import signal
import time
from pathlib import Path

import pytest

from training import killing

pytestmark = pytest.mark.slow

PRETRAIN = """
job: gpt/train/pretrain
training: {batch_size: 8, tokens: 51200, validation_steps: 8,
           dataset: [{name: arithmetic, rate: 0.75, style: PADDED}, {name: lists, rate: 0.25, style: PADDED}]}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 64, n_head: 4, dropout: 0.1}
logging: {report_interval: 1, checkpoint_interval: 7, validation_interval: 25}
eval: {evaluations: [arithmetic], limit: 16}
"""

CONTINUAL = """
job: continual/train/abcd_kl
stages:
- {tokens: 15360, data: [{name: pydocs}]}
- {tokens: 15360, data: [{name: arithmetic, style: PADDED}], beta: 0.2, update_reference: true, overlap: 0.8}
- {tokens: 20480, data: [{name: lists, style: PACKED}], beta: 0.1, update_reference: true, optimizer: reset,
   overlap: 0.8}
training: {batch_size: 8, validation_steps: 8, replay: {rate: 0.1}}
architecture: {block_size: 32, preset: tiny, n_layers: 2, n_embd: 64, n_head: 4}
optimization: {kl: {estimator: forward, target: 0.05}}
logging: {report_interval: 1, checkpoint_interval: 9, validation_interval: 50}
eval: {evaluations: [arithmetic, lists], limit: 16}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("text", "devices", "overrides", "times"),
    [
        (PRETRAIN, 1, "", 3),
        (PRETRAIN, 4, "topology: {fsdp: 2, tensor: 2}\n", 3),
        (CONTINUAL, 1, "", 4),
        (CONTINUAL, 4, "topology: {data: 2, fsdp: 2}\n", 10),
    ],
    ids=["pretrain", "pretrain-sharded", "continual", "continual-sharded"],
)
def test_kills_at_random_instants_change_nothing(
    text: str, devices: int, overrides: str, times: int, tmp_path: Path, cache: Path
) -> None:
    """A sample: `make campaign` kills by the hundred, at every named point of the program."""
    config = tmp_path / "config.yaml"
    config.write_text(text + overrides)
    env = killing.environment(cache, devices)
    whole = killing.finish(config, tmp_path / "whole", env)
    killed = killing.kill_at_random(config, tmp_path / "killed", env, times=times, seed=devices, total_steps=200)
    assert killed >= 0.8 * times - 1
    resumed = killing.finish(config, tmp_path / "killed", env)
    assert len(killing.losses(whole)) == 200
    killing.assert_identical(whole, resumed, env, tmp_path)


@pytest.mark.parametrize("step", [60, 61, 75, 120])
def test_a_kill_around_a_boundary_and_inside_a_fade(step: int, tmp_path: Path, cache: Path) -> None:
    """Also between the boundary's checkpoint and the entry into the stage: the checkpoint of step 60 is there then."""
    config = tmp_path / "config.yaml"
    config.write_text(CONTINUAL)
    env = killing.environment(cache)
    whole = tmp_path.parent / "whole-continual"
    if not whole.exists():
        killing.finish(config, whole, env)
    process = killing.start(config, tmp_path / "killed", env)
    run_dir = tmp_path / "killed" / "general" / "default" / "run"
    while process.poll() is None and killing.last_step(run_dir) < step:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = killing.finish(config, tmp_path / "killed", env)
    killing.assert_identical(whole / "general" / "default" / "run", resumed, env, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_saves_a_checkpoint_and_ends_cleanly(number: signal.Signals, tmp_path: Path, cache: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(PRETRAIN)
    env = killing.environment(cache)
    process = killing.start(config, tmp_path / "runs", env)
    run_dir = tmp_path / "runs" / "general" / "default" / "run"
    while process.poll() is None and killing.last_step(run_dir) < 12:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors.decode()
    assert "Traceback" not in errors.decode()
    last = killing.last_step(run_dir)
    assert (run_dir / "checkpoints" / str(last)).is_dir()
    resumed = killing.finish(config, tmp_path / "runs", env)
    whole = killing.finish(config, tmp_path / "whole", env)
    killing.assert_identical(whole, resumed, env, tmp_path)


def test_a_checkpoint_restores_onto_another_mesh(tmp_path: Path, cache: Path) -> None:
    """Four devices, killed, then one: the same rows, and losses that agree up to rounding."""
    config = tmp_path / "config.yaml"
    config.write_text(CONTINUAL)
    four, one = killing.environment(cache, 4), killing.environment(cache, 1)
    whole = killing.finish(config, tmp_path / "whole", one)
    process = killing.start(config, tmp_path / "moved", four, "topology.fsdp=2", "topology.tensor=2")
    run_dir = tmp_path / "moved" / "general" / "default" / "run"
    while process.poll() is None and killing.last_step(run_dir) < 70:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    moved = killing.finish(config, tmp_path / "moved", one)
    first, second = killing.losses(whole), killing.losses(moved)
    assert first.keys() == second.keys()
    assert max(abs(first[step] - second[step]) for step in first) < 1e-3
    assert [record["rows"] for record in killing.train_records(whole)] == [
        record["rows"] for record in killing.train_records(moved)
    ]
