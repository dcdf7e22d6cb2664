"""The benchmarks' harness: workers that answer or die, equal work, figures and pages."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import environments, families, figures, methods, page, speed
from benchmarks.bench import Bench
from benchmarks.shapes import SHAPES, TINY, options, write_corpus
from benchmarks.workers import Worker, WorkerError, in_turns

from holdfast import registry
from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve

PEERS = Path(environments.__file__).parent / "peers"
JOB = "gpt/train/pretrain"


def script(folder: Path, body: str) -> list[str]:
    """A worker whose steps run some code."""
    path = folder / "worker.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(PEERS)!r})\n"
        "from serve import open_pipe, serve\n"
        "say = open_pipe()\nprint('noise of a library')\ncount = 0\n"
        f"def train(steps):\n    global count\n    count += steps\n    {body}\n    return [1.0] * steps\n"
        "serve(train, {'parameters': 5, 'versions': {}}, say)\n"
    )
    return [sys.executable, str(path)]


def test_a_worker_answers_whatever_libraries_print(tmp_path: Path) -> None:
    worker = Worker(script(tmp_path, "print('more noise')"), tmp_path / "log")
    assert worker.facts == {"parameters": 5, "versions": {}, "losses": [1.0, 1.0, 1.0]}
    assert in_turns({"peer": worker}, 3, {"peer": 2}) == {}
    worker.close()
    assert len(worker.seconds) == 3
    assert worker.memory > 1 << 20
    assert "more noise" in (tmp_path / "log").read_text()


def test_a_worker_that_dies_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ValueError: too bad"):
        Worker(script(tmp_path, "raise ValueError('too bad')"), tmp_path / "log")


def test_a_peer_that_dies_later_is_left_out_and_ours_stops_everything(tmp_path: Path) -> None:
    command = script(tmp_path, "assert count < 5, 'enough'")
    peer = Worker(command, tmp_path / "log")
    assert in_turns({"peer": peer}, 3, {}) == {"peer": "AssertionError: enough"}
    ours = Worker(command, tmp_path / "log")
    with pytest.raises(WorkerError):
        in_turns({"ours": ours}, 3, {})


def facts(parameters: int, *losses: float) -> Any:
    return SimpleNamespace(facts={"parameters": parameters, "losses": list(losses)})


def test_unequal_work_is_refused() -> None:
    workers = {
        "ours": facts(10, 4.0, 3.9),
        "same": facts(10, 4.00005, 3.9),
        "larger": facts(11, 4.0, 3.9),
        "other optimizer": facts(10, 4.0, 3.8),
        "not a number": facts(10, 4.0, float("nan")),
        "torch_bfloat16": facts(10, 4.005, 3.9),
    }
    assert set(speed.unequal(workers)) == {"larger", "other optimizer", "not a number"}


def test_the_targets_of_a_row_are_the_row_moved_by_one(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", TINY)
    cfg = merge(config_classes(JOB), options(TINY, tmp_path / "corpus", tmp_path / "cache"))
    trainer = Rehearsal(resolve(JOB, cfg), tmp_path / "run").trainer
    assert trainer.resolved.model.vocab_size == TINY.vocabulary
    for step in range(5):
        batch = trainer.batches[step]
        assert batch.x.shape == (1, TINY.rows, TINY.length)
        assert (batch.padding_mask == 1).all()
        np.testing.assert_array_equal(batch.y, np.roll(batch.x, -1, axis=-1))


def fake_results() -> dict[str, Any]:
    names = ("ours", "torch_eager", "levanter")
    shape = {
        "ours_tokens_per_s": 2000.0, "torch_eager": 1900.0, "levanter": 1000.0,
        "ratios": {"torch_eager": 2000 / 1900, "levanter": 2.0},
        "spread": dict.fromkeys(names, 10.0), "peak_memory": dict.fromkeys(names, 1 << 30),
        "missing": {"transformers": "no network"}, "parameters": 10, "memory_ratio": 0.9,
        "versions": {"ours": {"jax": "1"}}, "matmul_flops_per_s": 2e11, "matmul_spread": 1e9,
        "flops_per_step": 1e11, "share_of_matmul_peak": 0.5,
    }  # fmt: skip
    machine = {"cpu": "a CPU", "cores": 2, "memory": 1 << 34, "python": "3.11"}
    more = {"machine": machine, "rounds": 5, "started": "today", "load_before": 0.1, "load_after": 2.0, "minutes": 20.0}
    return {**dict.fromkeys(SHAPES, shape), **more}


def test_figures_are_judged_and_what_is_not_measured_is_null() -> None:
    found = figures.judged(fake_results())
    assert found["small_over_levanter"] == {"value": 2.0, "at_least": 1.6, "passed": True}
    assert found["share_of_matmul_peak"] == {"value": 0.5, "at_least": 0.72, "passed": False}
    assert found["wide_vocab_memory"] == {"value": 0.9, "at_most": 0.8, "passed": False}
    assert found["small_over_transformers"] == {"value": None, "at_least": 1.25, "passed": None}
    assert json.loads(json.dumps(found)) == found


def test_every_figure_of_the_must_show_table_has_a_threshold() -> None:
    assert len(figures.FIGURES) == 19
    assert len({figure.key for figure in figures.FIGURES}) == 19
    assert all((figure.at_least is None) != (figure.at_most is None) for figure in figures.FIGURES)


def test_the_page_names_what_is_missing_and_keeps_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")
    page.write(fake_results())
    written = (tmp_path / "benchmarks.md").read_text()
    assert "| transformers | missing: no network | | |" in written
    assert "| small: share of the float32 matmul peak | at least 0.72 | 0.50 | **missed** |" in written
    assert "load average before 0.1" in written
    (tmp_path / "benchmarks.md").write_text(written + "\nwhat stands in the way\n")
    page.write(fake_results() | {"minutes": 30.0})
    again = (tmp_path / "benchmarks.md").read_text()
    assert again.endswith("\nwhat stands in the way\n")
    assert "30 minutes" in again


def test_an_environment_is_made_once_and_a_failure_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_PEERS", str(tmp_path))
    commands: list[list[str]] = []
    code = 1

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, code, "", "WARNING: x\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert environments.environment("torch") == environments.Environment(None, "ERROR: No matching distribution")
    code = 0
    made = environments.environment("torch")
    assert made.python is not None
    assert "torch==2.13.0" in commands[-1]
    count = len(commands)
    assert environments.environment("torch") == made
    assert len(commands) == count


def test_every_registered_method_has_an_arm_beside_plain(tmp_path: Path) -> None:
    arms = methods.arms()
    assert {"kl", "kl on old rows", "l2_reference", *registry.methods.names()} <= arms.keys()
    write_corpus(tmp_path / "corpus", TINY)
    config = methods.config_of(TINY, tmp_path / "corpus", tmp_path / "cache")
    for name in ("kl on old rows", "dft"):
        run = resolve(methods.JOB, merge(config_classes(methods.JOB), config, list(arms[name].overrides)))
        assert run.curriculum.draws_old(1)
        assert (run.curriculum.stages[1].beta > 0) == (name != "dft")


def test_ratios_are_shown_beside_their_limits() -> None:
    ratios = {name: {"ratio": 1.06, "spread": 0.01, "wall": 1.2} for name in ("dft", "ewc", "mine")}
    seconds = {"plain_seconds": 0.5, "plain_cpu": 0.25}
    shown = methods.method_table({**seconds, "ratios": ratios, "missing": {"osf": "refused"}})
    assert "plain step: 0.250 s of CPU time, 0.500 s by the clock" in shown
    assert "| dft | 1.060 (0.010) | 1.200 | at most 1.05 | **missed** |" in shown
    assert "| ewc | 1.060 (0.010) | 1.200 | at most 1.1 | kept |" in shown
    assert "| mine | 1.060 (0.010) | 1.200 |  |  |" in shown
    assert "| osf | missing: refused | | | |" in shown


def test_a_part_of_the_ratios_is_taken_up_again_if_it_was_made_alike(tmp_path: Path) -> None:
    part, bench = tmp_path / methods.PART, Bench(tmp_path, 2)
    found = methods.measured_before(part, bench)
    assert found["ratios"] == {}
    part.write_text(json.dumps({**found, "ratios": {"dft": {"ratio": 1.0}}, "missing": {"osf": "refused"}}))
    assert methods.measured_before(part, bench)["ratios"] == {"dft": {"ratio": 1.0}}
    assert methods.measured_before(part, bench)["missing"] == {}
    assert methods.measured_before(part, Bench(tmp_path, 5))["ratios"] == {}


def test_a_run_that_was_ended_measures_the_other_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        """Steps of 2 s, by the clock 4 s; plain ones half as long; the arm `ewc` ends the run at first."""

        ends = True

        def __init__(self, _bench: Bench, _shape: Any, arm: methods.Arm) -> None:
            if Timed.ends and "ewc" in str(arm.overrides):
                raise KeyboardInterrupt
            self.cpu = 2.0 if arm.overrides else 1.0
            self.seconds: list[tuple[float, float]] = []

        def block(self) -> tuple[float, float]:
            self.seconds.append((self.cpu, 2 * self.cpu))
            return self.seconds[-1]

    chosen = {name: arm for name, arm in methods.arms().items() if name in ("dft", "ewc")}
    monkeypatch.setattr(methods, "arms", lambda: chosen)
    monkeypatch.setattr(methods, "OUT", tmp_path)
    monkeypatch.setattr(methods, "_Timed", Timed)
    with pytest.raises(KeyboardInterrupt):
        methods.run(Bench(tmp_path, 2))
    assert [*json.loads((tmp_path / methods.PART).read_text())["ratios"]] == ["dft"]
    Timed.ends = False
    found = methods.run(Bench(tmp_path, 2))
    assert found["ratios"] == {name: {"ratio": 2.0, "spread": 0.0, "wall": 2.0} for name in chosen}
    assert (found["plain_cpu"], found["plain_seconds"]) == (1.0, 2.0)
    assert not (tmp_path / methods.PART).exists()


def test_families_are_shown_beside_a_dense_model() -> None:
    found = {"ratio": 1.2, "spread": 0.1, "parameters": 30_000_000, "active": 11_000_000}
    result = {"dense_seconds": 0.5, "dense_parameters": 11_000_000, "ratios": {"moe": found, "hybrid": found}}
    shown = families.family_table(result)
    assert "dense decoder of 11.0M parameters: 0.500 s a step" in shown
    assert "| moe | 30.0M, 11.0M | 1.200 (0.100) | at most 1.3 | kept |" in shown
    assert "| hybrid | 30.0M, 11.0M | 1.200 (0.100) |  |  |" in shown
