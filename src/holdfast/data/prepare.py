"""Preparation: read a split of a source once, tokenise it, publish a store; killed at any instant, it goes on.

Tokens and records are appended to two files; a journal says how much of both is durable. After a kill the
files are cut back to the journal's last line, the source is read again up to there without tokenising, and
the rest is appended: the finished store does not depend on where, or how often, the work was interrupted.
"""

import contextlib
import copy
import functools
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.data import shards, store
from holdfast.data.checksums import PieceSums
from holdfast.data.config import DataConfig, check_dataset_name
from holdfast.data.documents import SPLITS, Document, Source, SourceContext, broken_lines, held_out_fraction, read
from holdfast.data.encode import Encoded, batches, encode_all
from holdfast.data.mapped import note_files
from holdfast.data.progress import Progress
from holdfast.data.shards import Portions, Shard
from holdfast.data.sources import find_source
from holdfast.data.sources.tokens import TokenSource
from holdfast.data.store import FORMAT, RECORD, DamagedStore, TokenStore
from holdfast.data.token_files import Choice, Found, copy_ids, index_files
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import ConfigError, RunError, UserError
from holdfast.execution.files import sync
from holdfast.execution.storage import remedy, unreachable
from holdfast.types import Json

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
    identity: Json

    @property
    def path(self) -> Path:
        name = f"{self.source.name}-{self.split}-{self.fingerprint[:16]}"
        return store.stores_folder(self.data.cache_path()) / name


def prepare(
    source_name: str, split: str, *, data: DataConfig, tokenizer: Tokenizer, progress: bool = True
) -> TokenStore:
    """The prepared store of a split, made now unless the cache has it.

    Args:
        source_name: a name in `data/sources`, a registered dataset, or a folder under `data/root`.
        split: `train` or `validation` (held out when the source has none), or another of its splits.
        progress: whether to show progress on stderr.
    """
    job = _job(source_name, split, data, tokenizer)
    if not job.path.exists():
        _make_parent(job)
        with _kept_if_refused(job), store.lock(job.path, lambda: _say_waiting(job, progress)):
            if not job.path.exists():
                _make(job, progress)
    prepared = _opened(job, progress)
    ledger = prepared.ledger
    if "rows" in ledger:  # stores of the first days do not say of how many rows the broken ones are
        _judge(job, ledger["broken"], ledger["rows"], last=not ledger["stopped_at_max_tokens"])
    return prepared


def _make_parent(job: _Job) -> None:
    try:
        job.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cache = str(job.data.cache_path())
        raise ConfigError("data/cache", cache, "a folder that can be written", str(error)) from None


def _opened(job: _Job, progress: bool) -> TokenStore:
    """The published store; it is made again as soon as some of it turns out to be damaged."""

    def mend(what: str) -> TokenStore:
        return _made_again(job, what, progress)

    try:
        found = _published(job, mend)
    except DamagedStore as error:
        found = mend(error.what)
        found.mend = mend
    if not found.can_be_checked:
        _say_unchecked(job.path.parent)
    return found


def _published(job: _Job, mend: store.Mend | None = None) -> TokenStore:
    files = None
    if isinstance(job.source, TokenSource) and not job.source.packed:
        files = job.source.files[job.split if job.split in job.source.files else "train"]
        note_files(job.path, files)
    found = TokenStore.open(job.path, mend, files)
    if found.fingerprint != job.fingerprint:
        raise DamagedStore(job.path, f"its ledger is that of {found.name}/{found.split} {found.fingerprint[:16]}")
    return found


def _made_again(job: _Job, what: str, progress: bool) -> TokenStore:
    """A store in the place of a damaged one, which is kept until that is done."""
    with _kept_if_refused(job), store.lock(job.path, lambda: _say_waiting(job, progress)):
        with contextlib.suppress(DamagedStore):
            found = _published(job)
            found.check()
            return found  # another process was faster
        print(f"{job.path}: the store is damaged: {what}; it is made again", file=sys.stderr, flush=True)
        with store.set_aside(job.path):
            try:
                _make(job, progress)
            except UserError as error:
                raise UserError(f"{job.path}: damaged ({what}), and it cannot be made again: {error}") from None
    return _published(job)


