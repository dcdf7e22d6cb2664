"""Interpolations of weights: the ends are the checkpoints, and an average is a run like others."""

import dataclasses
import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.analysis import interpolation
from holdfast.analysis.export import export_run
from holdfast.analysis.interpolation import Interpolator, interpolate
from holdfast.cli.average import average_command
from holdfast.cli.eval import eval_command
from holdfast.errors import UserError
from holdfast.evaluation.interpolations import FILE
from holdfast.execution.checkpoints import list_checkpoints, named_checkpoint, write_manifest
from holdfast.models.parameters import leaves_of
from holdfast.report import print_summary, write_report
from holdfast.report.compare import compare, render
from holdfast.report.interpolation import write_interpolations
from holdfast.report.run_files import open_run
from holdfast.training.weights import checkpoint_params
from training.tiny import CONTINUAL, trainer

pytestmark = pytest.mark.slow  # whole runs, and an evaluation of each point between them

JOB = "continual/train/abcd_kl"
SCORES = ("accuracy", "nll", "bits_per_byte")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("averaging")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", os.environ.get("HOLDFAST_CACHE", str(folder / "cache")))
        made = trainer(JOB, CONTINUAL, folder)
        made.run()
        yield made.spec.run_dir


@pytest.fixture(scope="module")
def interpolator(run: Path) -> Interpolator:
    return Interpolator(f"{run}@boundary_1", f"{run}@final")


def scores_of(run: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    capsys.readouterr()
    eval_command(run, checkpoint=checkpoint, as_json=True)
    found = json.loads(capsys.readouterr().out)
    return {task: {name: record["measures"][name] for name in SCORES} for task, record in found.items()}


def trees_equal(first: Any, second: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), first, second)))


def test_interpolation_is_linear_and_its_ends_are_exact() -> None:
    first = {"a": jnp.array([1.0, -0.0, jnp.inf]), "b": jnp.array([1.0], jnp.bfloat16)}
    second = {"a": jnp.array([3.0, 2.0, 1.0]), "b": jnp.array([2.0], jnp.bfloat16)}
    middle = interpolate(jnp.float32(0.25), first, second)
    np.testing.assert_allclose(middle["a"][:2], [1.5, 0.5])
    assert middle["b"].dtype == jnp.bfloat16
    assert float(middle["b"][0]) == 1.25
    for alpha, end in ((0.0, first), (1.0, second)):
        got = interpolate(jnp.float32(alpha), first, second)
        assert [np.asarray(each).tobytes() for each in jax.tree.leaves(got)] == [
            np.asarray(each).tobytes() for each in jax.tree.leaves(end)
        ]


