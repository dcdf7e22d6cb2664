"""The classes are those of the specification's pages: names, bases, fields with paths and defaults, methods."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.curriculum import FadeConfig
from holdfast.data.sampling import DatasetStyle, Sampling

ROOT = Path(__file__).resolve().parents[1]
SPEC = Path(os.environ.get("HOLDFAST_SHARED", ROOT.parent / "shared")) / "spec"
PAGES = ["training", "kl_divergence", "abcd"]
CLASS = re.compile(r"[A-Z]\w+(\(.*\))?")
METHOD = re.compile(r"[a-z_]\w*(\(.*\) -> .+|: \w+)")
pytestmark = pytest.mark.skipif(not SPEC.is_dir(), reason=f"{SPEC} is not there")


def declared(page: str) -> dict[str, list[str]]:
    """The classes of a page in its order, each with its own line, the line of its bases, and its methods' lines."""
    found: dict[str, list[str]] = {}
    lines = (SPEC / f"{page}.txt").read_text(encoding="utf-8").splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        headed = after in ("¶", "dataclass", "property", "staticmethod", "classmethod")
        if CLASS.fullmatch(line) and headed:
            found[line.partition("(")[0]] = [line]
        elif found and (line.startswith("Bases: ") or (METHOD.fullmatch(line) and headed)):
            found[list(found)[-1]].append(line)
    return found


def shown(page: str) -> dict[str, type]:
    """The classes that our page of the same name shows, in its order."""
    names = re.findall(r"^::: ([\w.]+)\.(\w+)$", (ROOT / "docs" / "api" / f"{page}.md").read_text(), re.MULTILINE)
    return {name: getattr(importlib.import_module(module), name) for module, name in names}


def arguments(signature: str) -> ast.arguments:
    (function,) = ast.parse(f"def {signature.partition(' -> ')[0]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def specified_fields(line: str) -> Iterator[tuple[str, str, str | None, Any]]:
    """Name, type, path and default of each field of a signature; a class inside has no path."""

    def field(path: str, default: Any = None, default_factory: Any = None) -> tuple[str, Any]:
        return path, default_factory() if default_factory else default

    names = {
        "field": field,
        "Sampling": Sampling,
        "DatasetStyle": DatasetStyle,
        "FadeConfig": lambda: (None, FadeConfig()),
    }
    found = arguments(line)
    for argument, default in zip(found.args, found.defaults, strict=True):
        assert argument.annotation is not None
        path, value = eval(compile(ast.Expression(default), line[:20], "eval"), names)  # the specification's own text
        yield argument.arg, ast.unparse(argument.annotation), path, value


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_classes_in_the_order_of_the_specification(page: str) -> None:
    wanted = list(declared(page))
    assert wanted
    assert [name for name in shown(page) if name in wanted] == wanted


@pytest.mark.parametrize("page", PAGES)
def test_every_field_has_the_type_the_path_and_the_default_of_the_specification(page: str) -> None:
    tried = 0
    for name, (line, *_) in declared(page).items():
        cls = shown(page)[name]
        if "field(" not in line:
            continue
        ours = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a config class
        for field, kind, path, default in specified_fields(line):
            item, tried = ours[field], tried + 1
            factory = item.default_factory
            value = item.default if factory is dataclasses.MISSING else factory()
            spelled = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
            spelled = re.sub(r"\b\w+\.", "", str(item.type)) if "[" in str(item.type) else spelled
            assert (field, spelled, item.metadata.get("path"), value) == (field, kind, path, default), name
    assert tried or page == "training"


@pytest.mark.parametrize("page", PAGES)
def test_bases_and_methods_are_those_of_the_specification(page: str) -> None:
    for name, (line, *rest) in declared(page).items():
        cls = shown(page)[name]
        for each in rest:
            if each.startswith("Bases: "):
                bases = re.findall(r"(\w+)(?:\[[^\]]*\])?", each.removeprefix("Bases: ").split(", Generic")[0])
                assert bases[0] in [base.__name__ for base in cls.__mro__[1:]], name
            elif "(" not in each:
                assert isinstance(inspect.getattr_static(cls, each.partition(":")[0]), property), each
            else:
                method, wanted = each.partition("(")[0], arguments(each)
                ours = inspect.signature(getattr(cls, method)).parameters
                called = [argument.arg for argument in wanted.args]
                positional = [key for key, value in ours.items() if value.kind in (0, 1) and key not in ("self", "cls")]
                assert positional[: len(called)] == called, f"{name}.{each}"
                first = len(wanted.args) - len(wanted.defaults)
                for argument, default in zip(wanted.args[first:], wanted.defaults, strict=True):
                    assert ours[argument.arg].default == ast.literal_eval(default), f"{name}.{each}"
                # What a caller of the specification leaves out must have a default here.
                extra = [ours[key] for key in positional[len(called) :]]
                assert all(value.default is not inspect.Parameter.empty for value in extra), f"{name}.{each}"
        if line.endswith("(spec: ExecutionSpec)"):
            assert next(key for key in inspect.signature(cls.__init__).parameters if key != "self") == "spec"


def test_the_specification_is_read_as_it_is_meant() -> None:
    found = declared("abcd")
    assert list(found) == ["FadeConfig", "ABCDBaseTrainer", "ABCDKLConfig", "ABCDKLDivergenceTrainer"]
    fields = {name: (kind, path, default) for name, kind, path, default in specified_fields(found["ABCDKLConfig"][0])}
    assert len(fields) == 21
    assert fields["betas"] == ("List[float]", "optimization/kl/betas", [0.0, 0.1, 0.1, 0.1, 0.1])
    assert fields["datasets"][2][0] == [Sampling(name="fineweb", rate=1, style=DatasetStyle.PMD)]
    assert "batch(slice: str = 'train') -> PyTree[np.ndarray]" in found["ABCDBaseTrainer"]
    assert len(declared("training")["BaseTrainer"]) == 13
