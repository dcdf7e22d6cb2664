"""What fits a declared type and what does not, and what is said about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional

import pytest

from config_examples import Colour, Train, message
from holdfast import config
from holdfast.config import configure, field, merge, read_yaml, schema
from holdfast.data.sampling import DatasetStyle, Sampling
from holdfast.errors import ConfigError

NONSENSE: list[Any] = ["nonsense", {"no": "sense"}, [[["no"]]], 1.5e300, True]


def fits(value: Any, entry: config.Entry) -> bool:
    """Whether a nonsense value happens to be a legal value of the field."""
    if isinstance(value, str):
        return entry.type in (str, Optional[str], int | str) and entry.choices is None
    if isinstance(value, bool):
        return entry.type is bool
    if isinstance(value, float):
        return entry.type in (float, int, Optional[int], int | str) and "le" not in entry.bounds
    return False


@pytest.mark.parametrize("path", list(schema(Train)))
@pytest.mark.parametrize("value", NONSENSE, ids=str)
def test_nonsense_at_any_path_is_named(path: str, value: Any) -> None:
    entry = schema(Train)[path]
    if fits(value, entry):
        merge([Train], {path: value})
    else:
        assert message({path: value}).startswith(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("path", ["optimization/lr", "training/batch_size", "training/fade/overlap"])
def test_numbers_that_are_not_finite_are_refused(number: float, path: str, tmp_path: Path) -> None:
    assert message({path: number}).startswith(f"{path}: got {number}")
    section, _, key = path.rpartition("/")
    (tmp_path / "x.yaml").write_text(
        f"{section}:\n  {key}: {'.nan' if number != number else str(number)[:-3] + '.inf'}\n"
    )
    assert message(read_yaml(tmp_path / "x.yaml")).startswith(path)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("training/batch_size", 0, ": got 0, expected a number of at least 1"),
        ("training/batch_size", 1.5, ": got 1.5, expected a whole number"),
        ("training/batch_size", True, ": got True, expected a whole number"),
        ("training/batch_size", None, ": got None, expected a whole number"),
        ("training/validation", "yes", ": got 'yes', expected true or false"),
        ("training/validation", 1, ": got 1, expected true or false"),
        ("training/label", 7, ": got 7, expected a text; put it in quotes"),
        ("training/label", False, ": got False, expected a text; put it in quotes"),
        ("training/label", "${oc.env:HOME}", ": got '${oc.env:HOME}', expected a text without ${"),
        ("training/tokens", [5, 0], "/1: got 0, expected a number of more than 0"),
        ("training/tokens", 5, ": got 5, expected a list (whole number each); write it as a list"),
        ("training/fade/overlap", 2, ": got 2.0, expected a number of at least 0 and at"),
        ("training/fade/curve", "linaer", ": got 'linaer', expected one of linear, cosine; d"),
        ("training/fade", 3, ": got 3, expected a section with keys below it"),
        ("training/colour", "BLUE", ": got 'BLUE', expected one of RED, DARK_GREEN"),
        ("training/kind", "c", ": got 'c', expected one of a, b"),
        ("training/either", [1], ": got [1], expected a whole number or a text"),
        ("optimization/pair", [1, 2, 3], ": got [1, 2, 3], expected a list of 2 values"),
        ("optimization/pair", [1.5, 2], "/0: got 1.5, expected a whole number"),
        ("optimization/table", {"a": -1}, "/a: got -1.0, expected a number of at least 0"),
        ("optimization/lr", 10**400, ": got 1000"),
        ("training/dataset", [[{"name": "x", "rate": "lots"}]], "/0/0/rate: got 'lots'"),
        ("training/dataset", [[{"name": "x", "rate": 2}]], "/0/0/rate: got 2.0, expected a share"),
        ("training/dataset", [[], [{"rate": 1}]], "/1/0: got {'rate': 1}, expected a mapping that"),
        (
            "training/dataset",
            [[{"name": "x", "rat": 1}]],
            "/0/0/rat: unknown configuration key; did you mean training/dataset/0/0/rate?",
        ),
        ("training/dataset", [["x"]], "/0/0: got 'x', expected a mapping with the keys name, rate"),
        ("training/batchsize", 3, ": unknown configuration key; did you mean training/batch_size?"),
        ("trainin", {"batch_size": 3}, ": unknown configuration key; did you mean training?"),
        ("optimization/batch_size", 3, ": unknown configuration key; did you mean training/b"),
        ("1", 2, ": unknown configuration key"),
    ],
)
def test_what_a_user_is_told(path: str, value: Any, said: str) -> None:
    assert message({path: value}).startswith(path + said)


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("training:\n  batch_size: 1e9\n  tokens: [1e9, 2_000]\noptimization: {lr: 3e-4}\n")
    made = configure(Train, merge([Train], read_yaml(tmp_path / "x.yaml")))
    assert (made.batch_size, made.tokens, made.lr) == (1_000_000_000, [1_000_000_000, 2000], 3e-4)
    assert isinstance(made.batch_size, int)


def test_enums_are_read_by_name_in_any_case() -> None:
    made = configure(
        Train, merge([Train], {"training": {"colour": "red", "dataset": [[{"name": "x", "style": "packed"}]]}})
    )
    assert made.colour is Colour.RED
    assert made.datasets == [[Sampling("x", 1.0, DatasetStyle.PACKED)]]


def test_bounds_inside_a_mapping_are_held() -> None:
    @dataclass(frozen=True)
    class Item:
        rows: int = field("rows", default=1, ge=1)

    @dataclass(frozen=True)
    class Outer:
        items: List[Item] = field("training/items", default_factory=list)

    with pytest.raises(ConfigError, match="training/items/0/rows: got 0"):
        merge([Outer], {"training": {"items": [{"rows": 0}]}})
