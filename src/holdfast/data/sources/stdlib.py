"""The standard library as a corpus: its source files, without tests and without what is installed beside it."""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip"}
SKIPPED |= {"encodings", "__phello__"}  # copies that are nearly the same


@cache
def files() -> tuple[Path, ...]:
    """All source files, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in _walk(root) if path.stat().st_size > 0)
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in SKIPPED and not path.name.startswith(("config-", ".")):
                yield from _walk(path)
        elif path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path


def name_of(path: Path) -> str:
    """A file's name inside the library, such as `json/decoder.py`."""
    return path.relative_to(sysconfig.get_path("stdlib")).as_posix()


def source_of(path: Path) -> str | None:
    """The text of a file; None for the few that are not utf-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


@cache
def fingerprint() -> str:
    """Changes with the names and sizes of the files, that is with the version of Python."""
    digest = hashlib.sha256()
    for path in files():
        digest.update(f"{name_of(path)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:32]
