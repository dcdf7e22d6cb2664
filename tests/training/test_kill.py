"""Kill a run at any instant, start the same command again: bit-identical losses, parameters and scores."""

import hashlib
import signal
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


class Whole:
    """Runs that nothing happened to, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def env(self, devices: int = 1) -> dict[str, str]:
        return killing.environment(self.folder / "cache", devices)

    def config(self, text: str) -> Path:
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
        path.write_text(text)
        return path

    def run(self, text: str, devices: int = 1) -> Path:
        out = self.folder / self.config(text).stem
        made = out / "general" / "default" / "run"
        return made if made.exists() else killing.finish(self.config(text), out, self.env(devices))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("text", "devices", "overrides", "times"),
    [
        (PRETRAIN, 1, "", 2),
        (PRETRAIN, 4, "topology: {fsdp: 2, tensor: 2}\n", 2),
        (CONTINUAL, 1, "", 3),
        (CONTINUAL, 4, "topology: {data: 2, fsdp: 2}\n", 5),
    ],
    ids=["pretrain", "pretrain-sharded", "continual", "continual-sharded"],
)
def test_kills_at_random_instants_change_nothing(
    text: str, devices: int, overrides: str, times: int, tmp_path: Path, whole: Whole
) -> None:
    """A sample: `make campaign` kills by the hundred, at every named point of the program."""
    config, env = whole.config(text + overrides), whole.env(devices)
    unbroken = whole.run(text + overrides, devices)
    killed = killing.kill_at_random(config, tmp_path, env, times=times, seed=devices, total_steps=200)
    assert killed >= 0.8 * times - 1
    resumed = killing.finish(config, tmp_path, env)
    assert len(killing.losses(unbroken)) == 200
    killing.assert_identical(unbroken, resumed)


def stop_at(config: Path, out: Path, env: dict[str, str], step: int, number: signal.Signals) -> tuple[int, str]:
    """Start a run and send it a signal once it has recorded a step; its exit code and what it said."""
    process = killing.start(config, out, env)
    killing.wait_for(process, out / "general" / "default" / "run", step)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors.decode()


def test_kills_around_a_boundary_and_inside_a_fade(tmp_path: Path, whole: Whole) -> None:
    """Also between the boundary's checkpoint and the entry into the stage: the checkpoint of step 60 is there then."""
    config, env = whole.config(CONTINUAL), whole.env()
    for step in (60, 61, 75, 120):
        code, _ = stop_at(config, tmp_path, env, step, signal.SIGKILL)
        assert code == -signal.SIGKILL, step
    killing.assert_identical(whole.run(CONTINUAL), killing.finish(config, tmp_path, env))


def test_a_polite_stop_saves_a_checkpoint_and_ends_cleanly(tmp_path: Path, whole: Whole) -> None:
    config, env = whole.config(PRETRAIN), whole.env()
    run_dir = tmp_path / "general" / "default" / "run"
    for step, number in ((12, signal.SIGINT), (60, signal.SIGTERM)):
        code, said = stop_at(config, tmp_path, env, step, number)
        assert code == 128 + number, said
        assert "Traceback" not in said
        assert (run_dir / "checkpoints" / str(killing.last_step(run_dir))).is_dir()
    killing.assert_identical(whole.run(PRETRAIN), killing.finish(config, tmp_path, env))


def test_a_checkpoint_restores_onto_another_mesh(tmp_path: Path, whole: Whole) -> None:
    """Four devices, killed, then one: the same rows, and losses that agree up to rounding."""
    sharded = whole.config(CONTINUAL + "topology: {fsdp: 2, tensor: 2}\n")
    code, said = stop_at(sharded, tmp_path, whole.env(4), 70, signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    one, moved = whole.run(CONTINUAL), killing.finish(whole.config(CONTINUAL), tmp_path, whole.env())
    first, second = killing.losses(one), killing.losses(moved)
    assert first.keys() == second.keys()
    assert max(abs(first[step] - second[step]) for step in first) < 1e-3
    assert [record["rows"] for record in killing.train_records(one)] == [
        record["rows"] for record in killing.train_records(moved)
    ]
