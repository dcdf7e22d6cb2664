"""Sweeps: values, combinations, names that compare groups, and mistakes."""

import pytest

from holdfast.cluster.sweep import members
from holdfast.errors import UserError
from holdfast.execution.names import check_name
from holdfast.report.groups import common_name


def test_without_axes_there_is_one_run() -> None:
    (only,) = members("x", [])
    assert (only.name, only.overrides) == ("x", ())


def test_all_combinations_with_their_overrides() -> None:
    found = members("x", ["stages.1.beta=0,0.5", "training.fade.per_boundary_overlap=[0.1, 0.2],[0.3,0.4]"])
    assert [member.overrides for member in found] == [
        ("stages/1/beta=0", "training/fade/per_boundary_overlap=[0.1, 0.2]"),
        ("stages/1/beta=0", "training/fade/per_boundary_overlap=[0.3,0.4]"),
        ("stages/1/beta=0.5", "training/fade/per_boundary_overlap=[0.1, 0.2]"),
        ("stages/1/beta=0.5", "training/fade/per_boundary_overlap=[0.3,0.4]"),
    ]
    for member in found:
        check_name(member.name, "name")
    assert len({member.name for member in found}) == 4


def test_seeds_come_last_and_share_a_name() -> None:
    names = [member.name for member in members("x", ["training/seed=1,12", "optimization/lr=0.1"])]
    assert names == ["x-lr=0.1-s1", "x-lr=0.1-s12"]
    assert common_name([names[0], "x-lr=0.1-s2"]) == "x-lr=0.1 (2 seeds)"


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        (["training/seed"], "expected path=value"),
        (["training/seed="], "expected path=value"),
        (["=1,2"], "expected path=value"),
        (["training/seed=1,,2"], "expected path=value"),
        (["training/seed=1,1"], "stands there twice"),
        (["training/seed=1", "training.seed=2"], "given twice"),
        (["data/root=a/b,a//b"], "two runs would be called x-root=a.b"),
        (["data/root=" + "long" * 30], "the name of a run"),
    ],
)
def test_mistakes_are_told(axes: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        members("x", axes)
