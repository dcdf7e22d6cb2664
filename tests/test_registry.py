"""Plug-ins by name: registration, lazy targets, messages, and users' own modules."""

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import registry
from holdfast.errors import UserError
from holdfast.registry import PLUGIN_HINT, Registry, load_plugins

APPLE, PEAR = object(), object()


@dataclass(frozen=True)
class Options:
    rows: int = 1


@pytest.fixture
def fruits() -> Registry[Any]:
    made: Registry[Any] = Registry("fruit")
    made.register("apple", config=Options, help="round")(APPLE)
    made.register("pear", config=Options)(PEAR)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path whose modules are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_register_returns_what_it_decorates_and_get_finds_it() -> None:
    fruits: Registry[Any] = Registry("fruit")

    @fruits.register("apple")
    def apple() -> int:
        return 3

    assert apple() == 3
    assert fruits.get("apple") is apple
    assert "apple" in fruits
    assert "pear" not in fruits
    assert list(fruits) == ["apple"]


def test_names_are_sorted_and_configs_are_listed_once(fruits: Registry[Any]) -> None:
    assert fruits.names() == ["apple", "pear"]
    assert fruits.configs() == [Options]
    assert fruits.config("apple") is Options
    assert (fruits.help("apple"), fruits.help("pear")) == ("round", "")


def test_a_name_that_is_taken_raises_and_the_first_stays(fruits: Registry[Any]) -> None:
    with pytest.raises(ValueError, match="fruit 'apple' is registered already"):
        fruits.register("apple")(PEAR)
    with pytest.raises(ValueError, match="registered already"):
        fruits.lazy("apple", "math:pi")
    assert fruits.get("apple") is APPLE


def test_an_unknown_name_is_a_user_error_with_path_nearest_and_all(fruits: Registry[Any]) -> None:
    with pytest.raises(UserError) as caught:
        fruits.get("aple", path="training/fruit")
    expected = "training/fruit: there is no fruit 'aple'; did you mean 'apple'? known: apple, pear; "
    assert str(caught.value) == expected + PLUGIN_HINT
    with pytest.raises(UserError, match="known: none"):
        Registry[Any]("vegetable").get("leek")


def test_lazy_targets_are_imported_when_asked_for(folder: Path, fruits: Registry[Any]) -> None:
    (folder / "orchard_of_test.py").write_text("plum = object()\n")
    fruits.lazy("plum", "orchard_of_test:plum", help="blue")
    assert fruits.help("plum") == "blue"
    assert "orchard_of_test" not in sys.modules
    first = fruits.get("plum")
    assert first is sys.modules["orchard_of_test"].plum
    assert fruits.get("plum") is first


def test_builtin_modules_load_at_the_first_question_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "builtin_of_test.py").write_text(
        "from holdfast import registry\nregistry.test_instance.register('kiwi')(print)\n"
    )
    made: Registry[Any] = Registry("fruit", ("builtin_of_test",))
    monkeypatch.setattr(registry, "test_instance", made, raising=False)
    assert "builtin_of_test" not in sys.modules
    assert made.names() == ["kiwi"]
    assert made.get("kiwi") is print


def test_a_builtin_that_fails_to_import_fails_every_time(folder: Path) -> None:
    (folder / "broken_of_test.py").write_text("raise RuntimeError('broken')\n")
    made: Registry[Any] = Registry("fruit", ("broken_of_test",))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            made.names()


def test_a_plugin_module_registers_without_a_fork(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.datasets, "_entries", dict(registry.datasets._entries))
    (folder / "own_of_test.py").write_text(
        "from holdfast.registry import datasets\ndatasets.register('mine-of-test', help='my own')(print)\n"
    )
    load_plugins(["own_of_test"])
    assert registry.datasets._entries["mine-of-test"].target is print


@pytest.mark.parametrize("module", ["no_such_module_of_test", "no_such_module_of_test.inner"])
def test_a_plugin_that_does_not_exist_is_a_user_error(module: str) -> None:
    with pytest.raises(UserError, match=f"--plugin {module}: no such module"):
        load_plugins([module])


@pytest.mark.parametrize("module", ["", ".relative", "a-b", "folder/file.py"])
def test_a_plugin_that_is_no_module_name_is_a_user_error(module: str) -> None:
    with pytest.raises(UserError, match="not the dotted name of a module"):
        load_plugins([module])


def test_a_module_that_a_plugin_itself_misses_is_not_hidden(folder: Path) -> None:
    (folder / "needy_of_test.py").write_text("import no_such_module_of_test\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_test"):
        load_plugins(["needy_of_test"])


def test_entry_points_of_installed_packages_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Point:
        module = "points"

        def load(self) -> None:
            loaded.append("point")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [Point()] if "holdfast" in group else [])
    load_plugins([])
    assert loaded == ["point"]


def test_every_kind_has_its_own_instance() -> None:
    assert len({id(kind) for kind in registry.KINDS.values()}) == len(registry.KINDS)
    assert list(registry.KINDS) == [
        "jobs", "models", "families", "datasets", "evaluations", "optimizers", "schedules", "penalties", "methods",
        "probes", "trackers",
    ]  # fmt: skip
