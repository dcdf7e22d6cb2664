"""A dataset of rows with named fields, from local files or from the hub, by one template."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.data.config import DataConfig, check_dataset_name
from holdfast.data.documents import Document, SourceContext
from holdfast.data.sources.chats import Chats
from holdfast.data.sources.files import (
    BY_ENDING,
    Reading,
    Row,
    batched_rows,
    file_hash,
    format_of,
    read_files,
    split_files,
)
from holdfast.data.sources.templates import BrokenRowError, Template
from holdfast.errors import UserError
from holdfast.types import Json

READER = 1  # changes when the same files would give other documents
HUB_SECONDS = 10.0  # to find out whether the hub answers
CSV_READER = 2  # the same for csv, which was read otherwise before
ANY_ENDING = "{jsonl,json.gz,parquet,csv,txt,arrow}"

Files = dict[str, list[Path]]  # the files of each split


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub."""

    name: str
    config: str | None = None
    revision: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "validation": "validation"})
    stream: bool = False  # read as far as needed and never downloaded whole


def root_files(name: str, data: DataConfig) -> Files:
    """The files of a dataset under `data/root`."""
    check_dataset_name(name)
    root = data.root_path()
    if root is None:
        return {}
    found = {split: split_files(root / name, split) for split in ("train", "validation", "test")}
    return {split: paths for split, paths in found.items() if paths}


@dataclass(frozen=True)
class TableSource:
    """Rows of files, or else of the hub, as documents.

    Args:
        files: finds the local files by split; without any, the hub is asked.
        reading: how they are read, where their endings do not say.
    """

    name: str
    template: Template | Chats
    hub: Hub | None = None
    files: Callable[[str, DataConfig], Files] = root_files
    reading: Reading = BY_ENDING

    @property
    def kind(self) -> str:
        return self.template.kind

    def streamed(self, context: SourceContext) -> bool:
        return self.hub is not None and self.hub.stream and not self.files(self.name, context.data)

    def splits(self, context: SourceContext) -> tuple[str, ...]:
        local = self.files(self.name, context.data)
        return tuple(local or (self.hub.splits if self.hub else ("train",)))

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:
        document = self.template.reader(context)
        for row in self._rows(split, context):
            try:
                yield document(row.fields, f"{row.file}:{row.line}")
            except BrokenRowError as fault:
                context.broken.add(fault.kind, row.file, row.line, fault.detail)

    def _rows(self, split: str, context: SourceContext) -> Iterator[Row]:
        local = self.files(self.name, context.data)
        if split in local:
            return read_files(local[split], self.reading, context)
        if local or self.hub is None or split not in self.hub.splits:
            raise UserError(f"dataset {self.name}: there is no split {split!r}; wanted: {self._wanted(split, context)}")
        return self._hub_rows(split, context)

    def _wanted(self, split: str, context: SourceContext) -> str:
        root = context.data.root_path()
        folder = f"{root}/{self.name}" if root else f"DATA/{self.name} with data/root (or HOLDFAST_DATA) set to DATA"
        local = f"the file {split}.{ANY_ENDING} in {folder}"
        if self.hub is None:
            return local
        config = f" (config {self.hub.config})" if self.hub.config else ""
        return f"{local}, or the dataset {self.hub.name}{config} of the Hugging Face hub"

    def _hub_rows(self, split: str, context: SourceContext) -> Iterator[Row]:
        assert self.hub is not None
        rows, total = load_hub(self.hub, split, f"dataset {self.name}: wanted {self._wanted(split, context)}")
        for number, fields in enumerate(batched_rows(rows), 1):
            if total:
                context.fraction = number / total
            yield Row(fields, f"{self.hub.name}/{self.hub.splits[split]}", number)

    def fingerprint(self, context: SourceContext) -> str:
        local = self.files(self.name, context.data)
        if not local:
            origin: Any = self.hub
        else:
            cache = context.data.cache_path()
            hashes = {split: [file_hash(path, cache) for path in paths] for split, paths in sorted(local.items())}
            origin = (hashes, self.reading.format, self.reading.sample_by)
            if self.reading.delimiter is not None or self.reading.encodings:
                origin = (*origin, self.reading.delimiter, self.reading.encodings)
            kinds = {self.reading.format or format_of(path) for paths in local.values() for path in paths}
            if kinds & {"csv", "tsv"}:
                origin = (*origin, CSV_READER)
        return f"{READER} {self.template.fingerprint_of(context)} {origin}"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Make both libraries look into their caches alone, as HF_HUB_OFFLINE=1 does when it is set beforehand."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def load_hub(hub: Hub, split: str, wanted: str) -> tuple[Any, int | None]:
    """The rows of a split on the hub and, unless streamed, how many there are.

    Args:
        wanted: what the message says when there is neither a network nor a copy in the local hub cache.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

    options: Json = {"split": hub.splits[split], "revision": hub.revision}
    try:
        # One short question first: `datasets` itself would ask for half a minute before it gives up.
        HfApi().dataset_info(hub.name, revision=hub.revision, timeout=HUB_SECONDS)
        reached = True
    except Exception:  # no network, offline mode, no such name: the library has a type for each
        reached = False
    try:
        if hub.stream:
            if not reached:
                raise ConnectionError("the hub does not answer, and a stream has no local copy")
            return load_dataset(hub.name, hub.config, streaming=True, **options), None
        with contextlib.nullcontext() if reached else _offline():
            rows = load_dataset(hub.name, hub.config, **options)
        return rows, len(rows)
    except Exception as error:  # see above
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{wanted}; no such local file was found, and the hub says: {reason}") from None
