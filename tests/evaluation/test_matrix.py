"""Golden values of the metrics, nulls everywhere, and the sign of losses."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.evaluation.matrix import (
    LOWER_IS_BETTER,
    METRICS,
    Point,
    ScoreMatrix,
    task_homes,
    task_names,
    tasks_not_learned,
)

GOLDEN = [[0.1, 0.1, 0.1], [0.8, 0.2, 0.1], [0.85, 0.9, 0.3], [0.5, 0.7, 0.85]]
TASKS = ("a", "b", "c")


def points(rows, measure="accuracy", sign=1.0):
    return [
        Point(
            step=10 * i,
            row=i,
            scores={t: {measure: None if v is None else sign * v} for t, v in zip(TASKS, row, strict=False)},
        )
        for i, row in enumerate(rows)
    ]


def matrix(rows, measure="accuracy", sign=1.0, homes=(1, 2, 3), **options):
    tasks = TASKS[: len(rows[0])]
    stages = [f"s{i}" for i in range(1, len(rows))]
    return ScoreMatrix.from_points(points(rows, measure, sign), stages, tasks, homes, **options)


def approx(**values):
    return {name: None if value is None else pytest.approx(value, abs=1e-5) for name, value in values.items()}


GOLDEN_METRICS = approx(
    average=0.68333, backward_transfer=-0.25, forward_transfer=0.15, forgetting=0.275, learning_accuracy=0.85
)


def test_golden_values():
    assert matrix(GOLDEN).metrics("accuracy") == GOLDEN_METRICS


@pytest.mark.parametrize("measure", ["nll", "bits_per_byte"])
def test_losses_are_negated_for_the_metrics_and_kept_raw_in_the_matrix(measure):
    table = matrix(GOLDEN, measure, sign=-1.0)
    assert table.metrics(measure) == GOLDEN_METRICS
    losses = ScoreMatrix(("s1", "s2"), ("a",), (1,), {measure: ((5.0,), (2.0,), (3.0,))})
    assert losses.measures[measure][1] == (2.0,)
    assert losses.metrics(measure) == approx(
        average=-3, backward_transfer=-1, forward_transfer=None, forgetting=1, learning_accuracy=-2
    )


def test_nulls_are_never_zero():
    rows = [[0.1, 0.1, None], [0.8, None, 0.1], [None, 0.9, float("nan")], [0.5, None, 0.85]]
    table = matrix(rows)
    assert table.measures["accuracy"][2] == (None, 0.9, None)
    assert table.metrics("accuracy") == approx(
        average=(0.5 + 0.85) / 2,
        backward_transfer=-0.3,  # b's last score is unknown
        forward_transfer=None,  # b lacks row 1, c lacks row 2
        forgetting=0.3,
        learning_accuracy=(0.8 + 0.9 + 0.85) / 3,
    )
    empty = matrix([[None, None, None]] * 4)
    assert empty.metrics("accuracy") == dict.fromkeys(METRICS)


def test_a_run_of_one_stage():
    table = matrix([[0.25], [0.75]], homes=(1,))
    assert table.metrics("accuracy") == approx(
        average=0.75, backward_transfer=None, forward_transfer=None, forgetting=None, learning_accuracy=0.75
    )


def test_a_run_that_is_not_finished_has_null_rows():
    table = ScoreMatrix.from_points(points(GOLDEN[:2]), ["s1", "s2", "s3"], TASKS, (1, 2, 3))
    assert table.measures["accuracy"][2:] == ((None, None, None), (None, None, None))
    assert table.metrics("accuracy")["average"] is None
    assert table.metrics("accuracy")["learning_accuracy"] == 0.8


def test_tasks_without_a_home_count_only_in_the_average():
    table = matrix(GOLDEN, homes=(None, None, None))
    assert table.metrics("accuracy") == approx(
        average=0.68333, backward_transfer=None, forward_transfer=None, forgetting=None, learning_accuracy=None
    )


def test_forgetting_looks_at_rows_before_home_too_but_not_at_row_0():
    table = ScoreMatrix(("s1", "s2", "s3"), ("a",), (2,), {"accuracy": ((1.0,), (0.9,), (0.5,), (0.4,))})
    assert table.metrics("accuracy")["forgetting"] == pytest.approx(0.5)


def test_not_learned_tasks_are_left_out_of_forgetting_only():
    plain, marked = matrix(GOLDEN), matrix(GOLDEN, not_learned=["b"])
    assert marked.metrics("accuracy")["forgetting"] == pytest.approx(0.35)
    for name in set(METRICS) - {"forgetting"}:
        assert marked.metrics("accuracy")[name] == plain.metrics("accuracy")[name]


def judged(row, accuracy, low, **facts):
    known = {"count": 100, "chance": 0.5, "majority": 0.68, "one_class": False, **facts}
    return Point(
        row, {"a": {"accuracy": accuracy}}, row=row, intervals={"a": {"accuracy": (low, 1.0)}}, facts={"a": known}
    )


def test_the_majority_class_is_not_learned():
    before, chance = judged(0, 0.5, 0.4), judged(1, 0.68, 0.58)
    assert tasks_not_learned([before, chance], ["a"], [1]) == {"a"}  # above chance, and no better than "no" to all
    learned = judged(1, 0.85, 0.76)
    assert tasks_not_learned([before, learned], ["a"], [1]) == frozenset()
    one = judged(1, 0.85, 0.76, one_class=True)
    assert tasks_not_learned([before, one], ["a"], [1]) == {"a"}


def test_luck_at_another_row_is_not_learning():
    points = [judged(0, 0.5, 0.4), judged(1, 0.6, 0.5), judged(2, 0.85, 0.76)]
    assert tasks_not_learned(points, ["a"], [1]) == {"a"}
    assert tasks_not_learned(points, ["a"], [2]) == frozenset()


def test_what_was_known_before_its_stage_is_not_called_not_learned():
    points = [judged(0, 0.85, 0.76), judged(1, 0.6, 0.5)]
    assert tasks_not_learned(points, ["a"], [1]) == frozenset()


def test_nothing_is_said_of_tasks_without_stage_or_figures():
    points = [judged(0, 0.5, 0.4), judged(1, 0.5, 0.4)]
    assert tasks_not_learned(points, ["a"], [None]) == frozenset()
    bare = [Point(row, {"a": {"accuracy": 0.5}}, row=row) for row in (0, 1)]
    assert tasks_not_learned(bare, ["a"], [1]) == frozenset()


def test_baseline_replaces_row_0():
    table = matrix(GOLDEN, baseline={"accuracy": {"b": 0.0, "c": 0.2}})
    assert table.metrics("accuracy")["forward_transfer"] == pytest.approx((0.2 + 0.1) / 2)
    losses = matrix(GOLDEN, "nll", sign=-1.0, baseline={"nll": {"b": 0.0, "c": -0.2}})
    assert losses.metrics("nll")["forward_transfer"] == pytest.approx((0.2 + 0.1) / 2)


def test_tasks_and_homes():
    stages = [["fineweb"], ["mnli"], ["fineweb", "sst2"]]
    names = task_names(["mnli", "siqa"], stages)
    assert names == ("mnli", "siqa", "fineweb", "sst2")
    assert task_homes(names, stages) == (2, None, 1, 3)


def test_results_json_has_the_contract_and_reads_back():
    probe = Point(step=15, scores={"a": {"accuracy": float("nan"), "nll": 1.0}}, at="probe", stage=1, tokens=120)
    all_points = [*points(GOLDEN), probe]
    table = ScoreMatrix.from_points(all_points, ["s1", "s2", "s3"], TASKS, (1, 2, 3), not_learned=["c"])
    results = table.to_results(all_points, noise_floor={"a": 0.01})
    text = json.dumps(results, allow_nan=False)
    back = json.loads(text)
    assert {"stages", "tasks", "matrix", "metrics", "points"} <= back.keys()
    assert back["matrix"] == {"accuracy": GOLDEN}
    assert tuple(back["metrics"]["accuracy"]) == METRICS
    assert len(back["points"]) == 5
    assert back["points"][-1]["scores"]["a"] == {"accuracy": None, "nll": 1.0}
    assert back["noise_floor"] == {"a": 0.01}
    assert ScoreMatrix.from_results(back) == table
    assert [Point.from_dict(point).to_dict() for point in back["points"]] == back["points"]


def test_a_later_point_of_the_same_row_counts():
    again = Point(step=30, row=3, scores={"a": {"accuracy": 0.6}})
    table = ScoreMatrix.from_points([*points(GOLDEN), again], ["s1", "s2", "s3"], TASKS, (1, 2, 3))
    assert table.measures["accuracy"][3] == (0.6, None, None)


cells = st.one_of(st.none(), st.floats(0, 1))


@settings(deadline=None, max_examples=80)
@given(data=st.data(), num_stages=st.integers(1, 4), num_tasks=st.integers(1, 3))
def test_properties_of_any_matrix(data, num_stages, num_tasks):
    row = st.lists(cells, min_size=num_tasks, max_size=num_tasks)
    rows = data.draw(st.lists(row, min_size=num_stages + 1, max_size=num_stages + 1))
    home = st.one_of(st.none(), st.integers(1, num_stages))
    homes = data.draw(st.lists(home, min_size=num_tasks, max_size=num_tasks))
    stages = tuple(f"s{i}" for i in range(num_stages))
    raw = tuple(map(tuple, rows))
    scores = ScoreMatrix(stages, TASKS[:num_tasks], tuple(homes), {"accuracy": raw, "nll": raw})
    metrics = scores.metrics("accuracy")
    # A loss is the negated score: means of levels change their sign exactly.
    for name in ("average", "learning_accuracy"):
        mirrored = scores.metrics("nll")[name]
        assert metrics[name] == (None if mirrored is None else -mirrored)
    assert "nll" in LOWER_IS_BETTER
    for terms in scores.per_task("accuracy").values():
        if terms["forgetting"] is not None and terms["backward_transfer"] is not None:
            assert terms["forgetting"] >= -terms["backward_transfer"] - 1e-12
    if num_stages == 1:
        assert metrics["forgetting"] is None
        assert metrics["backward_transfer"] is None


# What others' own tests give to their metrics, and what they expect of them: rows are experiences, columns tasks.
AVALANCHE = [[1.0, 0.0, 0.0], [0.5, 0.8, 1.0], [0.2, 1.0, 0.5]]
AVALANCHE_IN_PARTS = [[1.0, 0.0, 0.0], [0.5, 0.8, 1.0], [0.5, 0.5, 1.0], [0.2, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("rows", "homes", "expected"),
    [
        (AVALANCHE, (1, 2, 3), (0.8, -0.2, None)),
        (AVALANCHE[:2], (1, 2, None), (0.5, None, None)),
        (AVALANCHE_IN_PARTS, (1, 2, 4), (0.8, -0.2, None)),
        (AVALANCHE_IN_PARTS[:3], (1, 2, None), (0.5, 0.3, None)),
    ],
)
def test_forgetting_of_avalanche_is_minus_our_backward_transfer(rows, homes, expected):
    terms = matrix([[None] * 3, *rows], homes=homes).per_task("accuracy")
    for task, drop in zip(TASKS, expected, strict=True):
        known = None if drop is None else pytest.approx(drop)
        assert terms[task]["forgetting"] == known
        assert terms[task]["backward_transfer"] == (None if drop is None else pytest.approx(-drop))


def test_a_drop_from_1_to_04_is_a_forgetting_of_06_in_avalanche_and_here():
    terms = matrix([[None], [1.0], [0.4]], homes=(1,)).per_task("accuracy")["a"]
    assert (terms["forgetting"], terms["backward_transfer"]) == (pytest.approx(0.6), pytest.approx(-0.6))


def test_forgetting_of_avalanche_starts_from_the_own_stage_and_ours_from_the_best_row():
    terms = matrix([[None] * 3, [0.5, 0.1, 0.1], [0.9, 0.8, 0.1], [0.4, 0.8, 0.9]]).per_task("accuracy")["a"]
    assert terms["forgetting"] == pytest.approx(0.9 - 0.4)
    assert -terms["backward_transfer"] == pytest.approx(0.5 - 0.4)  # theirs


def test_forward_transfer_of_avalanche_is_ours():
    # Theirs is told 1 before training and 0.4 before the task's own experience, and expects -0.6.
    terms = matrix([[0.0, 1.0], [0.9, 0.4], [0.9, 0.9]], homes=(1, 2)).per_task("accuracy")
    assert terms["b"]["forward_transfer"] == pytest.approx(-0.6)


def test_the_code_of_gem_divides_by_all_tasks_where_its_paper_and_we_leave_one_out():
    # The last task cannot be forgotten and the first has no row before it: the code counts a 0 for each.
    ours, tasks = matrix(GOLDEN).metrics("accuracy"), 3
    assert ours["average"] == pytest.approx((0.5 + 0.7 + 0.85) / 3)
    assert ours["backward_transfer"] * (tasks - 1) / tasks == pytest.approx((0.5 - 0.8 + 0.7 - 0.9 + 0.0) / 3)
    assert ours["forward_transfer"] * (tasks - 1) / tasks == pytest.approx((0.0 + 0.2 - 0.1 + 0.3 - 0.1) / 3)
