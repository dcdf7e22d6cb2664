"""The shape of the code: imports point one way, functions fit a screen, nothing depends on this machine."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION = 60
LONGEST_FILE = 700

# The layers, lowest first: a module imports from its own layer and from lower ones.
LAYERS = [
    {"errors", "types"},
    {"config", "conversion", "registry", "execution"},
    {"curriculum", "data", "models", "methods", "objectives", "optim", "evaluation", "tracking"},
    {"training"},
    {"analysis", "studies"},
    {"report", "results", "cluster", "cli", "notebook", "__main__"},
]
# One file each, registered by name: `training` asks the registry for them.
PLUGINS = ("data/sources", "tracking/sinks")


def layer(module: str) -> int:
    """The layer of a dotted module of the package."""
    part = module.split(".")[1]
    return next(index for index, names in enumerate(LAYERS) if part in names)


def module_name(path: Path) -> str:
    """The dotted name of a source file.

    >>> module_name(PACKAGE / "data" / "__init__.py")
    'holdfast.data'
    """
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, at any depth, also `importlib.import_module("name")`."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def upward(path: Path, names: list[str]) -> list[str]:
    """The imports of a file that point to a higher layer."""
    module = module_name(path)
    if module == "holdfast":
        return []  # the package's front door exports from everywhere
    inside = [name for name in names if name.startswith("holdfast.") and not name.startswith("holdfast.__")]
    return [name for name in inside if layer(name) > layer(module)]


def is_plugin(name: str) -> bool:
    """Whether an imported name is, or is in, the file of one dataset, task or sink."""
    for folder in PLUGINS:
        head, _, rest = name.partition(f"holdfast.{folder.replace('/', '.')}.")
        if not head and rest and (PACKAGE / folder / f"{rest.split('.')[0]}.py").exists():
            return True
    return False


def parsed() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_part_of_the_package_has_a_layer() -> None:
    known = set().union(*LAYERS)
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES} - {"__init__", "__main__"}
    assert parts <= known, f"give these a layer in LAYERS: {sorted(parts - known)}"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{shown(path)} imports {name}" for path, tree in parsed() for name in upward(path, [*imports(tree, path)])
    ]
    assert not wrong, "\n".join(wrong)


def test_training_knows_no_particular_plugin() -> None:
    wrong = [
        f"{shown(path)} imports {name}"
        for path, tree in parsed()
        if "training" in path.parts
        for name in imports(tree, path)
        if is_plugin(name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("data/plan.py", "from holdfast.training import loop", ["holdfast.training.loop"]),
        ("data/plan.py", "def f():\n    import holdfast.cli.run", ["holdfast.cli.run"]),
        ("data/plan.py", "from ..training.step import go", ["holdfast.training.step.go"]),
        ("data/__init__.py", "from ..report import page", ["holdfast.report.page"]),
        ("data/plan.py", "from .. import training", ["holdfast.training"]),
        ("data/plan.py", "from holdfast import report", ["holdfast.report"]),
        ("data/plan.py", "importlib.import_module('holdfast.training.loop')", ["holdfast.training.loop"]),
        ("data/plan.py", "from holdfast.models import decoder\nfrom holdfast.config import field", []),
        ("data/plan.py", "from holdfast import __version__", []),
        ("config.py", "if x:\n    from holdfast.data.sampling import Sampling", ["holdfast.data.sampling.Sampling"]),
        ("errors.py", "import holdfast.config", ["holdfast.config"]),
    ],
)
def test_the_import_test_itself_sees(file: str, code: str, found: list[str]) -> None:
    path = PACKAGE / file
    assert upward(path, [*imports(ast.parse(code), path)]) == found


def test_functions_fit_a_screen_and_files_stay_short() -> None:
    wrong = [
        f"{shown(path)}:{node.lineno} {node.name}: {length} lines"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    wrong += [
        f"{shown(path)}: {lines} lines"
        for path in SOURCES
        if (lines := path.read_text(encoding="utf-8").count("\n")) > LONGEST_FILE
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_unpickled_and_nothing_private_is_imported() -> None:
    wrong = [
        f"{shown(path)} imports {name}"
        for path, tree in parsed()
        for name in imports(tree, path)
        if name.split(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"} or "._src" in name
    ]
    assert not wrong, "\n".join(wrong)


def test_no_machine_paths() -> None:
    # Home folders and absolute paths of one machine; /tmp and /usr/share are the same everywhere.
    machine = re.compile(r"""(?<![\w.$~}/])/(?:home|root|Users|work|mnt|opt)/\w""")
    folders = ("src", "tests", "benchmarks", "examples", "docs", "tools", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a work tree
    wrong = []
    for path in files:
        if path.suffix not in {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".html", ".js", ".css", ""}:
            continue
        if {"__pycache__", "out"} & set(path.parts) or path == Path(__file__):
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong += [f"{shown(path)}:{n} {line.strip()}" for n, line in enumerate(lines, 1) if machine.search(line)]
    assert not wrong, "\n".join(wrong)
