"""Preparation: read a split of a source once, tokenise it, publish a store; killed at any instant, it goes on.

Tokens and records are appended to two files; a journal says how much of both is durable. After a kill the
files are cut back to the journal's last line, the source is read again up to there without tokenising, and
the rest is appended: the finished store does not depend on where, or how often, the work was interrupted.
"""

import contextlib
import copy
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.data import store
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, Source, SourceContext, broken_lines, held_out_fraction, read
from holdfast.data.encode import Encoded, batches, encode_all
from holdfast.data.progress import Progress
from holdfast.data.sources import find_source
from holdfast.data.store import FORMAT, RECORD, Prepared
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import ConfigError, RunError, UserError
from holdfast.execution.files import sync
from holdfast.execution.storage import unreachable

STREAM_TOKENS = 1_000_000_000  # taken from an endless stream unless data/max_tokens says otherwise
JOURNAL_SECONDS = 2.0  # between two commits: at most this much work is lost by a kill
ENOUGH_ROWS = 1000  # read before the share of broken rows is judged


@dataclass(frozen=True)
class _Job:
    """One store to be made: which documents, with which tokenizer, and where it goes."""

    source: Source
    split: str
    data: DataConfig
    tokenizer: Tokenizer
    max_documents: int | None
    max_tokens: int | None
    fingerprint: str
    identity: dict[str, Any]

    @property
    def path(self) -> Path:
        name = f"{self.source.name}-{self.split}-{self.fingerprint[:16]}"
        return store.stores_folder(self.data.cache_path()) / name


def prepare(source_name: str, split: str, *, data: DataConfig, tokenizer: Tokenizer, progress: bool = True) -> Prepared:
    """The prepared store of a split, made now unless the cache has it.

    Args:
        source_name: a name in `data/sources`, a registered dataset, or a folder under `data/root`.
        split: `train` or `validation` (held out when the source has none), or another of its splits.
        progress: whether to show progress on stderr.
    """
    job = _job(source_name, split, data, tokenizer)
    if not job.path.exists():
        try:
            job.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "data/cache", str(data.cache_path()), "a folder that can be written", str(error)
            ) from None
        with _kept_if_refused(job), store.lock(job.path, lambda: _say_waiting(job, progress)):
            if not job.path.exists():
                _make(job, progress)
    prepared = Prepared.open(job.path)
    ledger = prepared.ledger
    if "rows" in ledger:  # stores of the first days do not say of how many rows the broken ones are
        _judge(job, ledger["broken"], ledger["rows"], last=not ledger["stopped_at_max_tokens"])
    return prepared


@contextlib.contextmanager
def _kept_if_refused(job: _Job) -> Iterator[None]:
    """End with one line where the disk refuses to take more; the journal says what it has taken."""
    try:
        yield
    except OSError as error:
        elsewhere = error.filename and not Path(error.filename).is_relative_to(job.data.cache_path())
        reason = unreachable(error)
        if reason is None or elsewhere:
            raise
        what = f"{job.source.name}/{job.split}"
        raise RunError(
            f"data/cache {job.data.cache_path()}: {reason}; what was prepared of {what} is kept: mend the disk or "
            "choose another data/cache, and the same command goes on"
        ) from error


def find_prepared(source_name: str, split: str, *, data: DataConfig, tokenizer: Tokenizer) -> Prepared | None:
    """The prepared store of a split if the cache has it; nothing is made."""
    path = _job(source_name, split, data, tokenizer).path
    return Prepared.open(path) if path.exists() else None


