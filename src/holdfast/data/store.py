"""The prepared store: a split of a source as flat tokens on disk, memory-mapped, never changed once published.

| file | what |
|---|---|
| `tokens.bin` | all ids end to end, uint16 or uint32, each document ended by the end-of-text id |
| `offsets.npy` | where each document starts, and where the last one ends |
| `prompt_lengths.npy` | how many tokens of each document are its prompt (0 for text) |
| `doc_bytes.npy` | utf-8 bytes of each document, prompt and answer |
| `keys.npy` | two 64-bit hashes a document: its normalised text or prompt, and its group |
| `loss_mask.bin` | chats alone: a byte for each token, 1 where the assistant says it |
| `token_bytes.npy` | how many bytes of text each id stands for |
| `ledger.json` | fingerprint, counts, tokenizer, options, the report of broken rows, checksums of every block |

Ids that a user brings as token files stay where they are: then `spans.npy` and `files.json` stand for `tokens.bin`
(`mapped.py`).

No block is used before it was compared with its checksum. A damaged store that `prepare` opened is made again in its
place; stores that were made before there were checksums are held to what is possible: ids, offsets and lengths.
"""

import contextlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from holdfast.data.checksums import Blocks, PieceSums, checksums
from holdfast.data.mapped import FILES, SPANS, MappedTokens, noted_files
from holdfast.errors import RunError, UserError
from holdfast.execution.files import locked, sync, write_json
from holdfast.execution.storage import unreachable
from holdfast.types import Json, JsonView

FORMAT = 1
LEDGER = "ledger.json"
RECORD = np.dtype(
    [("length", "<u4"), ("prompt", "<u4"), ("bytes", "<u4"), ("key", "<u8"), ("group", "<u8")]
)  # what preparation notes of each document
ARRAYS = ("offsets.npy", "prompt_lengths.npy", "doc_bytes.npy", "keys.npy", "token_bytes.npy")
LOSS_MASK = "loss_mask.bin"
CHAT = "chat"  # the kind of the stores that have one
CHUNK = 1 << 20  # documents converted at a time, so that memory stays bounded


class DamagedStore(UserError):  # noqa: N818 (what it says, not that it is an error, is the name)
    """A store that is not as it was written, and that nobody made again."""

    def __init__(self, path: Path, what: str) -> None:
        self.what = what
        super().__init__(f"{path}: a damaged store: {what}; `holdfast prepare CONFIG` and `run` make it again")


Mend = Callable[[str], "TokenStore"]  # what is damaged -> the store, made again


