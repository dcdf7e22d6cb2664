"""`pycode`: the source files of Python's standard library, one document a file."""

from collections.abc import Iterator

from holdfast.data.documents import Document, LocalSource, SourceContext
from holdfast.data.sources import stdlib
from holdfast.registry import datasets


@datasets.register("pycode", help="text: the source of Python's standard library (no download)")
class PyCode(LocalSource):
    """Python source, deterministic for a given Python."""

    name = "pycode"
    kind = "text"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train",)

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        files = stdlib.files()
        for index, path in enumerate(files):
            text = stdlib.source_of(path)
            context.fraction = (index + 1) / len(files)
            if text:
                # The group is the file, as in `pydocs`, so that both hold out the same files.
                yield Document(id=stdlib.name_of(path), text=text, group=stdlib.name_of(path))

    def fingerprint(self, context: SourceContext) -> str:  # noqa: ARG002
        return "pycode-1-" + stdlib.fingerprint()