def _job(source_name: str, split: str, data: DataConfig, tokenizer: Tokenizer) -> _Job:
    source = find_source(source_name, data)
    context = SourceContext(data)
    own = data.sources.get(source.name)
    max_documents = (own and own.max_documents) or data.max_documents
    max_tokens = (own and own.max_tokens) or data.max_tokens
    streamed = source.streamed(context)
    if streamed and max_tokens is None and max_documents is None:
        max_tokens = STREAM_TOKENS
    held_out = None
    if "validation" not in source.splits(context) and not streamed:
        held_out = held_out_fraction(source, data)
    identity = {
        "format": FORMAT,
        "source": source.name,
        "split": split,
        "kind": source.kind,
        "source_fingerprint": source.fingerprint(context),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "options": {"max_documents": max_documents, "max_tokens": max_tokens, "validation_fraction": held_out},
    }
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return _Job(source, split, data, tokenizer, max_documents, max_tokens, fingerprint, identity)


def _make(job: _Job, progress: bool) -> None:
    folder = store.partial_path(job.path)
    folder.mkdir(exist_ok=True)
    if not (folder / store.LEDGER).exists():
        saved = _save_tokenizer(job)
        context = SourceContext(job.data)
        try:
            with _Parts(folder, job) as parts, Progress(f"{job.source.name}/{job.split}", progress) as bar:
                _fill(job, parts, context, saved, bar)
        except UserError:
            shutil.rmtree(folder)  # the user will change something: what was done is of no use
            raise
        if parts.documents == 0:
            shutil.rmtree(folder)
            raise UserError(_nothing(job, context))
        store.finish(folder, _ledger(job, parts, context), job.tokenizer.token_bytes())
    for name in ("journal", "documents.bin"):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    folder.rename(job.path)
    sync(job.path.parent)
    if progress:
        _say_broken(job)


def _fill(job: _Job, parts: "_Parts", context: SourceContext, saved: Path, bar: Progress) -> None:
    """Append what is missing; stops at the limits and at too many broken rows."""
    seen: list[tuple[dict[str, Any], int]] = []  # broken rows, and all rows, before each batch that is under way

    def rows() -> int:
        return context.documents + context.broken.total

    def watched() -> Iterator[list[Document]]:
        documents = itertools.islice(read(job.source, job.split, context), job.max_documents)
        done = sum(1 for _ in itertools.islice(documents, parts.documents))
        bar.begin(done, context.fraction)
        for batch in batches(documents):
            report = copy.deepcopy(context.broken.report())
            _judge(job, report, rows(), last=False)
            seen.append((report, rows()))
            yield batch

    stopped = False
    for encoded in encode_all(watched(), job.tokenizer, job.data.workers, saved):
        before = seen.pop(0)
        stopped = parts.append(encoded)
        bar.update(parts.documents, parts.tokens, context.fraction)
        if stopped:
            parts.report, parts.rows = before  # rows that were read ahead of the limit are nobody's business
            break
    if not stopped:
        parts.report, parts.rows = context.broken.report(), rows()
        _judge(job, parts.report, parts.rows, last=True)
    parts.stopped = stopped
    bar.update(parts.documents, parts.tokens, 1.0, last=True)


def _judge(job: _Job, report: dict[str, Any], rows: int, *, last: bool) -> None:
    """Refuse too large a share of broken rows; before the last row, only once enough were read."""
    broken = sum(report["counts"].values())
    if broken <= job.data.max_broken * rows or (not last and rows < ENOUGH_ROWS):
        return
    lines = "\n".join("  " + line for line in broken_lines(report))
    raise UserError(
        f"data/max_broken: {broken} of {rows} rows of {job.source.name}/{job.split} are broken, more than "
        f"the allowed share {job.data.max_broken:g}; mend them or raise data/max_broken\n{lines}"
    )


