"""English prose that Python carries: `docstrings` of its standard library; `pydocs` adds the topics of `help()`."""

import ast
import inspect
import re
import warnings
from collections.abc import Iterator

from holdfast.data.documents import Document, LocalSource, SourceContext, digest, normalise
from holdfast.data.sources import stdlib
from holdfast.registry import datasets

DOCUMENT_CHARACTERS = 3000  # docstrings of one module are joined up to about this length
RUN = 8  # words that no two paragraphs of `docstrings` share
SHORTEST = 40  # characters; shorter docstrings are hardly prose


@datasets.register("pydocs", help="text: English prose that Python itself carries (no download)")
class PyDocs(LocalSource):
    """Documentation prose, deterministic for a given Python."""

    name = "pydocs"
    kind = "text"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train",)

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        seen: set[str] = set()  # topics contain each other, and classes share docstrings; one copy is enough
        yield from _topics(seen)
        files = stdlib.files()
        for index, path in enumerate(files):
            name = stdlib.name_of(path)
            context.fraction = (index + 1) / len(files)
            text = None if name.startswith("pydoc_data/") else stdlib.source_of(path)
            for number, prose in enumerate(_joined(_docstrings(text or "", seen))):
                yield Document(id=f"{name}:{number}", text=prose, group=name)

    def fingerprint(self, context: SourceContext) -> str:  # noqa: ARG002
        return "pydocs-1-" + stdlib.fingerprint()


@datasets.register("docstrings", help="text: the docstrings of Python's standard library (no download)")
class Docstrings(LocalSource):
    """Documentation prose in which nothing is said twice, so that no held-out text is in the training part.

    The help topics of `pydocs` are left out: `pycode` has them too, as strings in a source file.
    """

    name = "docstrings"
    kind = "text"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train",)

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        seen: set[str] = set()
        runs: set[bytes] = set()
        files = stdlib.files()
        for index, path in enumerate(files):
            name = stdlib.name_of(path)
            context.fraction = (index + 1) / len(files)
            docstrings = _docstrings(stdlib.source_of(path) or "", seen)
            paragraphs = (part for prose in docstrings for part in prose.split("\n\n") if _says_new(part, runs))
            for number, prose in enumerate(_joined(paragraphs)):
                yield Document(id=f"{name}:{number}", text=prose, group=name)

    def fingerprint(self, context: SourceContext) -> str:  # noqa: ARG002
        return "docstrings-1-" + stdlib.fingerprint()


def _says_new(paragraph: str, runs: set[bytes]) -> bool:
    """Whether none of a paragraph's runs of eight words came up before; its own are added."""
    words = re.findall(r"\w+", paragraph.lower())
    own = {digest(" ".join(words[start : start + RUN])) for start in range(len(words) - RUN + 1)}
    new = runs.isdisjoint(own)
    runs |= own
    return new


def _topics(seen: set[str]) -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name, text in sorted(topics.items()):
        paragraphs = (paragraph for paragraph in text.split("\n\n") if _is_new(paragraph, seen))
        for number, prose in enumerate(_joined(paragraphs)):
            yield Document(id=f"topic/{name}:{number}", text=prose, group=f"topic/{name}")


def _docstrings(source: str, seen: set[str]) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings are none of our business
        try:
            tree = ast.parse(source)
        except SyntaxError:  # templates that only look like Python
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            prose = ast.get_docstring(node, clean=False)
            if prose is None or len(prose) < SHORTEST:
                continue
            prose = inspect.cleandoc(prose)
            if _is_new(prose, seen):
                yield prose


def _is_new(text: str, seen: set[str]) -> bool:
    key = normalise(text)
    if key in seen:
        return False
    seen.add(key)
    return True


def _joined(paragraphs: Iterator[str]) -> Iterator[str]:
    batch: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if not paragraph.strip():
            continue
        batch.append(paragraph.strip("\n"))
        size += len(paragraph)
        if size >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(batch)
            batch, size = [], 0
    if batch:
        yield "\n\n".join(batch)
