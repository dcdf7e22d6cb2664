"""Builds wheel and sdist into dist/, checks them, and tries the wheel in an environment of its own.

python tools/check_package.py                      # with this Python
python tools/check_package.py --python python3.13  # the environment is of another one

The environment has the wheel and what it depends on, none of the sources: `holdfast --help`, a short `quickstart` in an
empty folder, `report`, and a command that needs an extra, which says so.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LARGEST_WHEEL = 2_000_000  # bytes
SHORT = [
    "training.batch_size=4",
    *(f"stages.{index}.tokens=1024" for index in range(4)),
    "training.validation_steps=8",
    "eval.limit=8",
    "architecture.n_embd=32",
    "architecture.n_head=2",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    arguments = parser.parse_args()
    wheel = build()
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, arguments.python, Path(folder))
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, works alone")


def build() -> Path:
    """Wheel and sdist, made anew and checked; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # what setuptools left there would come along
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], quiet=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    size = wheel.stat().st_size
    assert size < LARGEST_WHEEL, f"{wheel.name}: {size:,} bytes, expected less than {LARGEST_WHEEL:,}"
    return wheel


def try_wheel(wheel: Path, python: str, folder: Path) -> None:
    """Install a wheel where nothing else is and use it, offline as far as it knows."""
    run([python, "-m", "venv", str(folder / "environment")])
    binaries = folder / "environment" / "bin"
    pip = [str(binaries / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
    run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)])
    empty = folder / "empty"
    empty.mkdir()
    holdfast = str(binaries / "holdfast")
    run([holdfast, "--help"], empty, quiet=True)
    run([holdfast, "--version"], empty)
    run([holdfast, "quickstart", *SHORT], empty, quiet=True)
    group = empty / "runs" / "general" / "quickstart"
    assert (group / "compare.html").is_file()
    run([holdfast, "report", str(group / "holdfast")], empty)
    assert (group / "holdfast" / "report.html").is_file()
    assert list((group / "holdfast" / "figures").glob("*.svg"))
    refused = subprocess.run([holdfast, "board"], cwd=empty, env=environment(), capture_output=True, text=True)
    assert refused.returncode == 2, refused
    assert "pip install 'holdfast[board]'" in refused.stderr, refused.stderr


def environment() -> dict[str, str]:
    """Of a user who has neither the sources nor a network: a proxy that is not there turns every request away."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HOLDFAST_DATA")}
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return {**kept, **dead, "HF_HUB_OFFLINE": "1", "XLA_FLAGS": ""}


def run(command: list[str], folder: Path | None = None, *, quiet: bool = False) -> None:
    """Run a command and say how long it took; what it printed is shown where it fails, or unless it is quiet."""
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment() if folder else {**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    named = [Path(part).name if os.sep in part else part for part in command]
    print(f"$ {' '.join(named)}  ({time.monotonic() - started:.1f} s)", flush=True)
    if done.returncode or not quiet:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}")


if __name__ == "__main__":
    main()
