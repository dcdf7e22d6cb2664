"""Rows that a model samples from itself, before there are any: the plan, its digests, stores made in parts."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.cli.data import app as data_command
from holdfast.cli.data import sampled_by
from holdfast.curriculum import Curriculum, FadeConfig, ReplayMemory, SelfReplay, Stage
from holdfast.data import sampled
from holdfast.data.plan import DataPlan, SampledSet, SourceSize
from holdfast.data.sampled import Parts, SampledRows, check_sets, copy_sets, open_set, set_path, write_stand_in
from holdfast.data.sampling import SELF, DatasetStyle, Sampling, SourceKey
from holdfast.data.tokenizers.bytelevel import BytesTokenizer
from holdfast.errors import UserError

BATCH, BLOCK, STEPS = 8, 4, 10
A, B, C = (SourceKey(name, DatasetStyle.PMD) for name in "abc")
TOKENIZER = BytesTokenizer()


def curriculum(rate: float = 0.25, overlap: float = 0.0, rows: int | None = None, **options: Any) -> Curriculum:
    """a, then b and c, each with a share of `self`."""
    stages = [Stage("a", STEPS * BATCH * BLOCK, (Sampling("a"),))]
    for name in "bc":
        mixture = (Sampling(name, 1 - rate), Sampling(SELF.name, rate))
        stages.append(Stage(name, STEPS * BATCH * BLOCK, mixture))
    sampled = SelfReplay(rows, options.pop("temperature", 1.0))
    return Curriculum(tuple(stages), BATCH, BLOCK, FadeConfig(overlap), sampled=sampled, **options)


def plan(made: Curriculum, seed: int = 0, num_rows: int = 1000) -> DataPlan:
    sizes = {source: SourceSize(num_rows, float(BLOCK), source.name) for source in made.datasets}
    return DataPlan(made, seed, sizes)


def drawn(made: DataPlan, source: SourceKey, steps: range) -> list[int]:
    number = made.sources.index(source)
    refs = [made.rows_at(step) for step in steps]
    return [row for ref in refs for row in ref.row[ref.source == number].tolist()]


def test_a_stage_draws_each_row_of_its_own_set_once() -> None:
    made = plan(curriculum())
    assert [(s.stage, s.step, s.num_rows, s.first_row) for s in made.sampled_sets.values()] == [
        (1, 10, 20, 0),
        (2, 20, 20, 20),
    ]
    assert sorted(drawn(made, SELF, range(10, 20))) == list(range(20))
    assert sorted(drawn(made, SELF, range(20, 30))) == list(range(20, 40))
    assert drawn(made, SELF, range(10)) == []
    assert made.num_rows(SELF, 1) == 20
    assert made.num_rows(SELF, 0) is None


def test_a_set_of_a_given_size_is_drawn_over_and_over() -> None:
    rows = drawn(plan(curriculum(rows=8)), SELF, range(10, 20))
    assert sorted(rows[:8]) == sorted(rows[8:16]) == list(range(8))
    assert rows[:8] != rows[8:16], "each epoch in another order"


def test_in_a_fade_nothing_is_drawn_before_it_can_be_made() -> None:
    made = curriculum(overlap=0.8)
    assert made.fade_steps(0) == (7, 14)
    for step in range(30):
        weights = made.weights_at(step)
        assert sum(weights.values()) == pytest.approx(1)
        assert (weights[SELF] > 0) == (step >= 10)
    # What would be of `self` stays with the stage that fades out.
    assert made.weights_at(9)[B] == pytest.approx(0.75 * made.stage_weights_at(9)[1])
    assert made.weights_at(9)[A] == pytest.approx(1 - made.weights_at(9)[B])
    drawing = plan(made)
    assert set(drawn(drawing, SELF, range(20, 30))) <= set(range(drawing.sampled_sets[2].first_row, 99))
    assert sum(s.num_rows for s in drawing.sampled_sets.values()) == drawing.drawn_before(30)[SELF]


def test_the_plan_is_pure() -> None:
    """A digest says what the rows will be: options, seed, step and past, and nothing that comes later."""
    one = plan(curriculum())
    assert one.sampled_sets == plan(curriculum()).sampled_sets
    assert DataPlan(curriculum(), 0).sampled_sets[1].num_rows == 20, "known without data"
    longer = curriculum()
    longer = dataclasses.replace(
        longer, stages=(*longer.stages[:2], dataclasses.replace(longer.stages[2], tokens=20 * BATCH * BLOCK))
    )
    assert plan(longer).sampled_sets[1] == one.sampled_sets[1]
    others = [plan(curriculum(temperature=0.9)), plan(curriculum(), seed=1), plan(curriculum(rows=7)),
              plan(curriculum(), num_rows=999), plan(curriculum(rate=0.5))]  # fmt: skip
    for other in others[:3]:
        assert other.sampled_sets[1].fingerprint != one.sampled_sets[1].fingerprint
    assert len({each.fingerprint for made in [one, *others] for each in made.sampled_sets.values()}) >= 2 * 5


def test_the_past_changes_when_rows_were_drawn() -> None:
    one, other = plan(curriculum()), plan(curriculum(temperature=0.9))
    assert one.fingerprint(10) == other.fingerprint(10), "at the boundary nothing was drawn yet"
    assert one.fingerprint(11) != other.fingerprint(11)
    assert one.sampled_sets[2].fingerprint != other.sampled_sets[2].fingerprint, "the second set follows from the first"


def test_it_is_old_in_every_stage_and_no_dataset() -> None:
    made = curriculum()
    assert [made.is_old(SELF, stage) for stage in range(3)] == [True, True, True]
    assert [made.is_old(B, stage) for stage in range(3)] == [False, False, True]
    assert made.datasets == (A, B, C)
    assert [s.name for s in made.datasets_of(1)] == ["b"]


# Replay from a memory of a fixed size


def remembering(rows: int | None) -> DataPlan:
    """a, b with a replayed, a again with b replayed."""
    stages = (
        Stage("a", STEPS * BATCH * BLOCK, (Sampling("a"),)),
        Stage("b", STEPS * BATCH * BLOCK, (Sampling("b", 0.75), Sampling("a", 0.25))),
        Stage("a", STEPS * BATCH * BLOCK, (Sampling("a", 0.75), Sampling("b", 0.25))),
    )
    memory = None if rows is None else ReplayMemory(rows, ((), (A,), (B,)))
    return plan(Curriculum(stages, BATCH, BLOCK, memory=memory))


def test_a_memory_is_a_fixed_part_of_the_rows_that_were_trained_on() -> None:
    made = remembering(5)
    first = drawn(made, A, range(10))
    again = drawn(made, A, range(10, 20))
    assert set(again) <= set(first[:BATCH])
    assert len(set(again)) == 5
    assert [again.count(row) for row in set(again)] == [4] * 5
    assert set(drawn(made, B, range(20, 30))) <= set(drawn(made, B, range(10, 11)))
    assert len(set(drawn(made, A, range(20, 30)))) == 60, "a stage's own data is not a memory"
    assert made.num_rows(A, 1) == 5
    assert made.num_rows(A, 2) == 1000


def test_a_memory_is_a_part_of_the_past_and_all_is_none() -> None:
    some, other, none = remembering(5), remembering(6), remembering(None)
    assert some.fingerprint(10) == other.fingerprint(10) == none.fingerprint(10)
    assert len({some.fingerprint(11), other.fingerprint(11), none.fingerprint(11)}) == 3
    assert remembering(10**6).num_rows(A, 1) == 80, "no more than was seen"


# Stores

MADE = SampledSet(stage=1, step=10, num_rows=6, first_row=0, first_draw=0, fingerprint="f" * 32)
MADE_BY = {"weights": "w", "samples": 1}
ROWS = np.arange(8 * (BLOCK + 1)).reshape(8, BLOCK + 1)  # two parts, the last rows of which are too many


def publish(run_dir: Path) -> Path:
    path = set_path(run_dir, MADE)
    parts = Parts(path, MADE_BY)
    for number in parts.begin(2):
        parts.write(number, ROWS[4 * number : 4 * number + 4], TOKENIZER)
    parts.publish(MADE, 2, BLOCK, TOKENIZER)
    return path


def test_rows_are_those_that_were_sampled(tmp_path: Path) -> None:
    path = publish(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [
        "doc_bytes.npy", "keys.npy", "ledger.json", "offsets.npy", "prompt_lengths.npy", "token_bytes.npy", "tokens.bin"
    ]  # fmt: skip
    second = dataclasses.replace(MADE, stage=2, first_row=6, fingerprint="e" * 32)
    write_stand_in(tmp_path, second, BLOCK, TOKENIZER)
    rows = SampledRows({1: MADE, 2: second}, tmp_path, BLOCK)
    assert len(rows) == 12
    found = rows.rows([5, 11, 0])
    np.testing.assert_array_equal(found.x, [ROWS[5, :-1], [0] * BLOCK, ROWS[0, :-1]])
    np.testing.assert_array_equal(found.y, [ROWS[5, 1:], [0] * BLOCK, ROWS[0, 1:]])
    assert found.padding_mask.all()
    np.testing.assert_array_equal(found.positions[0], range(BLOCK))


def test_parts_go_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = publish(tmp_path / "whole")
    path = set_path(tmp_path / "killed", MADE)
    parts = Parts(path, MADE_BY)
    assert parts.begin(2) == [0, 1]
    parts.write(1, ROWS[4:], TOKENIZER)
    assert Parts(path, MADE_BY).begin(2) == [0]
    assert Parts(path, {**MADE_BY, "weights": "other"}).begin(2) == [0, 1], "of other weights nothing is taken"
    assert parts.begin(2) == [0, 1]
    for number in (0, 1):
        parts.write(number, ROWS[4 * number : 4 * number + 4], TOKENIZER)

    class KilledError(Exception):
        pass

    def killed(_: Path) -> None:
        raise KilledError

    monkeypatch.setattr(sampled, "sync", killed)  # all is written but the name
    with pytest.raises(KilledError):
        parts.publish(MADE, 2, BLOCK, TOKENIZER)
    monkeypatch.undo()
    again = Parts(path, MADE_BY)
    assert again.begin(2) == []
    again.publish(MADE, 2, BLOCK, TOKENIZER)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    path = publish(tmp_path)
    manifest = {"sampled": SampledRows({1: MADE}, tmp_path, BLOCK).facts(11)["sampled"]}
    assert SampledRows({1: MADE}, tmp_path, BLOCK).facts(10) == {}, "from the first use on"
    check_sets(manifest, [MADE], tmp_path)
    with (path / "tokens.bin").open("r+b") as file:
        file.seek(7)
        file.write(b"\x01")
    message = r"self-1-f+: the rows that the model sampled before stage 1 are damaged: .*--from RUN@boundary_1"
    with pytest.raises(UserError, match=message):
        open_set(tmp_path, MADE)
    with pytest.raises(UserError, match=message):
        check_sets(manifest, [MADE], tmp_path)
    with pytest.raises(UserError, match="missing"):
        check_sets(manifest, [MADE], tmp_path / "elsewhere")
    check_sets({}, [MADE], tmp_path)  # a checkpoint of the boundary: they are made anew


def test_branches_copy_rows(tmp_path: Path) -> None:
    path = publish(tmp_path / "parent")
    copy_sets([MADE, dataclasses.replace(MADE, stage=2)], tmp_path / "parent", tmp_path / "branch")
    copied = open_set(tmp_path / "branch", MADE)
    assert copied.ledger == open_set(tmp_path / "parent", MADE).ledger
    assert [each.name for each in copied.path.parent.iterdir()] == [path.name]


def test_rows_can_be_looked_at(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(UserError, match=r"run: no rows that its model sampled; training/replay: {source: self}"):
        sampled_by(run_dir)
    publish(run_dir)
    TOKENIZER.save(run_dir / "tokenizer")
    (run_dir / "config.yaml").touch()
    said = CliRunner().invoke(data_command, ["show", str(run_dir), "--examples", "2"], catch_exceptions=False).output
    assert "source: self" in said
    assert "documents: 6" in said
    assert f"document 5 (5 tokens): {TOKENIZER.decode(ROWS[5].tolist())!r}" in said


def test_a_damaged_part_is_sampled_again_and_one_of_the_previous_version_taken(tmp_path: Path) -> None:
    path = set_path(tmp_path, MADE)
    parts = Parts(path, MADE_BY)
    for number in parts.begin(2):
        parts.write(number, ROWS[4 * number : 4 * number + 4], TOKENIZER)
    assert parts.begin(2) == []
    first = parts.folder / "part-000000.bin"
    whole = first.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        first.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert parts.begin(2) == [0]
    first.write_bytes(whole[:-5])  # as it was written before there were checksums
    assert parts.begin(2) == []
