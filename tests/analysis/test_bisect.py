"""When it was lost and to which rows: steps taken again to the bit, effects of rows, the proof, and clean runs."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks import bisect as planted
from typer.testing import CliRunner

from holdfast.analysis import bisect as found_by
from holdfast.analysis.bisect import Place, Proof, RankedRow, Search, bisect, error, masks_of, to_json
from holdfast.analysis.influence import row_effects
from holdfast.analysis.replay import Replay, Snapshot, check_devices
from holdfast.analysis.target import Losses, Target, find_target
from holdfast.cli.app import app
from holdfast.errors import UserError
from holdfast.execution.checkpoints import CheckpointInfo
from holdfast.report.bisect import sentence
from training.tiny import continual


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages with an anchor and a fade; checkpoints of steps 0, 8, 10 and 16."""
    made = continual(tmp_path_factory.mktemp("again"), "logging.rolling_checkpoints=9")
    made.run()
    folder: Path = made.spec.run_dir
    return folder


@pytest.fixture(scope="module")
def replay(run: Path) -> Iterator[Replay]:
    opened = Replay(run)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def lists(replay: Replay) -> Target:
    return find_target(replay.trainer, task="lists", limit=8)


def test_steps_taken_again_are_the_runs_own_to_the_bit(replay: Replay) -> None:
    assert [info.step for info in replay.checkpoints] == [0, 8, 10, 16]
    state = replay.advance(replay.restore(replay.checkpoints[0]), 8)
    assert replay.differs(state) is None
    middle = Snapshot.of(state)
    assert replay.differs(replay.advance(state, 16)) is None
    assert replay.differs(replay.advance(middle.state(), 16)) is None, "a snapshot goes on as the state does"
    other = replay.advance(middle.state(), 16, {9: [0]})
    assert "at step 16" in str(replay.differs(other)), "a row that is left out makes another run"


def test_nothing_is_written_into_the_runs_folder(run: Path, replay: Replay) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    replay.advance(replay.restore(replay.checkpoints[1]), 10)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_row_that_is_left_out_keeps_the_others(replay: Replay) -> None:
    whole, masked = replay.batch(3), replay.batch(3, [1, 5])
    targets = masked.y.reshape(-1, masked.y.shape[-1])
    assert (targets[[1, 5]] == -1).all()
    kept = [place for place in range(len(targets)) if place not in (1, 5)]
    assert (targets[kept] == whole.y.reshape(targets.shape)[kept]).all()
    assert (masked.x == whole.x).all()


def test_losses_are_those_of_the_evaluation(replay: Replay, lists: Target) -> None:
    state = replay.restore(replay.checkpoints[-1])
    measured = lists.losses(state)
    evaluator = replay.trainer.evaluator()
    assert evaluator is not None
    result = evaluator.evaluate(state.params, tasks=["lists"], datasets=[])["lists"]
    for loss, each in zip(measured.loss, result.examples, strict=True):
        scores = np.array(each.scores, float)
        assert each.label is not None
        assert loss == pytest.approx(np.log(np.exp(scores).sum()) - scores[each.label], rel=1e-4)
    assert measured.accuracy == pytest.approx(result.accuracy)
    rows = find_target(replay.trainer, dataset="arithmetic", limit=8)
    held = evaluator.evaluate(state.params, tasks=[], datasets=["arithmetic"])["arithmetic"]
    assert rows.losses(state).mean == pytest.approx(held.measures["nll"], rel=1e-4)


@pytest.mark.slow
def test_effects_of_rows_are_those_of_leaving_them_out(replay: Replay, lists: Target) -> None:
    """Against finite differences: each row of four steps left out for real, across the boundary at step 8."""
    start = Snapshot.of(replay.advance(replay.restore(replay.checkpoints[0]), 6))
    effects, loss = row_effects(replay, lists, start, 10)
    assert effects.shape == (4, 8)
    assert loss == lists.losses(replay.advance(start.state(), 10)).mean
    real = np.array(
        [
            [lists.losses(replay.advance(start.state(), 10, {step: [place]})).mean - loss for place in range(8)]
            for step in range(6, 10)
        ]
    )
    assert np.abs(real).max() > 1e-4
    assert np.corrcoef(effects.reshape(-1), real.reshape(-1))[0, 1] > 0.95
    assert np.abs(effects - real).max() < 0.3 * np.abs(real).max()


def test_rows_are_shown_with_their_answers(replay: Replay) -> None:
    shown = replay.text(0, 0)
    assert " ⟶ " in shown
    refs = replay.trainer.batches.refs(0)
    store = replay.trainer.data.train[replay.trainer.plan.sources[refs.source[0]]].prepared
    assert replay.run.tokenizer.decode(store.tokens(int(refs.row[0])))[:6] == shown[:6]


def losses(*values: float) -> Losses:
    return Losses(np.array(values), np.ones(len(values)), np.zeros(len(values)))


def test_a_single_place_rises_twice_as_steeply_as_any_other() -> None:
    assert Place(0, 16, 0.1, 0.9, rise=0.2, elsewhere=0.1).stands_out
    assert not Place(0, 16, 0.1, 0.9, rise=0.2, elsewhere=0.11).stands_out
    assert not Place(0, 16, 0.1, 0.9, rise=-0.1, elsewhere=0.0).stands_out


