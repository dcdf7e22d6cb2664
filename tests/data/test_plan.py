"""The data plan: counts, permutations, and rows that do not depend on how one got there."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.curriculum import Curriculum, FadeConfig, Stage
from holdfast.data import counts
from holdfast.data.counts import UNIT, CountTable, _allot_one_by_one, allot, quantise
from holdfast.data.permutation import key_of, permute
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.sampling import DatasetStyle, Sampling, SourceKey
from holdfast.errors import UserError
from holdfast.training.manifest import check_resume, facts

PMD = DatasetStyle.PMD


def plan(
    rates: dict[str, float],
    steps: int = 50,
    batch_size: int = 8,
    sizes: dict[str, int] | None = None,
    **options: object,
) -> DataPlan:
    mixture = tuple(Sampling(name, rate) for name, rate in rates.items())
    curriculum = Curriculum((Stage("s", steps * batch_size * 4, mixture),), batch_size, block_size=4)
    known = None
    if sizes is not None:
        known = {SourceKey(name, PMD): SourceSize(size, 4.0, f"{name}-1") for name, size in sizes.items()}
    return DataPlan(curriculum, 0, known, **options)  # type: ignore[arg-type]


def test_a_small_dataset_is_drawn_at_the_right_times() -> None:
    """0.99 / 0.01 in batches of 8: truncating per batch would never draw the small one."""
    made = plan({"large": 0.99, "small": 0.01}, steps=500)
    drawn = 0
    for step in range(500):
        drawn += made.counts_at(step)[SourceKey("small", PMD)]
        assert abs(drawn - 0.01 * 8 * (step + 1)) < 1
    assert drawn == 40


def test_a_weight_of_0_draws_nothing() -> None:
    made = plan({"all": 1.0, "none": 0.0})
    assert all(made.counts_at(step)[SourceKey("none", PMD)] == 0 for step in range(50))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.floats(0.001, 1), min_size=1, max_size=8),
    st.lists(st.integers(1, 20), min_size=1, max_size=20),
)
def test_the_quick_count_is_the_one_by_one_count(parts: list[float], batches: list[int]) -> None:
    shares = quantise(parts)
    assert sum(shares) == UNIT
    quick, slow = [0] * len(parts), [0] * len(parts)
    for rows in batches:
        assert allot(quick, shares, rows) == _allot_one_by_one(slow, shares, rows, list(range(len(parts))))
        assert quick == slow


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 12), st.integers(1, 200))
def test_a_repeating_segment_is_what_it_would_be_step_by_step(parts: list[int], batch_size: int, steps: int) -> None:
    shares = [part / sum(parts) for part in parts]
    table = CountTable([(0, steps, True)], lambda _: shares, batch_size)
    deficits = [0] * len(parts)
    expected = [allot(deficits, quantise(shares), batch_size) for _ in range(steps)]
    assert [table.counts_at(step).tolist() for step in range(steps)] == expected
    assert table.counts_until(steps).tolist() == expected
    assert table.drawn_before(steps).tolist() == np.sum(expected, axis=0).tolist()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 2**60))
def test_a_permutation_is_one(size: int, seed: int) -> None:
    assert sorted(permute(np.arange(size), size, key_of(seed, "x")).tolist()) == list(range(size))


def test_permutations_differ_by_key_and_are_not_affine() -> None:
    first, second = (permute(np.arange(997), 997, key_of(0, epoch)) for epoch in (0, 1))
    assert (first == second).mean() < 0.02
    assert len(np.unique(np.diff(first))) > 400
    assert permute(np.array([5]), 997, key_of(0, 0))[0] == first[5]


def test_each_row_is_used_once_per_epoch_whichever_step_draws_it() -> None:
    sizes = {"a": 31, "b": 7}
    made = plan({"a": 0.75, "b": 0.25}, steps=60, sizes=sizes)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for step in range(60):
        refs = made.rows_at(step)
        for number in (0, 1):
            drawn[number].extend(sorted(refs.row[refs.source == number].tolist()))
    for number, size in enumerate(sizes.values()):
        rows = drawn[number]
        counts = np.bincount(rows, minlength=size)
        assert counts.max() - counts.min() <= 1
        assert len(rows) > 2 * size


@given(sizes=st.tuples(st.integers(1, 90), st.integers(1, 90)), share=st.floats(0.1, 0.9))
@settings(deadline=None)
def test_the_end_of_an_epoch_is_where_every_row_was_drawn(sizes: tuple[int, int], share: float) -> None:
    made = plan({"a": share, "b": 1 - share}, sizes=dict(zip("ab", sizes, strict=True)))
    end = made.epoch_end(0, 50)
    seen = {(source, row) for step in range(end) for source, row in zip(*made.rows_at(step)[:2], strict=True)}
    before = {(source, row) for step in range(end - 1) for source, row in zip(*made.rows_at(step)[:2], strict=True)}
    assert end == 50 or len(seen) == sum(sizes)
    assert len(before) < sum(sizes)
    assert plan({"a": 1.0}).epoch_end(3, 9) == 9, "without data nothing is known to be over"


def test_epochs_have_different_orders() -> None:
    made = plan({"a": 1.0}, steps=8, batch_size=8, sizes={"a": 16})
    epochs = [np.concatenate([made.rows_at(step).row for step in pair]) for pair in ((0, 1), (2, 3))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(16))
    assert (epochs[0] != epochs[1]).any()


def test_rows_are_a_pure_function_of_the_step() -> None:
    made, again = (plan({"a": 0.6, "b": 0.4}, sizes={"a": 100, "b": 50}) for _ in range(2))
    backwards = {step: again.rows_at(step) for step in reversed(range(50))}
    for step in range(50):
        assert all((a == b).all() for a, b in zip(made.rows_at(step), backwards[step], strict=True))


def test_a_source_goes_on_counting_in_a_later_stage() -> None:
    stages = tuple(Stage(f"s{i}", 2 * 8 * 4, (Sampling("a", 1.0),)) for i in range(2))
    sizes = {SourceKey("a", PMD): SourceSize(32, 4.0, "a")}
    made = DataPlan(Curriculum(stages, 8, 4), 0, sizes)
    assert sorted(np.concatenate([made.rows_at(step).row for step in range(4)])) == list(range(32))


def test_overlap_0_gives_exactly_the_rows_of_a_hard_switch() -> None:
    stages = tuple(Stage(name, 5 * 8 * 4, (Sampling(name, 1.0),)) for name in "ab")
    sizes = {SourceKey(name, PMD): SourceSize(100, 4.0, name) for name in "ab"}
    hard = DataPlan(Curriculum(stages, 8, 4), 0, sizes)
    zero = DataPlan(Curriculum(stages, 8, 4, FadeConfig(overlap=0.0, curve="cosine")), 0, sizes)
    for step in range(10):
        assert all((a == b).all() for a, b in zip(hard.rows_at(step), zero.rows_at(step), strict=True))
        assert set(hard.rows_at(step).source) == {0 if step < 5 else 1}


def test_shares_of_tokens_draw_rows_by_how_much_loss_they_hold() -> None:
    mixture = (Sampling("text", 0.5), Sampling("task", 0.5))
    curriculum = Curriculum((Stage("s", 100 * 8 * 4, mixture),), 8, 4)
    sizes = {SourceKey("text", PMD): SourceSize(100, 90.0, ""), SourceKey("task", PMD): SourceSize(100, 10.0, "")}
    drawn = DataPlan(curriculum, 0, sizes, "tokens").drawn_before(100)
    assert drawn[SourceKey("text", PMD)] == pytest.approx(80, abs=1)
    assert drawn[SourceKey("task", PMD)] == pytest.approx(720, abs=1)


@pytest.mark.parametrize("mark", [3, 4096])
@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0]), min_size=1, max_size=3), st.booleans())
def test_digests_are_those_of_every_single_count(mark: int, parts: list[float], fades: bool) -> None:
    """At every step, however the run is divided into spans, and where periods repeat."""

    def shares_at(step: int) -> list[float]:
        return [part * (1 + fades * step / 60) if number else part for number, part in enumerate(parts)]

    segments = [(0, 20, False), (20, 60, False)] if fades else [(0, 60, True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "MARK", mark)
        table = CountTable(segments, shares_at, 3)
        for step in range(61):
            columns = table.counts_until(step).T.tolist()
            wanted = [
                sum(count * pow(counts.BASE, at, counts.MODULUS) for at, count in enumerate(column)) % counts.MODULUS
                for column in columns
            ]
            assert table.digests_until(step) == wanted


def test_a_late_fingerprint_looks_at_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan({"a": 0.75, "b": 0.25}, steps=2_000_000, sizes={"a": 10, "b": 10})
    looked_at: list[int] = []
    polynomial = counts._polynomial
    monkeypatch.setattr(counts, "_polynomial", lambda column: looked_at.append(len(column)) or polynomial(column))
    assert made.fingerprint(1_000_000) != made.fingerprint(999_999)
    assert sum(looked_at) < 1000


def test_a_fade_that_has_drawn_nothing_yet_is_the_same_past() -> None:
    """How the run is divided does not matter, what was drawn does."""
    stages = tuple(Stage(name, 50 * 8 * 4, (Sampling(name, 1.0),)) for name in "ab")
    sizes = {SourceKey(name, PMD): SourceSize(10, 4.0, name) for name in "ab"}
    hard, faded = (
        DataPlan(Curriculum(stages, 8, 4, fade), 0, sizes) for fade in (FadeConfig(), FadeConfig(overlap=0.2))
    )
    start = faded.curriculum.fade_steps(0)[0]
    first = next(step for step in range(start, 50) if faded.counts_at(step)[SourceKey("b", PMD)])
    assert hard.fingerprint(first) == faded.fingerprint(first)
    assert hard.fingerprint(first + 1) != faded.fingerprint(first + 1)


def test_manifests_of_the_first_format_are_still_understood() -> None:
    made = plan({"a": 0.5, "b": 0.5}, sizes={"a": 10, "b": 10})
    for version in (1, 2):
        manifest = {"format": version, "step": 20, "config": {}, **facts(made, 20, version)}
        run = SimpleNamespace(classes=[], flat_config=dict, flat_defaults=dict, curriculum=made.curriculum)
        assert check_resume(manifest, run, made) == []
        with pytest.raises(UserError, match="another past"):
            check_resume(manifest, run, plan({"a": 0.4, "b": 0.6}, sizes={"a": 10, "b": 10}))


def test_the_fingerprint_changes_with_what_decides_the_rows() -> None:
    base = plan({"a": 0.5, "b": 0.5}, sizes={"a": 10, "b": 10}).fingerprint(20)
    assert base == plan({"a": 0.5, "b": 0.5}, steps=80, sizes={"a": 10, "b": 10}).fingerprint(20)
    assert base != plan({"a": 0.4, "b": 0.6}, sizes={"a": 10, "b": 10}).fingerprint(20)
    other = plan({"a": 0.5, "b": 0.5}, sizes={"a": 10, "b": 10})
    other.seed = 1
    assert base != other.fingerprint(20)


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="has no row"):
        plan({"a": 1.0}, sizes={"a": 0})