@functools.cache
def _say_unchecked(folder: Path) -> None:
    """Once in a process: stores of the previous version have no checksums."""
    print(
        f"{folder}: some stores were made before there were checksums and cannot be checked for damage; "
        "`holdfast data remove NAME` lets them be made again",
        file=sys.stderr,
        flush=True,
    )


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
        mend = remedy(reason)
        if mend == "mend the disk":
            mend += " or choose another data/cache"
        raise RunError(
            f"data/cache {job.data.cache_path()}: {reason}; what was prepared of {what} is kept: {mend}, and the same "
            "command goes on"
        ) from error


def find_prepared(source_name: str, split: str, *, data: DataConfig, tokenizer: Tokenizer) -> TokenStore | None:
    """The prepared store of a split if the cache has it; nothing is made."""
    job = _job(source_name, split, data, tokenizer)
    return _published(job) if job.path.exists() else None


def _job(source_name: str, split: str, data: DataConfig, tokenizer: Tokenizer) -> _Job:
    source = find_source(source_name, data)
    check_dataset_name(source.name)
    check_dataset_name(split, f"dataset {source.name}, split")
    context = SourceContext(data, tokenizer)
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
        context = SourceContext(job.data, job.tokenizer)
        try:
            with Progress(f"{job.source.name}/{job.split}", progress) as bar:
                if isinstance(job.source, TokenSource):
                    _index(job, job.source, folder, context, bar)
                else:
                    _tokenise(job, folder, context, saved, bar)
        except UserError:
            shutil.rmtree(folder)  # the user will change something: what was done is of no use
            raise
    for name in ("journal", "documents.bin"):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    folder.rename(job.path)
    sync(job.path.parent)
    Portions(job.path, job.tokenizer.dtype).remove()
    if progress:
        _say_broken(job)


def _tokenise(job: _Job, folder: Path, context: SourceContext, saved: Path, bar: Progress) -> None:
    with _Parts(folder, job) as parts:
        _fill(job, parts, context, saved, bar)
    if parts.documents == 0:
        raise UserError(_nothing(job, context))
    store.finish(folder, _ledger(job, parts, context), job.tokenizer.token_bytes(), parts.token_sums)


def _index(job: _Job, source: TokenSource, folder: Path, context: SourceContext, bar: Progress) -> None:
    """A store of ids that exist already: nothing is tokenised, and nothing but packed ids is written again."""
    held_out = job.identity["options"]["validation_fraction"] if job.split in SPLITS else None
    choice = Choice(held_out, job.split, job.max_documents, job.max_tokens)
    layout = source.layout(job.split if held_out is None else "train", job.tokenizer, folder)
    found = index_files(folder, source.name, layout, job.tokenizer, choice, bar)
    if found.documents == 0:
        raise UserError(_nothing(job, context))
    ledger = _ledger(job, found, context) | {"dtype": layout.dtype}
    if source.packed:
        copy_ids(folder, layout)
    else:
        ledger["files"] = found.files
    store.finish(folder, ledger, job.tokenizer.token_bytes())
    for note in found.notes:
        print(f"{source.name}/{job.split}: {note}", file=sys.stderr, flush=True)


