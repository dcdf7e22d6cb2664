"""What a fresh interpreter imports: help, lists and config errors do not wait for JAX."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.registry import KINDS

HEAVY = ["jax", "jaxlib", "flax", "optax", "orbax", "grain", "datasets", "pandas", "torch", "transformers", "wandb",
         "tensorboardX", "mlflow", "trackio", "matplotlib", "plotly", "scipy", "pyarrow",
         "huggingface_hub", "starlette", "uvicorn", "IPython"]  # fmt: skip
RUN_COMMAND = """
import sys
sys.argv = ["holdfast", *{arguments!r}]
from holdfast.cli import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
else:
    code = 0
"""


def fresh(code: str, cwd: Path) -> tuple[dict[str, object], str]:
    """Run code in a new interpreter; what it ended with and which heavy modules it imported, and its output."""
    report = f"""
import json, sys
print("\\n@" + json.dumps({{"code": code, "heavy": [name for name in {HEAVY} if name in sys.modules]}}))
"""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "code = 0\n" + code + "\n" + report],
        capture_output=True, text=True, cwd=cwd, env=environment, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "\n@" in done.stdout, done.stderr
    said, _, last = done.stdout.rpartition("\n@")
    return json.loads(last), said + done.stderr


def test_the_test_itself_sees_an_import(tmp_path: Path) -> None:
    ended, _ = fresh("sys = __import__('sys'); sys.modules['jax'] = sys; code = 3", tmp_path)
    assert ended == {"code": 3, "heavy": ["jax"]}


def test_importing_holdfast_imports_nothing_heavy(tmp_path: Path) -> None:
    assert fresh("import holdfast", tmp_path)[0] == {"code": 0, "heavy": []}


@pytest.mark.parametrize("module", ["config", "registry", "errors", "curriculum", "data.sampling"])
def test_modules_that_configs_are_made_of_import_nothing_heavy(module: str, tmp_path: Path) -> None:
    assert fresh(f"import holdfast.{module}", tmp_path)[0]["heavy"] == []


@pytest.mark.parametrize("kind", list(KINDS))
def test_listing_plugins_imports_nothing_heavy(kind: str, tmp_path: Path) -> None:
    ended, _ = fresh(f"from holdfast.registry import KINDS\nKINDS[{kind!r}].configs()", tmp_path)
    assert ended["heavy"] == []


@pytest.mark.parametrize("arguments", [["--help"], ["jobs"], ["run", "--help"], ["configure", "--help"]], ids=" ".join)
def test_commands_that_only_tell_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    ended, said = fresh(RUN_COMMAND.format(arguments=arguments), tmp_path)
    assert ended == {"code": 0, "heavy": []}, said
    assert said.strip()


def test_the_first_help_imports_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    libraries = ("omegaconf", "rich", "yaml", "numpy", "starlette", "uvicorn", "huggingface_hub")
    code = RUN_COMMAND.format(arguments=["--help"]) + f"code = [each for each in {libraries} if each in sys.modules]"
    assert fresh(code, tmp_path)[0] == {"code": [], "heavy": []}


def test_a_config_error_imports_nothing_heavy_and_writes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("job: gpt/train/pretrain\ntraining:\n  batch_size: nonsense\n")
    ended, said = fresh(RUN_COMMAND.format(arguments=["run", "x.yaml", "--name", "n"]), tmp_path)
    assert ended == {"code": 2, "heavy": []}, said
    assert "training/batch_size" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [config]