def test_a_rise_of_a_few_questions_is_not_one_of_the_task(replay: Replay, lists: Target) -> None:
    search = Search(replay, lists, lambda _: None)
    place = Place(0, 2, 0.0, 0.0, rise=1.0, elsewhere=0.1)
    search.curve = {0: losses(*[0.1] * 16), 2: losses(*[0.2 + n / 100 for n in range(16)])}
    assert search.sure(place._replace(elsewhere=0.4))
    search.curve[2] = losses(*[0.09 - n / 1000 for n in range(13)], 2.0, 2.1, 2.2)
    assert search.sure(place), "ten times as steep as anywhere else"
    assert not search.sure(place._replace(elsewhere=0.4))
    search.curve = {0: losses(0.1), 2: losses(0.5)}
    assert search.sure(place)
    assert not search.sure(place._replace(elsewhere=0.4)), "one question says little"


def test_what_is_hardly_known_cannot_be_lost_by_much() -> None:
    assert error(losses(3.0), chosen=True) - error(losses(2.0), chosen=True) < 0.1
    assert error(losses(0.7), chosen=True) - error(losses(0.01), chosen=True) > 0.4
    assert error(losses(3.0), chosen=False) == 3.0


def test_rows_are_accused_only_if_every_random_mask_does_worse() -> None:
    best = Proof(8, original=1.0, without=0.2, controls=(0.9, 1.0, 0.3), before=0.1)
    assert best.beats_all
    assert best.undone == pytest.approx(0.8 / 0.9)
    assert not Proof(8, 1.0, 0.2, (0.9, 0.2), 0.1).beats_all
    assert masks_of([RankedRow(3, 1, "a", 0, 0.1), RankedRow(3, 2, "a", 0, 0.1)]) == {3: [1, 2]}


def test_a_task_that_only_got_better_was_never_lost(run: Path, replay: Replay, lists: Target) -> None:
    arithmetic = find_target(replay.trainer, dataset="arithmetic", limit=8)
    said: list[str] = []
    found = bisect(replay, arithmetic, say=said.append)
    assert found.word == "kept"
    assert found.accused == ()
    assert "never lost" in sentence(found)
    assert "steps are taken again" in said[0]
    assert json.loads(json.dumps(to_json(found), allow_nan=False))["interval"] is None
    assert lists.count == 8


def test_a_window_too_short_to_compare_places_has_none_that_stands_out(replay: Replay, lists: Target) -> None:
    search = Search(replay, lists, lambda _: None)
    place, _ = search.find(search.window(8, 16))
    assert not place.stands_out


def test_mistakes_on_the_command_line_are_named(run: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["bisect", *arguments])
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert "name what was lost" in said(str(run))
    assert "--dataset: --task and --example" in said(str(run), "--dataset", "lists", "--task", "lists")
    assert "expected a step after --since 8" in said(str(run), "--task", "lists", "--since", "8", "--until", "8")
    assert "the JSON goes beside it" in said(str(run), "--task", "lists", "--html", "found.json")
    assert "this is not the folder of a run" in said(str(tmp_path), "--task", "lists")
    (tmp_path / "empty").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "empty")
    assert "no checkpoints" in said(str(tmp_path / "empty"), "--task", "lists")


def test_what_cannot_be_looked_at_is_named(replay: Replay, lists: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, wrong in (
        ({"task": "nothing"}, "'nothing'"),
        ({"dataset": "nothing"}, "this run has no such dataset; it has arithmetic, lists"),
        ({"example": "nobody"}, "no question of arithmetic, lists has this id"),
    ):
        with pytest.raises(UserError, match=wrong):
            find_target(replay.trainer, **asked, limit=8)
    one = find_target(replay.trainer, task="lists", example=_first_id(replay), limit=8)
    assert (one.kind, one.count) == ("example", 1)
    search = Search(replay, lists, lambda _: None)
    with pytest.raises(UserError, match=r"the newest checkpoint of .* is of step 16"):
        search.window(None, 99)
    monkeypatch.setattr(replay, "checkpoints", replay.checkpoints[-1:])
    with pytest.raises(UserError, match="no steps to look at between 16 and 16"):
        search.window(None, None)
    with pytest.raises(UserError, match=r"the first checkpoint of .* is of step 16"):
        search.window(3, None)


def _first_id(replay: Replay) -> str:
    evaluator = replay.trainer.evaluator()
    assert evaluator is not None
    return evaluator.examples("lists")[0].id


def test_a_run_of_several_processes_is_refused(run: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    info = CheckpointInfo(16, run / "checkpoints" / "16", {"processes": 2})
    with pytest.raises(UserError, match="by 2 processes together"):
        check_devices(info)
    newest = replay.checkpoints[-1]
    other = CheckpointInfo(16, newest.path, {**newest.manifest, "mesh": {"data": 4, "fsdp": 1, "tensor": 1}})
    with pytest.raises(UserError, match="on a mesh of data 4 x fsdp 1 x tensor 1, here it is"):
        replay._check_mesh(other)
    changed = CheckpointInfo(16, newest.path, {**newest.manifest, "plan": "0" * 32})
    with pytest.raises(UserError, match="the prepared data is not what the run was trained on"):
        replay._check_data(changed)


def test_ctrl_c_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(found_by, "bisect", interrupted)
    result = CliRunner().invoke(app, ["bisect", str(run), "--task", "lists"])
    assert result.exit_code == 130
    assert "nothing was written" in result.output
    assert not list(run.glob("bisect-*"))


@pytest.mark.slow
def test_poisoned_rows_are_found_and_accused(tmp_path: Path) -> None:
    row = planted.measured("poisoned", 103)
    assert row["verdict"] == "rows"
    assert row["holds"] == 1
    assert row["candidates"] >= 256
    assert float(row["precision_at_8"]) >= 0.5
    assert float(row["undone"]) >= 0.5


@pytest.mark.slow
def test_a_clean_run_accuses_nobody() -> None:
    assert planted.measured("clean", 2000)["verdict"] in ("kept", "evenly")
