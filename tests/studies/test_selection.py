"""Which configuration is chosen: the most kept among those that learn, against plain training that learns as much."""

import numpy as np
import pytest

from holdfast.studies.selection import LEARNS_LESS, Plain, best

RATES = {"0.001": (1.0, 3.0), "0.01": (2.0, 2.0), "0.1": (4.0, 1.0)}  # old and new loss of plain


def plain(margin: float = 0.0) -> Plain:
    old, new = np.array([*RATES.values()]).T
    return Plain(tuple((float(rate), 4.0, 1.0) for rate in RATES), new[None], old[None], margin)


def gain(old: float, new: float, margin: float = 0.0) -> float:
    return plain(margin).gain(np.array([new]), np.array([old]))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (2.0, 2.0, 0.0),
        (1.5, 2.0, 0.5),
        (3.0, 1.5, 0.0),
        (1.0, 0.5, 3.0),  # learns more than every plain run: compared where plain learns most
        (1.0, 3.5, LEARNS_LESS - 3.5),
    ],
)
def test_gain_is_measured_where_plain_learns_as_much(old: float, new: float, expected: float) -> None:
    assert gain(old, new) == pytest.approx(expected)


def test_a_margin_lets_plain_learn_a_little_less() -> None:
    assert gain(2.0, 2.0, 0.5) == pytest.approx(-0.5)


def row(
    arm: str, rate: str, old: float, new: float, strength: str = "", steps: str = "4", **more: str
) -> dict[str, str]:
    given = {"arm": arm, "seed": "0", "learning_rate": rate, "old": f"{old}", "new": f"{new}", "strength": strength}
    return {**given, "steps": steps, "task": "a", "bytes": "", **more}


def rows(*arms: dict[str, str]) -> list[dict[str, str]]:
    return [row("before", "", 0.5, 4.0, steps="0"), *(row("plain", rate, *ends) for rate, ends in RATES.items()), *arms]


def test_the_best_is_not_the_one_that_forgets_least_by_learning_nothing() -> None:
    shy, bold, lazy = (row("x", "0.1", *ends) for ends in ((1.9, 2.0, "1"), (2.5, 1.2, "2"), (0.5, 3.9, "9")))
    assert best(rows(shy, bold, lazy), "x", [0]) == ("0.1", "2")


def test_where_none_learns_the_one_that_learns_most_is_taken() -> None:
    assert best(rows(row("x", "0.1", 0.6, 3.9, "1"), row("x", "0.1", 0.7, 3.5, "2")), "x", [0]) == ("0.1", "2")


def test_early_stops_of_plain_are_part_of_its_frontier() -> None:
    arms = [row("x", "0.1", 1.9, 2.0, "1"), row("x", "0.1", 2.6, 1.5, "2")]
    assert best(rows(*arms), "x", [0]) == ("0.1", "2")
    early = row("plain", "0.1", 2.0, 1.5, steps="2")  # stopped early, plain keeps more than the second there
    assert best(rows(*arms, early), "x", [0]) == ("0.1", "1")


def test_nothing_is_chosen_while_runs_are_missing() -> None:
    assert best(rows(row("x", "0.1", 1.0, 2.0)), "x", [0, 1]) is None
    assert best(rows(), "x", [0]) is None


def test_documents_weigh_as_many_as_they_have_bytes_and_early_rows_do_not_count() -> None:
    documents = ((1.0, "a", "1"), (3.0, "b", "3"))
    split = [row("x", "0.1", old, 2.0, "1", document=name, bytes=size) for old, name, size in documents]
    early = row("x", "0.1", 0.0, 0.0, "1", steps="2")
    other = row("x", "0.1", 2.4, 2.0, "2")
    assert best(rows(*split, early, other), "x", [0]) == ("0.1", "2")


def test_several_tasks_count_by_what_plain_loses_of_each() -> None:
    def both(arm: str, rate: str, a: float, b: float, new: float, **more: str) -> list[dict[str, str]]:
        return [row(arm, rate, old, new, task=task, **more) for task, old in (("a", a), ("b", b))]

    told = both("before", "", 1.0, 1.0, 4.0, steps="0") + both("plain", "0.01", 1.0, 1.0, 3.0)
    told += both("plain", "0.1", 2.0, 11.0, 1.0)
    told += both("x", "0.1", 1.5, 11.0, 1.0, strength="1") + both("x", "0.1", 2.0, 8.0, 1.0, strength="2")
    assert best(told, "x", [0]) == ("0.1", "1")