class TokenStore:
    """A published store, opened read-only.

    Args:
        mend: makes the store again once it turns out to be damaged; None raises DamagedStore.
        files: where the files are whose ids are read in place; None: where they were found last.
    """

    def __init__(self, path: Path, ledger: Json, mend: Mend | None = None, files: Sequence[Path] | None = None) -> None:
        self.path = path
        self.ledger = ledger
        self.mend = mend
        self._files = files
        self.name: str = ledger["source"]
        self.split: str = ledger["split"]
        self.kind: str = ledger["kind"]
        self.fingerprint: str = ledger["fingerprint"]
        self.num_documents: int = ledger["documents"]
        self.num_tokens: int = ledger["tokens"]
        self.num_bytes: int = ledger["bytes"]
        self._columns: dict[str, NDArray[Any]] = {}  # that were asked for
        self._lock = threading.Lock()  # rows are read by the loop and by the thread that prefetches
        self._mapped: MappedTokens | None = None
        if not self.in_place:
            self._map_own()
        self.token_bytes: NDArray[np.int32] = np.array(self._load("token_bytes.npy", "<i4", None))

    def _map_own(self) -> None:
        path = self.path / "tokens.bin"
        self._flat: NDArray[Any] = np.memmap(path, self.ledger["dtype"], mode="r", shape=(self.num_tokens,))
        if path.stat().st_size != self._flat.nbytes:
            raise ValueError("tokens.bin is longer than its ledger says")
        self._blocks = Blocks(self._flat.view(np.uint8), self._sums("tokens.bin"))

    @property
    def in_place(self) -> bool:
        """Whether the ids lie in files of the user's."""
        return "files" in self.ledger

    @property
    def flat(self) -> NDArray[Any]:
        """All ids end to end."""
        # Ids in several files are no array, but are looked into like one.
        return cast(NDArray[Any], self._mapped_tokens().flat) if self.in_place else self._flat

    def _mapped_tokens(self) -> MappedTokens:
        """The ids that lie in other files, which are not needed to list a store."""
        if self._mapped is None:
            spans = self._column(SPANS, "<i8", None)
            try:
                files = noted_files(self.path) if self._files is None else self._files
            except (OSError, ValueError, TypeError) as error:
                raise DamagedStore(self.path, f"{FILES} cannot be read: {error}") from None
            self._mapped = MappedTokens(self.name, files, self.ledger["files"], self.ledger["dtype"], spans)
        return self._mapped

    @classmethod
    def open(cls, path: Path, mend: Mend | None = None, files: Sequence[Path] | None = None) -> "TokenStore":
        """Open a published store; the arrays beside the tokens are read when they are first asked for."""
        try:
            ledger = json.loads((path / LEDGER).read_text(encoding="utf-8"))
            noted = ledger.pop("ledger_checksum", None)
            if (noted is None) != ("checksums" not in ledger) or (noted is not None and noted != _ledger_sum(ledger)):
                raise DamagedStore(path, f"{LEDGER} is not as it was written")
            if ledger["format"] != FORMAT:
                raise UserError(f"{path}: a store of format {ledger['format']}, expected {FORMAT}; remove it")
            return cls(path, ledger, mend, files)
        except FileNotFoundError as error:
            raise DamagedStore(path, f"{Path(error.filename).name} is missing") from None
        except (OSError, MemoryError) as error:
            raise _not_now(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedStore(path, f"{type(error).__name__}: {error}") from None

    @property
    def can_be_checked(self) -> bool:
        """Whether the store has checksums."""
        return "checksums" in self.ledger

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document starts, and where the last one ends."""
        return self._column("offsets.npy", "<i8", (self.num_documents + 1,))

    @property
    def prompt_lengths(self) -> NDArray[np.uint32]:
        """How many tokens of each document are its prompt."""
        return self._column("prompt_lengths.npy", "<u4", (self.num_documents,))

    @property
    def loss_mask(self) -> NDArray[np.uint8] | None:
        """Of chats: 1 for each token that the assistant says."""
        return self._column(LOSS_MASK, "|u1", (self.num_tokens,)) if self.kind == CHAT else None

    @property
    def doc_bytes(self) -> NDArray[np.uint32]:
        """Bytes of each document."""
        return self._column("doc_bytes.npy", "<u4", (self.num_documents,))

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Hashes of each document's text and group."""
        return self._column("keys.npy", "<u8", (self.num_documents, 2))

    def ensure(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Compare the blocks of some ranges of tokens with their checksums, each when it is first used.

        A damaged store is made again here, or is an error; `flat` is looked up after this, never before.
        """
        if self.in_place:
            mapped = self._mapped_tokens()
            if mapped.left and len(starts):
                with self._lock:
                    mapped.ensure(starts, stops)
            return
        if not self._blocks.left or not len(starts):
            return
        width = self.flat.itemsize
        with self._lock:
            for block in self._blocks.unseen(starts * width, stops * width):
                fault = self._fault(block)
                if fault is not None:
                    self._mended(fault)
                    return
                self._blocks.mark(block)

    def check(self) -> None:
        """Look at everything; DamagedStore where something is not as it was written."""
        for name in ("offsets", "prompt_lengths", "doc_bytes", "keys", "loss_mask"):
            getattr(self, name)
        self.ensure(np.array([0]), np.array([self.num_tokens]))

    def _fault(self, block: int) -> str | None:
        """What is wrong with a block of tokens."""
        place = f"block {block} of {self._blocks.count} of tokens.bin"
        if not self._blocks.holds(block):
            return f"{place} does not have its checksum"
        highest = int(self._blocks.bytes(block).view(self.flat.dtype).max())
        if highest >= len(self.token_bytes):
            return f"{place} has the id {highest}, the vocabulary {len(self.token_bytes)} ids"
        return None

    def _sums(self, name: str) -> Json | None:
        if not self.can_be_checked:
            return None
        known: Json = self.ledger["checksums"][name]
        return known

    def _column(self, name: str, dtype: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
        """An array beside the tokens, looked at as a whole when it is first asked for."""
        found = self._columns.get(name)
        if found is not None:
            return found
        offsets = self.offsets if name == "prompt_lengths.npy" else None
        with self._lock:
            try:
                found = self._load(name, dtype, shape)
                self._check_range(name, found, offsets)
            except (FileNotFoundError, DamagedStore) as error:
                self._mended(error.what if isinstance(error, DamagedStore) else f"{name} is missing")
                found = self._load(name, dtype, shape)
            except (OSError, MemoryError) as error:
                raise _not_now(self.path, error) from error
            self._columns[name] = found
        return found

    def _load(self, name: str, dtype: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
        path = self.path / name
        known = self._sums(name)
        if known is not None and PieceSums.of(path).blocks(known["pieces"]) != known["sums"]:
            raise DamagedStore(self.path, f"{name} does not have its checksums")
        try:
            array: NDArray[Any] = np.memmap(path, dtype, "r") if name == LOSS_MASK else np.load(path, mmap_mode="r")
        except OSError:
            raise
        except Exception as error:  # whatever a damaged header makes numpy say
            raise DamagedStore(self.path, f"{name} cannot be read: {error}") from None
        if array.dtype != np.dtype(dtype) or (shape is not None and array.shape != shape):
            raise DamagedStore(self.path, f"{name} holds {array.dtype} {array.shape}, expected {dtype} {shape}")
        return array

    def _check_range(self, name: str, array: NDArray[Any], offsets: NDArray[np.int64] | None) -> None:
        if name == "offsets.npy" and not (
            array[0] == 0 and array[-1] == self.num_tokens and (array[1:] > array[:-1]).all()
        ):
            raise DamagedStore(self.path, f"{name} has documents that end before they start, or beyond the tokens")
        if name == LOSS_MASK and int(array.max()) > 1:
            raise DamagedStore(self.path, f"{name} has something other than 0 and 1")
        if offsets is not None and not (array <= np.diff(offsets)).all():
            raise DamagedStore(self.path, f"{name} has a prompt that is longer than its document")

    def _mended(self, what: str) -> None:
        """Go on with the store made again, where it can be; it must be the same one."""
        if self.mend is None:
            raise DamagedStore(self.path, what)
        fresh = self.mend(what)
        known = ("checksums", "documents", "tokens", "bytes")
        if self.can_be_checked and any(fresh.ledger[name] != self.ledger[name] for name in known):
            raise RunError(
                f"{self.path}: the store was damaged ({what}); made again, it is not what it was: its source gives "
                "other documents now; put the store or the source back from a copy"
            )
        self.ledger = fresh.ledger
        if not self.in_place:
            self._flat, self._blocks = fresh._flat, fresh._blocks

    def tokens(self, index: int) -> NDArray[Any]:
        """The ids of a document, the end-of-text id last."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        self.ensure(np.array([start]), np.array([stop]))
        return np.asarray(self.flat[start:stop])

    def prompt_length(self, index: int) -> int:
        """How many tokens of a document are its prompt."""
        return int(self.prompt_lengths[index])

    def question_lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """How many tokens of some documents stand before their answers; in a chat, before the assistant's last turn."""
        found = np.asarray(self.prompt_lengths[first:stop], np.int64)
        if self.loss_mask is None:
            return found
        begins, ends = self.offsets[first:stop], self.offsets[first + 1 : stop + 1]
        mask = np.asarray(self.loss_mask[begins[0] : ends[-1]], np.int8)
        turns = begins[0] + np.flatnonzero(np.diff(mask, prepend=0) == 1)
        last = np.searchsorted(turns, ends) - 1
        own = (last >= 0) & (turns[last] >= begins) if len(turns) else np.zeros(len(found), bool)
        found[own] = turns[last[own]] - begins[own]
        return found

    def __len__(self) -> int:
        return self.num_documents


def _ledger_sum(ledger: JsonView) -> str:
    return f"{zlib.crc32(json.dumps(ledger, sort_keys=True).encode()):08x}"


def _not_now(path: Path, error: BaseException) -> RunError:
    """A store that cannot be read for reasons that are not its own."""
    reason = unreachable(error) or " ".join(str(error).split()) or type(error).__name__
    return RunError(f"{path}: the store cannot be read now, and nothing says that it is damaged: {reason}")


def finish(folder: Path, ledger: Json, token_bytes: NDArray[np.int32], tokens: PieceSums | None = None) -> None:
    """Turn the records of a finished preparation into a store's arrays; the ledger is written last.

    Args:
        tokens: the sums of `tokens.bin` as they were taken when it was written; None reads it.
    """
    records = np.memmap(folder / "documents.bin", RECORD, mode="r", shape=(ledger["documents"],))
    _write_offsets(folder / "offsets.npy", records)
    _write_column(folder / "prompt_lengths.npy", records, "prompt", np.dtype("<u4"))
    _write_column(folder / "doc_bytes.npy", records, "bytes", np.dtype("<u4"))
    keys = _new_array(folder / "keys.npy", np.dtype("<u8"), (len(records), 2))
    for start in range(0, len(records), CHUNK):
        part = records[start : start + CHUNK]
        keys[start : start + CHUNK] = np.stack([part["key"], part["group"]], axis=1)
    _flush(keys)
    np.save(folder / "token_bytes.npy", token_bytes)
    for file in folder.iterdir():
        sync(file)
    sums = {SPANS: PieceSums.of(folder / SPANS)} if "files" in ledger else {}
    if not sums:
        sums = {"tokens.bin": tokens or PieceSums.of(folder / "tokens.bin")}
    names = (*ARRAYS, LOSS_MASK) if ledger["kind"] == CHAT else ARRAYS
    sums |= {name: PieceSums.of(folder / name) for name in names}
    sizes = {name: (folder / name).stat().st_size for name in sums}
    ledger = ledger | {"checksums": checksums(sums, sizes)}
    write_json(folder / LEDGER, ledger | {"ledger_checksum": _ledger_sum(ledger)})


def _new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file whose room is there: a page that a full disk has no room for would end the process."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _write_offsets(path: Path, records: NDArray[Any]) -> None:
    offsets = _new_array(path, np.dtype("<i8"), (len(records) + 1,))
    total = 0
    for start in range(0, len(records), CHUNK):
        ends = total + np.cumsum(records["length"][start : start + CHUNK], dtype=np.int64)
        offsets[start + 1 : start + 1 + len(ends)] = ends
        total = int(ends[-1])
    _flush(offsets)


def _write_column(path: Path, records: NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    column = _new_array(path, dtype, (len(records),))
    for start in range(0, len(records), CHUNK):
        column[start : start + CHUNK] = records[name][start : start + CHUNK]
    _flush(column)


def _flush(array: NDArray[Any]) -> None:
    assert isinstance(array, np.memmap)
    array.flush()


def stores_folder(cache: Path) -> Path:
    """Where the stores of a cache are."""
    return cache / "prepared"


def store_paths(cache: Path) -> list[Path]:
    """The folders of all published stores of a cache, by name."""
    folder = stores_folder(cache)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]


def stores(cache: Path) -> Iterator[TokenStore]:
    """All published stores of a cache, by name."""
    return map(TokenStore.open, store_paths(cache))


def partial_path(path: Path) -> Path:
    """Where a store is made before it is published under its own name."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a store's lock file.

    Args:
        path: the store's path.
        waiting: called before waiting for another process; None does not wait, and yields False.
    """
    with locked(path.with_name(f".{path.name}.lock"), waiting) as (mine, _):
        yield mine


@contextlib.contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Free a damaged store's name; it comes back unless there is another one under its name at the end."""
    grave = path.with_name(f".{path.name}.damaged")
    shutil.rmtree(grave, ignore_errors=True)
    if path.exists():
        path.rename(grave)
    try:
        yield
    finally:
        if path.exists():
            shutil.rmtree(grave, ignore_errors=True)
        elif grave.exists():
            grave.rename(path)


def remove_unfinished(cache: Path) -> list[str]:
    """Delete what killed preparations left, unless a process is at work on it; the names of what went."""
    gone = []
    for path in sorted(stores_folder(cache).glob(".*.partial")):
        name = path.name[1 : -len(".partial")]
        with lock(path.with_name(name)) as mine:
            if mine and path.exists():
                shutil.rmtree(path)
                gone.append(name)
    for ending in (".damaged", ".portions"):
        for path in stores_folder(cache).glob(f".*{ending}"):
            name = path.name[1 : -len(ending)]
            with lock(path.with_name(name)) as mine:
                if mine:
                    shutil.rmtree(path, ignore_errors=True)
                    gone += [name] if ending == ".portions" and name not in gone else []
    return gone


def remove(path: Path) -> None:
    """Delete a store: it disappears at once under its name, then its files go."""
    grave = path.with_name(f".{path.name}.removed.{os.getpid()}")
    path.rename(grave)
    shutil.rmtree(grave)
