"""Alphas as they are written, and what is said of interpolations: front, best, the file."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UserError
from holdfast.evaluation.interpolations import FILE, Interpolation, Interpolations, parse_alphas, read_points

END = {"run": "runs/a", "checkpoint": "final", "step": 2, "tokens": 20}


def averages(
    *losses: tuple[float, float, float], old: tuple[str, ...] = ("a",), new: tuple[str, ...] = ("b",)
) -> Interpolations:
    points = tuple(
        Interpolation(
            alpha, {"a": {"nll": a, "bits_per_byte": a, "accuracy": 1 / a}, "b": {"nll": b, "bits_per_byte": b}}
        )
        for alpha, a, b in losses
    )
    return Interpolations(END, END, "same", old, new, points)


def test_alphas_are_sorted_and_dots_go_on() -> None:
    assert parse_alphas("0,0.1,...,1") == tuple(round(0.1 * index, 10) for index in range(11))
    assert parse_alphas("0,0.1,…,0.35") == (0.0, 0.1, 0.2, 0.3, 0.35)
    assert parse_alphas("1,0,0.5,1.0") == (0.0, 0.5, 1.0)
    assert parse_alphas("0, 0.5, ..., 1, 0.05") == (0.0, 0.05, 0.5, 1.0)
    assert [math.copysign(1, alpha) for alpha in parse_alphas("-0.0")] == [1.0]


@pytest.mark.parametrize(
    "text", ["", "a", "0,1.5", "-0.1", "nan", "inf", "0,,1", "0.5,...,1", "...,1", "1,0,...,0", "0,1,..."]
)
def test_bad_alphas_are_mistakes(text: str) -> None:
    with pytest.raises(UserError, match="alpha"):
        parse_alphas(text)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_any_alphas_come_back(values: list[float]) -> None:
    assert parse_alphas(",".join(map(repr, values))) == tuple(sorted({value + 0.0 for value in values}))


def test_the_best_has_the_highest_mean_of_old_and_new() -> None:
    found = averages((0.0, 1.0, 4.0), (0.5, 1.5, 2.5), (0.75, 3.5, 2.6), (1.0, 3.0, 2.0))
    assert found.judged_by() == "bits_per_byte"
    assert found.best("nll") == 0.5
    assert found.front("nll") == {0.0, 0.5, 1.0}
    equal = averages((0.0, 1.0, 2.0), (0.5, 2.0, 1.0))
    assert equal.best("nll") == 0.0
    assert averages((0.0, 1.0, 2.0)).judged("accuracy") == []  # b has none


def test_without_old_or_new_all_tasks_count() -> None:
    found = averages((0.0, 1.0, 2.0), (1.0, 1.0, 1.0), old=("a", "b"), new=())
    assert found.best("nll") == 1.0


def test_several_old_tasks_weigh_as_much_as_one_new() -> None:
    points = tuple(
        Interpolation(alpha, {"a": {"nll": a}, "b": {"nll": a}, "c": {"nll": c}})
        for alpha, a, c in ((0.0, 1.0, 4.0), (1.0, 2.0, 2.5))
    )
    assert Interpolations(END, END, "same", ("a", "b"), ("c",), points).best("nll") == 1.0


def test_the_file_goes_on_only_for_the_same_inputs(tmp_path: Path) -> None:
    found = averages((0.0, 1.0, 4.0), (1.0, 3.0, 2.0))
    found.write(tmp_path)
    assert read_points(tmp_path, "same") == found.points
    assert read_points(tmp_path, "other") == ()
    written = json.loads((tmp_path / FILE).read_text())
    assert (written["best"], written["measure"]) == (0.0, "bits_per_byte")
    assert [point["pareto"] for point in written["points"]] == [True, True]
    assert written["points"][0]["kept_old"] == -1.0
    (tmp_path / FILE).write_text("{")
    assert read_points(tmp_path, "same") == ()