def test_lines_of_a_run(run: Path, interpolator: Interpolator, tmp_path: Path) -> None:
    scaled = Interpolator(f"{run}@boundary_1", f"{run}@final", lines=0.25)
    first, second = (leaves_of(end) for end in interpolator.ends)
    found = leaves_of(scaled.weights(1.0))
    kernel = "layers/mlp/up/kernel"
    np.testing.assert_array_equal(found[kernel][-1], second[kernel][-1])
    for path, layer in ((kernel, 0), ("embed/embedding", slice(None)), ("final_norm/scale", slice(None))):
        wanted = 0.75 * np.asarray(first[path][layer]) + 0.25 * np.asarray(second[path][layer])
        np.testing.assert_allclose(found[path][layer], wanted, atol=1e-6)
    assert scaled.inputs != interpolator.inputs
    written = scaled.evaluate([1.0], tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["lines"] == 0.25
    assert "layers scaled from 0.25 to 1" in (write_interpolations(written, tmp_path)).read_text()
    assert interpolation.default_folder(f"{run}@boundary_1", f"{run}@final", 0.25).name.endswith("-lines-0.25")
    unscaled = Interpolator(f"{run}@boundary_1", f"{run}@final", lines=1.0)
    for alpha in (0.3, 1.0):
        assert trees_equal(unscaled.weights(alpha), interpolator.weights(alpha))


def test_the_ends_score_as_eval_says_to_the_last_bit(
    run: Path, interpolator: Interpolator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = interpolator.evaluate([0.0, 1.0], tmp_path)
    assert (found.old, found.new) == (("lists",), ("arithmetic",))
    for point, checkpoint in zip(found.points, ("boundary_1", "final"), strict=True):
        assert point.scores == scores_of(run, checkpoint, capsys)


def test_one_function_is_compiled_and_three_copies_are_held(
    interpolator: Interpolator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, copies = [], []
    mix, evaluate = interpolation._mix, interpolator.evaluator.evaluate
    leaves = jax.tree.leaves(interpolator.ends[0])
    monkeypatch.setattr(interpolation, "_mix", lambda *arguments: traced.append(1) or mix(*arguments))
    monkeypatch.setattr(interpolator, "_interpolate", jax.jit(lambda *arguments: interpolate(*arguments)))
    largest = max(leaves, key=lambda leaf: leaf.size)

    def looked(params: Any) -> Any:
        gc.collect()
        # Of other tests' arrays nothing is known: how many of the largest leaf's shape came since is.
        copies.append(sum(each.shape == largest.shape for each in jax.live_arrays()))
        return evaluate(params)

    monkeypatch.setattr(interpolator.evaluator, "evaluate", looked)
    gc.collect()
    before = sum(each.shape == largest.shape for each in jax.live_arrays())
    interpolator.evaluate([0.1, 0.2, 0.3, 1.0], tmp_path)
    assert len(traced) == len(leaves)
    assert max(copies) == before + sum(leaf.shape == largest.shape for leaf in leaves)


def test_what_was_evaluated_is_not_evaluated_again(
    run: Path, interpolator: Interpolator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    results = interpolator.results

    def killed_at_the_third(alpha: float) -> Any:
        asked.append(alpha)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return results(alpha)

    monkeypatch.setattr(interpolator, "results", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        interpolator.evaluate([0.0, 0.5, 1.0], tmp_path)
    assert [point["alpha"] for point in json.loads((tmp_path / FILE).read_text())["points"]] == [0.0, 0.5]
    found = interpolator.evaluate([0.0, 0.25, 0.5, 1.0], tmp_path)
    assert asked == [0.0, 0.5, 1.0, 0.25, 1.0]
    assert [point.alpha for point in found.points] == [0.0, 0.25, 0.5, 1.0]
    others = Interpolator(f"{run}@boundary_1", f"{run}@final", ["eval.limit=3"])
    assert others.inputs != interpolator.inputs
    assert Interpolator(f"{run}@boundary_1", f"{run}@final").inputs == interpolator.inputs


def test_a_saved_average_is_a_run(
    run: Path, interpolator: Interpolator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "runs" / "averaged"
    assert interpolator.save(0.5, saved, "0.5")
    assert not interpolator.save(0.5, saved, "0.5")  # the same once more
    with pytest.raises(UserError, match="something already"):
        interpolator.save(0.25, saved, "0.25")
    weights = interpolator.weights(0.5)
    info = named_checkpoint(str(saved))
    assert trees_equal(
        checkpoint_params(info, interpolator.trainer.resolved.model, interpolator.trainer.topology.mesh), weights
    )
    expected = {
        task: {name: result.measures[name] for name in SCORES} for task, result in interpolator.results(0.5).items()
    }
    assert scores_of(saved, "final", capsys) == expected
    results = json.loads((saved / "results.json").read_text())
    ran = json.loads((run / "results.json").read_text())
    column = results["tasks"].index("lists")
    assert results["matrix"]["nll"][:2] == ran["matrix"]["nll"][:2]
    assert results["matrix"]["nll"][2][column] == expected["lists"]["nll"]
    assert results["metrics"]["nll"]["forgetting"] is not None
    print_summary(saved)
    assert "0.5 of `run@boundary_1`" in card_of(saved, tmp_path)
    write_report(saved, pictures=False)


def card_of(saved: Path, tmp_path: Path) -> str:
    export_run(str(saved), tmp_path / "exported")
    return (tmp_path / "exported" / "README.md").read_text()


def test_an_average_is_an_arm_of_its_own_in_a_comparison(run: Path, interpolator: Interpolator, tmp_path: Path) -> None:
    interpolator.save(0.5, tmp_path / "half", "0.5")
    interpolator.save(0.75, tmp_path / "best", "best")
    found = compare([run, tmp_path / "half", tmp_path / "best"])
    assert [group.name for group in found.groups] == ["run", "half", "best"]
    assert not any(group.warnings for group in found.groups)
    page = render(found)
    assert "average/alpha" in page
    other = open_run(tmp_path / "best")
    # Seeds of which another alpha was best are of one group all the same.
    alpha = {**other.results, "average": {**other.results["average"], "alpha": 0.4}}
    seeded = {**other.config, "training": {**other.config["training"], "seed": 1}}
    from holdfast.report.groups import grouped

    twin = dataclasses.replace(other, config=seeded, results=alpha)
    assert [len(group.runs) for group in grouped([other, twin])] == [2]


def test_an_average_starts_a_run_but_does_not_go_on(run: Path, interpolator: Interpolator, tmp_path: Path) -> None:
    interpolator.save(0.5, tmp_path / "general" / "default" / "half", "0.5")
    saved = tmp_path / "general" / "default" / "half"
    again = trainer(JOB, CONTINUAL, tmp_path, name="half")
    with pytest.raises(UserError, match=r"weights alone.*--init-from"):
        again.run()
    assert [info.step for info in list_checkpoints(saved / "checkpoints")] == [16]
    with pytest.raises(UserError, match="weights alone"):
        trainer(JOB, CONTINUAL, tmp_path, name="branch", parent=str(saved)).run()
    fresh = trainer(JOB, CONTINUAL, tmp_path, name="fresh")
    assert trees_equal(fresh.restorer.weights(named_checkpoint(str(saved))), interpolator.weights(0.5))


def test_a_pair_that_ends_before_the_last_stage_has_a_shorter_matrix(run: Path, tmp_path: Path) -> None:
    early = Interpolator(f"{run}@0", f"{run}@boundary_1")
    early.save(0.5, tmp_path / "early", "0.5")
    results = json.loads((tmp_path / "early" / "results.json").read_text())
    assert results["stages"] == ["lists"]
    assert len(results["matrix"]["nll"]) == 2
    assert open_run(tmp_path / "early").matrix is not None


def copied(run: Path, folder: Path, **model: Any) -> Path:
    """A run's folder copied, with another model in the manifests."""
    shutil.copytree(run, folder)
    for info in list_checkpoints(folder / "checkpoints"):
        manifest = {**info.manifest, "model": {**info.manifest["model"], **model}}
        write_manifest(info.path, manifest)
    return folder


def test_two_runs_average_and_two_models_do_not(run: Path, tmp_path: Path) -> None:
    other = copied(run, tmp_path / "other")
    pair = Interpolator(f"{other}@final", f"{run}@final")
    assert (pair.nothing.old, pair.nothing.new) == (("arithmetic", "lists"), ())
    assert interpolation.default_folder(*pair.texts) == run / "averages" / "other@16-16"
    wide = copied(run, tmp_path / "wide", n_embd=64)
    with pytest.raises(UserError, match=r"not of one model(.|\n)*architecture/n_embd: was 32, is 64"):
        Interpolator(f"{run}@final", f"{wide}@final")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alphas": "0,2"}, "alpha '2'"),
        ({"at": "much"}, "alpha 'much'"),
        ({"measure": "beauty"}, "--measure beauty"),
        ({"second": "{run}@boundary_7"}, "no checkpoint 'boundary_7'"),
        ({"first": "{run}-not@final"}, "there is no run folder"),
        ({"save": Path("{run}")}, "something already"),
        ({"tasks": "nothing"}, "no evaluation 'nothing'"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(run: Path, changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"first": f"{run}@boundary_1", "second": f"{run}@final"}
    for name, value in changed.items():
        options[name] = type(value)(str(value).format(run=run))
    with pytest.raises(UserError, match=message):
        average_command(**options)
    assert not (run / "averages").exists()


def test_the_command_draws_and_saves_the_best(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends, out, saved = (f"{run}@boundary_1", f"{run}@final"), tmp_path / "figures", tmp_path / "averaged"
    average_command(*ends, alphas="0,0.5,...,1", out=out, save=saved)
    said = capsys.readouterr().out
    assert "Best by bits per byte: alpha" in said
    assert str(out / "average.html") in said
    best = json.loads((out / FILE).read_text())["best"]
    assert json.loads((saved / "results.json").read_text())["average"]["alpha"] == best
    average_command(*ends, alphas="0,0.5,...,1", out=out, save=saved, as_json=True)
    assert json.loads(capsys.readouterr().out)["best"] == best
