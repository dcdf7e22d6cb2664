"""Which configuration is chosen: the most kept among those that learn, against plain training that learns as much."""

from holdfast.studies.results import rows_of
from holdfast.studies.verdict import choose

RATES = {"0.001": (1.0, 3.0), "0.01": (2.0, 2.0), "0.1": (4.0, 1.0)}  # old and new loss of plain


def row(
    arm: str, rate: str, old: float, new: float, strength: str = "", steps: str = "4", **more: str
) -> dict[str, str]:
    given = {"arm": arm, "seed": "0", "learning_rate": rate, "old": f"{old}", "new": f"{new}", "strength": strength}
    return {**given, "steps": steps, "task": "a", "document": "", "bytes": "", **more}


def rows(*arms: dict[str, str]) -> list[dict[str, str]]:
    return [row("before", "", 0.5, 4.0, steps="0"), *(row("plain", rate, *ends) for rate, ends in RATES.items()), *arms]


def best(records: list[dict[str, str]]) -> tuple[float, str]:
    """Learning rate and strength of what is chosen, by one seed and by two."""
    chosen = choose(rows_of(records))["x"]
    again = choose(rows_of([{**record, "seed": seed} for seed in ("0", "1") for record in records]))["x"]
    assert (again.rate, again.strength) == (chosen.rate, chosen.strength)
    return chosen.rate, chosen.strength


def test_the_best_is_not_the_one_that_forgets_least_by_learning_nothing() -> None:
    shy, bold, lazy = (row("x", "0.1", *ends) for ends in ((1.9, 2.0, "1"), (2.5, 1.2, "2"), (0.5, 3.9, "9")))
    assert best(rows(shy, bold, lazy)) == (0.1, "2")


def test_where_none_learns_the_one_that_learns_most_is_taken() -> None:
    assert best(rows(row("x", "0.1", 0.6, 3.9, "1"), row("x", "0.1", 0.7, 3.5, "2"))) == (0.1, "2")


def test_early_stops_of_plain_are_part_of_its_frontier() -> None:
    arms = [row("x", "0.1", 1.9, 2.0, "1"), row("x", "0.1", 2.6, 1.5, "2")]
    assert best(rows(*arms)) == (0.1, "2")
    early = row("plain", "0.1", 2.0, 1.5, steps="2")  # stopped early, plain keeps more than the second there
    assert best(rows(*arms, early)) == (0.1, "1")


def test_documents_weigh_as_many_as_they_have_bytes_and_early_rows_do_not_count() -> None:
    def split(*ends: object, a: float, b: float) -> list[dict[str, str]]:
        documents = ((a, "a", "1"), (b, "b", "3"))
        return [{**row(*ends[:2], old, *ends[2:]), "document": name, "bytes": size} for old, name, size in documents]

    told = split("before", "", 4.0, "", "0", a=0.5, b=0.5)
    for rate, (old, new) in RATES.items():
        told += split("plain", rate, new, a=old, b=old)
    told += split("x", "0.1", 2.0, "1", a=1.0, b=3.0) + split("x", "0.1", 2.0, "2", a=2.4, b=2.4)
    told += split("x", "0.1", 0.0, "1", "2", a=0.0, b=0.0)
    assert best(told) == (0.1, "2")


def test_several_tasks_count_by_what_plain_loses_of_each() -> None:
    def both(arm: str, rate: str, a: float, b: float, new: float, **more: str) -> list[dict[str, str]]:
        return [row(arm, rate, old, new, task=task, **more) for task, old in (("a", a), ("b", b))]

    told = both("before", "", 1.0, 1.0, 4.0, steps="0") + both("plain", "0.01", 1.0, 1.0, 3.0)
    told += both("plain", "0.1", 2.0, 11.0, 1.0)
    told += both("x", "0.1", 1.5, 11.0, 1.0, strength="1") + both("x", "0.1", 2.0, 8.0, 1.0, strength="2")
    assert best(told) == (0.1, "1")
