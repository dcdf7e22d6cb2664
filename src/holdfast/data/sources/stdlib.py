"""`pycode`: the source files of the standard library, without tests and without what is installed beside it."""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from holdfast.data.documents import Document, LocalSource, SourceContext
from holdfast.registry import datasets

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


@datasets.register("pycode", help="text: the source of Python's standard library (no download)")
class PyCode(LocalSource):
    """Python source, deterministic for a given Python."""

    name = "pycode"
    kind = "text"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train",)

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        paths = files()
        for index, path in enumerate(paths):
            text = source_of(path)
            context.fraction = (index + 1) / len(paths)
            if text:
                # The group is the file, as in `pydocs`, so that both hold out the same files.
                yield Document(id=name_of(path), text=text, group=name_of(path))

    def fingerprint(self, context: SourceContext) -> str:  # noqa: ARG002
        return "pycode-1-" + fingerprint()
