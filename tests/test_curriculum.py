"""The curriculum as a function of the step: properties over random curricula, and the boundary's neighbours."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.curriculum import CURVES, Curriculum, FadeConfig, Stage
from holdfast.data.plan import DataPlan
from holdfast.data.sampling import DatasetStyle, Sampling, SourceKey
from holdfast.errors import ConfigError
from holdfast.training.stages import (
    ReplayConfig,
    StageConfig,
    section_fade,
    stages_from_lists,
    stages_from_section,
    with_replay,
)

TOKENS_PER_STEP = 32  # 4 rows of 8 tokens


def one(name: str) -> tuple[Sampling, ...]:
    return (Sampling(name, 1.0, DatasetStyle.PMD),)


def curriculum(tokens: list[int], fade: FadeConfig | None = None, **stage: object) -> Curriculum:
    stages = tuple(Stage(f"s{i}", amount, one(f"d{i}"), **stage) for i, amount in enumerate(tokens))  # type: ignore[arg-type]
    return Curriculum(stages, batch_size=4, block_size=8, fade=fade or FadeConfig())


@st.composite
def curricula(draw: st.DrawFn) -> Curriculum:
    count = draw(st.integers(1, 5))
    tokens = [draw(st.integers(TOKENS_PER_STEP, 40 * TOKENS_PER_STEP)) for _ in range(count)]
    names = [draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True)) for _ in range(count)]
    stages = []
    for index, (amount, chosen) in enumerate(zip(tokens, names, strict=True)):
        parts = [draw(st.integers(1, 99)) for _ in chosen]
        rates = [part / sum(parts) for part in parts]
        mixture = tuple(Sampling(name, rate) for name, rate in zip(chosen, rates, strict=True))
        stages.append(Stage(f"s{index}", amount, mixture))
    overlaps = [draw(st.sampled_from([0.0, 0.3, 1.0])) for _ in range(count - 1)] if draw(st.booleans()) else []
    fade = FadeConfig(draw(st.sampled_from([0.0, 0.25, 1.0])), draw(st.sampled_from(CURVES)), 10.0, overlaps)
    try:
        return Curriculum(tuple(stages), batch_size=4, block_size=8, fade=fade)
    except ConfigError:  # the last stage may have no whole step of its own
        stages[-1] = Stage("last", tokens[-1] + TOKENS_PER_STEP, stages[-1].mixture)
        return Curriculum(tuple(stages), batch_size=4, block_size=8, fade=fade)


@settings(deadline=None, max_examples=150)
@given(curricula())
def test_weights_sum_to_one_and_none_is_negative(made: Curriculum) -> None:
    for step in range(made.total_steps):
        shares = made.stage_weights_at(step)
        assert all(share >= 0 for share in shares)
        assert math.isclose(sum(shares), 1.0, abs_tol=1e-12)
        assert sum(share > 0 for share in shares) <= 2
        weights = made.weights_at(step)
        assert all(weight >= 0 for weight in weights.values())
        assert math.isclose(sum(weights.values()), 1.0, abs_tol=1e-9)


@settings(deadline=None, max_examples=100)
@given(curricula())
def test_counts_fill_batches_follow_weights_and_drift_little(made: Curriculum) -> None:
    plan = DataPlan(made, seed=0)
    owed = dict.fromkeys(made.sources, 0.0)
    drawn = dict.fromkeys(made.sources, 0)
    limit = 1.0 if len(made.sources) <= 3 else 2.0
    for step in range(made.total_steps):
        weights, counts = made.weights_at(step), plan.counts_at(step)
        assert sum(counts.values()) == made.batch_size
        for source, count in counts.items():
            assert count == 0 or weights[source] > 0
            owed[source] += weights[source] * made.batch_size
            drawn[source] += count
            assert abs(owed[source] - drawn[source]) < limit + 1e-6
        assert plan.drawn_before(step + 1) == drawn


@settings(deadline=None, max_examples=60)
@given(curricula(), st.data())
def test_editing_the_future_leaves_the_past(made: Curriculum, data: st.DataObject) -> None:
    """A new last stage changes no row before the fade into it, nor does another length of the last stage."""
    if data.draw(st.booleans()):
        stages = (*made.stages, Stage("new", 10 * TOKENS_PER_STEP, one("zz")))
        overlaps = [*made.fade.per_boundary_overlap, 0.3] if made.fade.per_boundary_overlap else []
        if not overlaps and len(made.stages) == 1:
            overlaps = []
    else:
        last = made.stages[-1]
        stages = (*made.stages[:-1], Stage(last.name, last.tokens + 7 * TOKENS_PER_STEP, last.mixture))
        overlaps = made.fade.per_boundary_overlap
    fade = FadeConfig(made.fade.overlap, made.fade.curve, made.fade.steepness, overlaps)
    edited = Curriculum(stages, made.batch_size, made.block_size, fade)
    same = 0
    while same < made.total_steps and made.weights_at(same) == {
        source: edited.weights_at(same).get(source, 0.0) for source in made.sources
    }:
        same += 1
    old, new = DataPlan(made, seed=0), DataPlan(edited, seed=0)
    for step in range(same):
        assert old.counts_at(step) == {source: new.counts_at(step)[source] for source in made.sources}
    assert old.fingerprint(same) == new.fingerprint(same)


@pytest.mark.parametrize("curve", CURVES)
def test_curves_start_at_exactly_0_and_end_at_exactly_1(curve: str) -> None:
    fade = FadeConfig(curve=curve)
    assert fade.incoming(0.0) == 0.0
    assert fade.incoming(1.0) == 1.0
    assert fade.incoming(0.5) == pytest.approx(0.5)
    assert 0 < fade.incoming(1e-9) < 1e-6
    assert fade.incoming(1e-7) < fade.incoming(1e-6)
    values = [fade.incoming(u / 100) for u in range(101)]
    assert values == sorted(values)


def test_curves_have_the_stated_shapes() -> None:
    assert FadeConfig(curve="linear").incoming(0.3) == 0.3
    assert FadeConfig(curve="cosine").incoming(0.3) == pytest.approx((1 - math.cos(math.pi * 0.3)) / 2)

    def sigma(u: float) -> float:
        return 1 / (1 + math.exp(-10 * (u - 0.5)))

    scaled = (sigma(0.3) - sigma(0)) / (sigma(1) - sigma(0))
    assert FadeConfig(curve="sigmoid", steepness=10).incoming(0.3) == pytest.approx(scaled)


def test_a_hard_switch_is_exactly_hard() -> None:
    made = curriculum([3 * TOKENS_PER_STEP, 2 * TOKENS_PER_STEP])
    assert [made.stage_weights_at(step) for step in (2, 3)] == [[1.0, 0.0], [0.0, 1.0]]
    assert [made.stage_at(step) for step in (2, 3, 4)] == [0, 1, 1]
    assert made.boundaries() == (3,)
    assert made.fade_steps(0) == (3, 3)
    assert made.segments() == [(0, 3, True), (3, 5, True)]


def test_a_boundary_inside_a_step_belongs_to_the_next_step() -> None:
    made = curriculum([3 * TOKENS_PER_STEP + 1, 2 * TOKENS_PER_STEP])
    assert [made.stage_at(step) for step in (3, 4)] == [0, 1]
    assert made.total_steps == 5


def test_the_fade_is_centred_on_the_boundary_and_as_long_as_the_smaller_stage_allows() -> None:
    made = curriculum([20 * TOKENS_PER_STEP, 8 * TOKENS_PER_STEP], FadeConfig(overlap=0.5))
    assert made.overlap_tokens(0) == 4 * TOKENS_PER_STEP
    assert made.fade_steps(0) == (19, 22)
    assert [made.stage_weights_at(step)[1] for step in (18, 19, 20, 21, 22)] == [0, 0.25, 0.5, 0.75, 1]


def test_one_step_stages_with_full_overlap_on_both_sides() -> None:
    made = curriculum([TOKENS_PER_STEP] * 4, FadeConfig(overlap=1.0))
    assert made.total_steps == 4
    for step in range(4):
        assert sum(made.stage_weights_at(step)) == pytest.approx(1)


def test_per_boundary_overlaps_replace_the_common_one() -> None:
    tokens = [10 * TOKENS_PER_STEP] * 3
    made = curriculum(tokens, FadeConfig(overlap=1.0, per_boundary_overlap=[0.0, 0.4]))
    assert made.overlap_tokens(0) == 0
    assert made.overlap_tokens(1) == 4 * TOKENS_PER_STEP


@pytest.mark.parametrize(
    ("tokens", "path"),
    [([TOKENS_PER_STEP - 1, 320], "training/tokens/0"), ([48, 44], "training/tokens/1")],
)
def test_a_stage_without_a_whole_step_is_refused(tokens: list[int], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        curriculum(tokens)
    assert error.value.path == path


def test_wrong_overlaps_rates_and_repeated_datasets_are_refused() -> None:
    with pytest.raises(ConfigError, match="training/fade/per_boundary_overlap"):
        curriculum([320, 320], FadeConfig(per_boundary_overlap=[0.1, 0.2]))
    with pytest.raises(ConfigError, match="training/dataset/0"):
        Curriculum((Stage("a", 320, (Sampling("x", 0.5), Sampling("y", 0.4))),), 4, 8)
    with pytest.raises(ConfigError, match="each dataset once"):
        Curriculum((Stage("a", 320, (Sampling("x", 0.5), Sampling("x", 0.5))),), 4, 8)


def test_a_penalty_without_a_reference_is_refused() -> None:
    stages = (Stage("a", 320, one("a")), Stage("b", 320, one("b"), beta=0.1))
    with pytest.raises(ConfigError, match="optimization/kl/betas/1"):
        Curriculum(stages, 4, 8)
    assert Curriculum(stages, 4, 8, initial_reference=True).has_reference(1)


def test_the_reference_is_there_from_its_snapshot_to_the_last_stage_that_needs_it() -> None:
    stages = (
        Stage("a", 320, one("a")),
        Stage("b", 320, one("b"), beta=0.1, update_reference=True),
        Stage("c", 320, one("c")),
    )
    made = Curriculum(stages, 4, 8)
    assert made.snapshot_steps() == {10: 1}
    # At step 10 the state is still the one before the snapshot; at 20 the last stage with a penalty has just ended.
    assert [made.has_reference(step) for step in (0, 9, 10, 11, 20, 21)] == [False, False, False, True, True, False]


def test_a_snapshot_can_be_taken_before_the_first_new_row() -> None:
    stages = (Stage("a", 320, one("a")), Stage("b", 320, one("b"), beta=0.1, update_reference=True))
    made = Curriculum(stages, 4, 8, FadeConfig(overlap=0.4), reference_at="fade_start")
    start = made.fade_steps(0)[0]
    assert made.snapshot_steps() == {start: 1}
    assert start < made.stage_start(1)
    assert [made.has_reference(step) for step in (start, start + 1)] == [False, True]
    assert made.weights_at(start - 1)[SourceKey("b", DatasetStyle.PMD)] == 0


def test_a_snapshot_that_nobody_uses_is_not_taken() -> None:
    made = Curriculum((Stage("a", 320, one("a")), Stage("b", 320, one("b"), update_reference=True)), 4, 8)
    assert made.snapshot_steps() == {}


def test_both_spellings_give_the_same_stages() -> None:
    listed = stages_from_lists([320, 640], [one("a"), one("b")], [0.0, 0.2], [1])
    sections = [
        StageConfig(tokens=320, data=list(one("a"))),
        StageConfig(tokens=640, data=list(one("b")), beta=0.2, update_reference=True, overlap=0.5),
    ]
    assert stages_from_section(sections) == listed
    assert section_fade(sections, FadeConfig()).per_boundary_overlap == [0.5]


def test_replay_gives_a_share_of_later_stages_to_earlier_datasets() -> None:
    stages = stages_from_lists([320, 320, 320], [one("a"), one("b"), one("c")])
    mixed = with_replay(stages, ReplayConfig(rate=0.1))
    assert mixed[0] == stages[0]
    assert {s.name: s.rate for s in mixed[1].mixture} == {"b": 0.9, "a": 0.1}
    assert {s.name: s.rate for s in mixed[2].mixture} == {"c": 0.9, "a": 0.05, "b": 0.05}
    only_a = with_replay(stages, ReplayConfig(rate=0.1, from_=["a"]))
    assert {s.name: s.rate for s in only_a[2].mixture} == {"c": 0.9, "a": 0.1}
    with pytest.raises(ConfigError, match="training/replay/from/0"):
        with_replay(stages, ReplayConfig(from_=["nope"]))


def test_replay_may_be_for_some_stages_alone() -> None:
    stages = stages_from_lists([320, 320, 320], [one("a"), one("b"), one("c")])
    late = with_replay(stages, ReplayConfig(rate=0.1, stages=[2]))
    assert late[:2] == stages[:2]
    assert {s.name: s.rate for s in late[2].mixture} == {"c": 0.9, "a": 0.05, "b": 0.05}
    own = with_replay(stages, ReplayConfig(rate=0.1, source="self", stages=[2]))
    assert own[:2] == stages[:2]
    assert {s.name: s.rate for s in own[2].mixture} == {"c": 0.9, "self": 0.1}
    assert with_replay(stages, ReplayConfig(source="self", stages=[0, 1]), 0)[0].mixture[-1].name == "self"
    for wrong, match in (
        ([0], r"stages/0: got 0, expected the index of a stage that could replay, 1 to 2"),
        ([1, 3], r"stages/1: got 3"),
        ([1, 1], r"stages/1: got 1, expected each stage once"),
        ([], r"stages: got \[\], expected at least one stage"),
    ):
        with pytest.raises(ConfigError, match=f"training/replay/{match}"):
            with_replay(stages, ReplayConfig(rate=0.1, stages=wrong))


def test_old_rows_are_those_whose_home_is_an_earlier_stage() -> None:
    made = curriculum([320, 320])
    assert [made.home(source) for source in made.sources] == [0, 1]
