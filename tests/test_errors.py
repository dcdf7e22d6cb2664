"""Messages name the path, the value, what was expected and the fix."""

import pytest

from holdfast.errors import ConfigError, RunError, UserError, unknown_key

KNOWN = ["training/batch_size", "training/seed", "training/fade/overlap", "optimization/lr", "optimization/kl/beta"]


def test_config_error_carries_its_parts_and_says_them() -> None:
    error = ConfigError("training/batch_size", -1, "at least 1", "set it to 32")
    assert (error.path, error.value, error.expected, error.fix) == (
        "training/batch_size", -1, "at least 1", "set it to 32",
    )  # fmt: skip
    assert str(error) == "training/batch_size: got -1, expected at least 1; set it to 32"
    assert str(ConfigError("a/b", "x", "a number")) == "a/b: got 'x', expected a number"


def test_long_values_are_cut() -> None:
    text = str(ConfigError("a/b", "x" * 10_000, "a number"))
    assert len(text) < 200
    assert "..." in text


def test_only_user_errors_are_user_errors() -> None:
    assert issubclass(ConfigError, UserError)
    assert not issubclass(RunError, UserError)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("training/batchsize", "training/batch_size"),
        ("trainin", "training"),
        ("training/lr", "optimization/lr"),
        ("training/overlap", "training/fade/overlap"),
        ("optimization/batch_sise", "training/batch_size"),
        ("training.batch_size", "training/batch_size"),
        ("beta", "optimization/kl/beta"),
    ],
)
def test_unknown_keys_suggest_the_nearest(typed: str, meant: str) -> None:
    message = str(unknown_key(typed, KNOWN))
    assert message == f"{typed}: unknown configuration key; did you mean {meant}?"


def test_an_unknown_key_like_nothing_else_says_where_all_are() -> None:
    assert "holdfast configure" in str(unknown_key("qqqq/zzzz", KNOWN))