class _Parts:
    """The files that a preparation appends to, and the journal of how much of them is durable."""

    def __init__(self, folder: Path, job: _Job) -> None:
        self._folder = folder
        self._limit = job.max_tokens
        self._width = job.tokenizer.dtype().itemsize
        self.documents = self.tokens = self.bytes = 0
        self.report: dict[str, Any] = {}
        self.rows = 0  # read, broken ones and both sides of a division among them
        self.stopped = False
        self._committed = time.monotonic()

    def __enter__(self) -> "_Parts":
        for line in _whole_lines(self._folder / "journal"):
            self.documents, self.tokens, self.bytes = json.loads(line)
        self._journal = (self._folder / "journal").open("ab")
        self._tokens = _open_at(self._folder / "tokens.bin", self.tokens * self._width)
        self._records = _open_at(self._folder / "documents.bin", self.documents * RECORD.itemsize)
        return self

    def append(self, encoded: Encoded) -> bool:
        """Append a batch; True when the limit of tokens is reached and some of it was left out."""
        flat, records = encoded
        stopped = False
        if self._limit is not None and self.tokens + len(flat) > self._limit:
            ends = records["length"].cumsum(dtype="int64")
            kept = int((self.tokens + ends <= self._limit).sum())
            records, flat, stopped = records[:kept], flat[: ends[kept - 1] if kept else 0], True
        self._tokens.write(flat.tobytes())
        self._records.write(records.tobytes())
        self.documents += len(records)
        self.tokens += len(flat)
        self.bytes += int(records["bytes"].sum(dtype="int64"))
        if time.monotonic() - self._committed > JOURNAL_SECONDS:
            self.commit()
        return stopped

    def commit(self) -> None:
        """Make all that was appended durable, then say so in the journal."""
        for file in (self._tokens, self._records):
            file.flush()
            os.fsync(file.fileno())
        self._journal.write(json.dumps([self.documents, self.tokens, self.bytes]).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._committed = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self.commit()
        for file in (self._tokens, self._records, self._journal):
            file.close()


def _whole_lines(path: Path) -> list[bytes]:
    """The journal's lines; a torn last one was never promised, and is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.splitlines()


def _open_at(path: Path, size: int) -> io.BufferedWriter:
    file = path.open("ab")
    file.truncate(size)
    return file


def _ledger(job: _Job, parts: _Parts, context: SourceContext) -> dict[str, Any]:
    tokenizer = job.tokenizer
    return job.identity | {
        "fingerprint": job.fingerprint,
        "documents": parts.documents,
        "tokens": parts.tokens,
        "bytes": parts.bytes,
        "dtype": tokenizer.dtype().dtype.str,
        "broken": parts.report,
        "rows": parts.rows,
        "stopped_at_max_tokens": parts.stopped,
        "held_out_from_train": "validation" not in job.source.splits(context),
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "pad_id": tokenizer.pad_id,
        },
    }


def tokenizer_folder(cache: Path, fingerprint: str) -> Path:
    """Where a cache keeps a copy of the tokenizer that some of its stores were made with."""
    return cache / "tokenizers" / fingerprint


def _save_tokenizer(job: _Job) -> Path:
    folder = tokenizer_folder(job.data.cache_path(), job.tokenizer.fingerprint)
    job.tokenizer.save(folder)
    return folder


def _nothing(job: _Job, context: SourceContext) -> str:
    what = f"dataset {job.source.name}: its split {job.split!r} has no usable document"
    if job.identity["options"]["validation_fraction"] is not None:
        return f"{what}; raise or lower data/validation_fraction, or add a validation file"
    if job.max_tokens is not None:
        return f"{what} within {job.max_tokens} tokens; raise max_tokens"
    return "\n".join([f"{what}; check its files", *context.broken.lines()])


def _say_waiting(job: _Job, progress: bool) -> None:
    if progress:
        print(f"prepare {job.path.name}: another process is at it; waiting", file=sys.stderr, flush=True)


def _say_broken(job: _Job) -> None:
    ledger = Prepared.open(job.path).ledger
    if ledger["broken"]["counts"]:
        print(f"{job.source.name}/{job.split}: broken rows were left out:", file=sys.stderr)
        print("\n".join("  " + line for line in broken_lines(ledger["broken"])), file=sys.stderr)