def _fill(job: _Job, parts: "_Parts", context: SourceContext, saved: Path, bar: Progress) -> None:
    """Append what is missing; stops at the limits and at too many broken rows."""
    seen: list[tuple[Json, int]] = []  # broken rows, and all rows, before each batch that is under way

    def rows() -> int:
        return context.documents + context.broken.total

    def watched() -> Iterator[list[Document] | Encoded]:
        portions, done, position = Portions(job.path, job.tokenizer.dtype), parts.documents, 0
        for number, batch in enumerate(batches(_documents(job, context))):
            position += len(batch)
            if position <= done:
                bar.begin(done, context.fraction)
                continue
            report = copy.deepcopy(context.broken.report())
            _judge(job, report, rows(), last=False)
            seen.append((report, rows()))
            left = batch[-(position - done) :]  # a journal of another version may end inside a batch
            known = portions.batch(number, len(left))  # some job of several has tokenised it
            yield left if known is None else known

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


def _documents(job: _Job, context: SourceContext) -> Iterator[Document]:
    return itertools.islice(read(job.source, job.split, context), job.max_documents)


def prepare_shard(
    source_name: str, split: str, shard: Shard, *, data: DataConfig, tokenizer: Tokenizer, progress: bool = True
) -> TokenStore | None:
    """Tokenise what is one job's of a split; the store, if all of it is there now, made by whoever comes last."""
    job = _job(source_name, split, data, tokenizer)
    if not job.path.exists():
        _make_parent(job)
        if isinstance(job.source, TokenSource):  # nothing is tokenised, one job is enough
            whole = shard.has(job.path.name, 0)
        else:
            title = f"{job.source.name}/{job.split} shard {shard}"
            with _kept_if_refused(job), Progress(title, progress) as bar:
                whole = _fill_share(job, shard, bar)
        if not whole:
            return None
    return prepare(source_name, split, data=data, tokenizer=tokenizer, progress=progress)


def _fill_share(job: _Job, shard: Shard, bar: Progress) -> bool:
    """Make the portions of one job that are missing; whether all that the store needs are there."""
    context, portions = SourceContext(job.data, job.tokenizer), Portions(job.path, job.tokenizer.dtype)
    numbers: deque[int] = deque()  # the portions of the batches that are under way
    count, ended, own_tokens = 0, False, 0

    def enough() -> bool:
        limit = job.max_tokens
        return limit is not None and (own_tokens > limit or portions.prefix_tokens() > limit)

    def own() -> Iterator[list[Document]]:
        nonlocal count, ended, own_tokens
        mine = False
        for number, batch in enumerate(batches(_documents(job, context))):
            portion, place = divmod(number, shards.PORTION)
            if place == 0:
                if job.path.exists() or enough():
                    return
                made = portions.load(portion) if shard.has(job.path.name, portion) else []
                mine = shard.has(job.path.name, portion) and not made
                own_tokens += sum(len(encoded.flat) for encoded in made)
                count = portion + 1
            _judge(job, context.broken.report(), context.documents + context.broken.total, last=False)
            if mine:
                numbers.append(portion)
                yield batch
        ended = True

    parts: dict[int, list[Encoded]] = {}  # one at a time: the next begins when it is whole
    for encoded in encode_all(own(), job.tokenizer, job.data.workers, _save_tokenizer(job)):
        number = numbers.popleft()
        for before in [each for each in parts if each != number]:
            portions.write(before, parts.pop(before))
        parts.setdefault(number, []).append(encoded)
        own_tokens += len(encoded.flat)
        bar.update(sum(len(each.records) for each in parts[number]), own_tokens, context.fraction)
    for number, made in parts.items():
        portions.write(number, made)
    if job.path.exists():
        portions.remove()  # somebody made the store meanwhile
        return True
    return enough() if not ended else all(portions.num_tokens(number) is not None for number in range(count))


