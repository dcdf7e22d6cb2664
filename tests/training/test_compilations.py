"""What is compiled in a run, and when the host waits for the device."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from holdfast.analysis.rehearsal import Rehearsal
from holdfast.tracking import jsonl as metrics
from holdfast.training import compile as compiling
from holdfast.training import loop
from training import tiny
from training.killing import losses

pytestmark = pytest.mark.slow  # whole runs whose compilations are counted

COMPILED = "/jax/core/compile/backend_compile_duration"
JOB = "continual/train/abcd_kl"

# Two stages with a penalty, two without, fades between them, replay, evaluation at every boundary and probes.
CURRICULUM: dict[str, Any] = {
    "stages": [
        {"tokens": 8 * 32 * 6, "data": [{"name": "lists", "style": "PACKED"}]},
        {
            "tokens": 8 * 32 * 6,
            "data": [{"name": "arithmetic", "style": "PADDED"}],
            "beta": 0.5,
            "update_reference": True,
            "overlap": 0.5,
        },
        {"tokens": 8 * 32 * 6, "data": [{"name": "lists", "style": "PACKED"}], "beta": 0.2, "overlap": 0.5},
        {"tokens": 8 * 32 * 6, "data": [{"name": "arithmetic", "style": "PADDED"}], "beta": 0.0},
    ],
    "training": {"batch_size": 8, "validation_steps": 8, "replay": {"rate": 0.25}},
    "optimization": {"kl": {"estimator": "forward"}, "lr": 0.003},
    "architecture": tiny.PRETRAIN["architecture"],
    "logging": {"report_interval": 1, "checkpoint_interval": 4, "validation_interval": 3},
    "eval": {"evaluations": ["arithmetic", "lists"], "limit": 8},
}


class Compilations:
    """Counts what XLA compiles, or takes from the cache, while it listens."""

    def __init__(self) -> None:
        self.count = 0
        self.listening = False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, _seconds: float, **_more: Any) -> None:
        self.count += self.listening and event == COMPILED

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        self.listening = True
        try:
            yield
        finally:
            self.listening = False


@pytest.fixture(scope="module")
def heard() -> Compilations:
    return Compilations()


def test_the_counter_itself_sees(heard: Compilations) -> None:
    before = heard.count
    with heard.listen():
        jax.jit(lambda x: x * 3 + heard.count)(jax.numpy.ones(7))
    assert heard.count > before


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, heard: Compilations) -> Any:
    """A whole run: its trainer, the kinds of train steps it compiled, and compilations by the duties of each step."""
    trace_train, after = compiling.trace_train, loop.TrainLoop.after
    lowered: list[tuple[bool, bool]] = []
    by_step: dict[int, int] = {}

    def noted(train_step: Any, mesh: Any, state: Any, *rest: Any) -> Any:
        lowered.append((state.objective.penalty is not None, state.reference is not None))
        return trace_train(train_step, mesh, state, *rest)

    def counted(self: loop.TrainLoop, step: int) -> None:
        before = heard.count
        with heard.listen():
            after(self, step)
        by_step[step] = heard.count - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "trace_train", noted)
        patch.setattr(loop.TrainLoop, "after", counted)
        trainer = tiny.trainer(JOB, CURRICULUM, tmp_path_factory.mktemp("run"), "training.per_device_batch_size=8")
        trainer.run()
    return trainer, lowered, by_step


def test_one_train_step_is_compiled_for_each_kind_of_stage(watched: Any) -> None:
    """Four stages, two kinds: those without a penalty share a step, and so do those with one."""
    trainer, lowered, _ = watched
    assert trainer.done
    assert lowered == [(False, False), (True, True)]


def test_what_the_search_for_a_micro_batch_compiled_is_what_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """Of two kinds of stages only the other one is compiled once more; the run is that of a given micro-batch."""
    trace_train, lowered = compiling.trace_train, []

    def noted(train_step: Any, mesh: Any, state: Any, *rest: Any) -> Any:
        lowered.append(state.objective.penalty is not None)
        return trace_train(train_step, mesh, state, *rest)

    monkeypatch.setattr(compiling, "trace_train", noted)
    for name, rows, wanted in (("searched", -1, [True, False]), ("given", 8, [False, True])):
        lowered.clear()
        trainer = tiny.trainer(JOB, CURRICULUM, tmp_path, f"training.per_device_batch_size={rows}", name=name)
        trainer.run()
        assert trainer.batch_shape == (1, 8)
        assert lowered == wanted
        assert (trainer.micro_batch.seconds > 0) == (rows < 0)
        first = next(line for line in metrics.read(trainer.spec.run_dir / "metrics.jsonl") if line["kind"] == "train")
        assert first["seconds"]["compile"] >= round(trainer.micro_batch.seconds, 4)
    folder = tmp_path / "general" / "default"
    assert losses(folder / "searched") == losses(folder / "given")


def test_a_second_boundary_compiles_nothing_new(watched: Any) -> None:
    """From the second boundary with a reference on, neither evaluation, validation nor checkpoints compile."""
    trainer, _, by_step = watched
    points = json.loads((trainer.spec.run_dir / "results.json").read_text())["points"]
    measured = [point["step"] for point in points]
    second, third = trainer.resolved.curriculum.stage_start(2), trainer.resolved.curriculum.stage_start(3)
    assert {second, third} <= set(measured)
    assert by_step[measured[0]] > 0, "the first evaluation compiles"
    assert {step: by_step[step] for step in range(second, third)} == dict.fromkeys(range(second, third), 0)


def test_steps_compile_nothing_after_the_first_of_their_kind(tmp_path: Path, heard: Compilations) -> None:
    rehearsal = Rehearsal(tiny.resolved(JOB, CURRICULUM), tmp_path)
    rehearsal.take(2)
    before = heard.count
    with heard.listen():
        rehearsal.take(3)
    assert heard.count == before


def test_the_host_fetches_only_the_metrics_of_the_step_before(tmp_path: Path, monkeypatch: Any) -> None:
    """On one device nothing else goes between host and device by itself, and no step is waited for."""
    rehearsal = Rehearsal(tiny.resolved(JOB, CURRICULUM), tmp_path)
    rehearsal.take(2)
    fetched: list[Any] = []
    host = loop.host

    def explicit(metrics: Any) -> dict[str, float]:
        fetched.append(rehearsal.step)
        with jax.transfer_guard("allow"):
            return host(metrics)

    monkeypatch.setattr(loop, "host", explicit)
    monkeypatch.setattr(jax, "block_until_ready", lambda _: pytest.fail("the loop waits for the device"))
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            rehearsal.one()
    # The metrics of a step are fetched once the next one has been dispatched.
    assert len(fetched) == 2
