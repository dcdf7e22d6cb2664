"""What is installed: public names with docstrings, extras by name, one version, every file in the wheel."""

import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import holdfast
from fake_runs import FakeRun
from holdfast.cli.app import app
from holdfast.cli.configure import open_preset
from holdfast.errors import UserError, require_package
from holdfast.report import write_report
from holdfast.tracking import TrackingConfig

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PARTS = ("data", "evaluation", "execution", "methods", "models", "optim", "report", "tracking", "training")


@pytest.mark.parametrize("package", ["holdfast", *(f"holdfast.{part}" for part in PARTS)])
def test_every_public_name_is_there_and_says_what_it_is(package: str) -> None:
    module = importlib.import_module(package)
    silent = []
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isroutine(found):
            silent += [f"{name}{part}" for part in undocumented(found)]
        elif isinstance(found, ModuleType) and not found.__doc__:
            silent.append(name)
    assert not silent


def undocumented(found: Any) -> list[str]:
    """The public parts of a class or function that have no docstring, their own or that of what they override."""
    parts = [] if inspect.getdoc(found) else [""]
    if inspect.isclass(found) and found.__module__.startswith("holdfast"):
        own = {name: part for name, part in vars(found).items() if not name.startswith("_")}
        called = {
            name: part for name, part in own.items() if callable(part) or isinstance(part, property | classmethod)
        }
        parts += [f".{name}" for name in called if not inspect.getdoc(getattr(found, name))]
    return parts


def test_the_version_stands_in_one_place() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert holdfast.__version__
    mentions = [path for path in (ROOT / "src").rglob("*.py") if f'"{PROJECT["version"]}"' in path.read_text()]
    assert not mentions


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["jobs"]
        called |= set(re.findall(r"run: make ([a-z-]+)", text))
    assert {"package", "site"} <= called <= targets


def test_the_examples_of_the_quickstart_are_its_presets() -> None:
    for example, preset in (("plain", "quickstart-plain"), ("holdfast", "quickstart")):
        text, _, _ = open_preset(preset)
        assert (ROOT / "examples" / "quickstart" / f"{example}.yaml").read_text(encoding="utf-8") == text


def test_every_file_that_the_code_reads_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    package = ROOT / "src" / "holdfast"
    packed = {path for pattern in settings["package-data"]["holdfast"] for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == packed


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the optional packages."""
    names = ("matplotlib", "starlette", "uvicorn", "mlflow", "trackio")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))


def test_a_command_that_needs_an_extra_names_it(bare: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["board", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "holdfast board: the package starlette is not installed" in str(done.exception)
    assert "pip install 'holdfast[board]'" in str(done.exception)
    assert {"board", "figures", "mlflow", "trackio"} <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_a_tracker_without_its_package_is_refused(bare: None, tracker: str) -> None:
    with pytest.raises(UserError, match=rf"holdfast\[{tracker}\].*take {tracker} out of logging/trackers"):
        TrackingConfig(trackers=[tracker]).sink_names()


def test_a_report_without_matplotlib_has_its_page_and_svg_files(bare: None, tmp_path: Path, capsys: Any) -> None:
    path = write_report(FakeRun(tmp_path, stages=2, probes=False).go().path)
    assert path.is_file()
    kinds = {each.suffix for each in (tmp_path / "figures").iterdir()}
    assert kinds == {".svg"}
    assert "pip install 'holdfast[figures]'" in capsys.readouterr().err


def test_a_package_that_is_there_is_no_mistake() -> None:
    require_package("json", "figures", "anything")