def _judge(job: _Job, report: Json, rows: int, *, last: bool) -> None:
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
        self._has_mask = job.source.kind == store.CHAT
        self._width = job.tokenizer.dtype().itemsize
        self.documents = self.tokens = self.bytes = 0
        self.token_sums, self.record_sums, self.mask_sums = PieceSums(), PieceSums(), PieceSums()
        self.report: Json = {}
        self.rows = 0  # read, broken ones and both sides of a division among them
        self.stopped = False
        self._committed = time.monotonic()

    def __enter__(self) -> "_Parts":
        tokens, records = self._folder / "tokens.bin", self._folder / "documents.bin"
        try:
            self._go_on(_whole_lines(self._folder / "journal"), tokens, records)
        except (FileNotFoundError, ValueError, TypeError):
            self._begin_anew()
        self._journal = (self._folder / "journal").open("ab")
        self._tokens = _open_at(tokens, self.tokens * self._width)
        self._records = _open_at(records, self.documents * RECORD.itemsize)
        self._files = [self._tokens, self._records]
        if self._has_mask:
            self._mask = _open_at(self._folder / store.LOSS_MASK, self.tokens)
            self._files.append(self._mask)
        return self

    def _go_on(self, lines: list[bytes], tokens: Path, records: Path) -> None:
        """Take up what the journal's last line says; a ValueError where the files are not what it noted."""
        if not lines:
            return
        self.documents, self.tokens, self.bytes, *noted = json.loads(lines[-1])
        self.token_sums = PieceSums.of(tokens, self.tokens * self._width)
        self.record_sums = PieceSums.of(records, self.documents * RECORD.itemsize)
        if self._has_mask:
            self.mask_sums = PieceSums.of(self._folder / store.LOSS_MASK, self.tokens)
        if noted and noted != self._sums():  # the version before noted none
            raise ValueError("the files are not as they were written")

    def _sums(self) -> list[int]:
        counts = json.dumps([self.documents, self.tokens, self.bytes]).encode()
        masks = [self.mask_sums.total()] if self._has_mask else []
        return [self.token_sums.total(), self.record_sums.total(), zlib.crc32(counts), *masks]

    def _begin_anew(self) -> None:
        """What a killed preparation left is not what it wrote: none of it is used."""
        print(f"{self._folder}: what was prepared before is damaged; it is made again", file=sys.stderr, flush=True)
        (self._folder / "journal").unlink(missing_ok=True)
        self.documents = self.tokens = self.bytes = 0
        self.token_sums, self.record_sums, self.mask_sums = PieceSums(), PieceSums(), PieceSums()

    def append(self, encoded: Encoded) -> bool:
        """Append a batch; True when the limit of tokens is reached and some of it was left out."""
        flat, records, mask = encoded
        stopped = False
        if self._limit is not None and self.tokens + len(flat) > self._limit:
            ends = records["length"].cumsum(dtype="int64")
            kept = int((self.tokens + ends <= self._limit).sum())
            records, flat, stopped = records[:kept], flat[: ends[kept - 1] if kept else 0], True
        parts = [
            (flat.tobytes(), self._tokens, self.token_sums),
            (records.tobytes(), self._records, self.record_sums),
        ]
        if mask is not None:
            parts.append((mask[: len(flat)].tobytes(), self._mask, self.mask_sums))
        for content, file, sums in parts:
            file.write(content)
            sums.update(content)
        self.documents += len(records)
        self.tokens += len(flat)
        self.bytes += int(records["bytes"].sum(dtype="int64"))
        if time.monotonic() - self._committed > JOURNAL_SECONDS:
            self.commit()
        return stopped

    def commit(self) -> None:
        """Make all that was appended durable, then say so in the journal."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self._journal.write(json.dumps([self.documents, self.tokens, self.bytes, *self._sums()]).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._committed = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self.commit()
        for file in (*self._files, self._journal):
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


def _ledger(job: _Job, parts: _Parts | Found, context: SourceContext) -> Json:
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
    ledger = TokenStore.open(job.path).ledger
    if ledger["broken"]["counts"]:
        print(f"{job.source.name}/{job.split}: broken rows were left out:", file=sys.stderr)
        print("\n".join("  " + line for line in broken_lines(ledger["broken"])), file=sys.stderr)
