"""Rows that a model has sampled from itself: made in parts, published as a store in the run's folder, read by the plan.

A set is a prepared store whose documents are rows of T + 1 tokens: T inputs, each with the token after it as target.
While it is made, each batch of samples is a file of its own that is written whole, so that a kill loses one batch.
"""

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data import store
from holdfast.data.plan import SampledSet
from holdfast.data.rows import RowArrays
from holdfast.data.sampling import SELF
from holdfast.data.store import RECORD, TokenStore
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import sync, write_atomically
from holdfast.types import Json, JsonView

FOLDER = "replay"  # in a run's folder
BLOCKS = 4  # rows that one sample is cut into: all but the first begin in the middle of a text
MADE_BY = "made_by.json"  # what the parts of a set that is being made have in common
CHUNK_BYTES = 1 << 24
SEAL_BYTES = 5


def set_path(run_dir: Path, made: SampledSet) -> Path:
    """Where a run keeps a set."""
    return run_dir / FOLDER / f"{SELF.name}-{made.stage}-{made.fingerprint[:16]}"


def published_sets(run_dir: Path) -> list[TokenStore]:
    """The sets that a run has, in the order of their stages."""
    ledgers = (run_dir / FOLDER).glob(f"{SELF.name}-*/{store.LEDGER}")
    return sorted((TokenStore.open(path.parent) for path in ledgers), key=lambda found: found.ledger["step"])


def content_of(path: Path) -> str:
    """A hash of the tokens of a store."""
    found = hashlib.blake2b(digest_size=16)
    with (path / "tokens.bin").open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def open_set(run_dir: Path, made: SampledSet, content: str | None = None) -> TokenStore:
    """The published set of a run, after a look at every token.

    Args:
        content: the hash that it must have; None is the one that it says itself.
    """
    path = set_path(run_dir, made)
    try:
        found = TokenStore.open(path)
        held = content_of(path)
    except (OSError, UserError) as error:
        raise UserError(_not_there(path, made, "missing or damaged")) from error
    own = found.ledger.get("content")
    if own is None and content is None:
        return found  # a stand-in, which holds nothing that must be right
    if held != (content or own):
        raise UserError(_not_there(path, made, f"damaged: their hash is {held}, expected {content or own}"))
    return found


def _not_there(path: Path, made: SampledSet, what: str) -> str:
    return (
        f"{path}: the rows that the model sampled before stage {made.stage} are {what}; put the folder back from a "
        f"copy, or make them again in a branch: --from RUN@boundary_{made.stage} with another --name"
    )


class SampledRows:
    """The rows of all sets of a run, end to end; a set is opened when its first row is asked for.

    Args:
        sets: by stage, as the plan has them.
        run_dir: the folder of the run.
    """

    def __init__(self, sets: Mapping[int, SampledSet], run_dir: Path, block_size: int) -> None:
        self.sets = sets
        self.run_dir = run_dir
        self.block_size = block_size
        self._ends = np.cumsum([made.num_rows for made in sets.values()], dtype=np.int64)
        self._opened: dict[int, TokenStore] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.sets else 0

    def opened(self, made: SampledSet) -> TokenStore:
        """The store of one set."""
        if made.stage not in self._opened:
            self._opened[made.stage] = open_set(self.run_dir, made)
        return self._opened[made.stage]

    def rows(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> RowArrays:
        """Several rows, as arrays of shape (N, T)."""
        chosen = np.asarray(indices, np.int64)
        tokens = np.empty((len(chosen), self.block_size + 1), np.int32)
        numbers = np.searchsorted(self._ends, chosen, side="right")
        for number, made in enumerate(self.sets.values()):
            here = numbers == number
            if here.any():
                stored = self.opened(made).flat.reshape(made.num_rows, self.block_size + 1)
                tokens[here] = stored[chosen[here] - made.first_row]
        ones = np.ones((len(chosen), self.block_size), np.int32)
        positions = np.broadcast_to(np.arange(self.block_size, dtype=np.int32), ones.shape).copy()
        return RowArrays(tokens[:, :-1].copy(), tokens[:, 1:].copy(), ones, ones.copy(), positions)

    def facts(self, step: int) -> Json:
        """What the manifest of a step says of the sets that were drawn from before it."""
        used = {
            str(made.stage): {
                "fingerprint": made.fingerprint,
                "content": self.opened(made).ledger["content"],
            }
            for made in self.sets.values()
            if made.step < step
        }
        return {"sampled": used} if used else {}


def check_sets(manifest: JsonView, sets: Iterable[SampledSet], run_dir: Path) -> None:
    """Refuse to go on with other rows than those that a checkpoint was trained on.

    Args:
        run_dir: the folder of the run that the checkpoint belongs to.
        sets: those that steps from the checkpoint's stage on look at.
    """
    known = manifest.get("sampled", {})
    for made in sets:
        if str(made.stage) in known:
            open_set(run_dir, made, known[str(made.stage)]["content"])


def copy_sets(sets: Iterable[SampledSet], source: Path, target: Path) -> None:
    """Copy the sets that one run has into the folder of another."""
    for made in sets:
        have, goal = set_path(source, made), set_path(target, made)
        if have.is_dir() and not goal.exists():
            scratch = goal.with_name(f".{goal.name}.copy")
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(have, scratch)
            scratch.rename(goal)


class Parts:
    """A set while it is made: one file for each batch of samples, and what all of them have in common.

    Args:
        path: of the set when it is published.
        made_by: what else decides the tokens: the parameters, the shape of a batch, the mesh. Parts that were made by
            something else are of no use.
    """

    def __init__(self, path: Path, made_by: JsonView) -> None:
        self.path = path
        self.folder = store.partial_path(path)
        self.made_by = made_by

    def begin(self, num_parts: int) -> list[int]:
        """The numbers of the parts that are missing or damaged; nothing is where the parts of others were."""
        if not self._same():
            shutil.rmtree(self.folder, ignore_errors=True)
            write_atomically(self.folder / MADE_BY, json.dumps(self.made_by))
        if (self.folder / store.LEDGER).exists():
            return []
        return [number for number in range(num_parts) if self._read(number) is None]

    def _same(self) -> bool:
        for name in (store.LEDGER, MADE_BY):  # a ledger is the last thing that is written
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads((self.folder / name).read_text())
                return bool((found["made_by"] if name == store.LEDGER else found) == self.made_by)
        return False

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.bin"

    def write(self, number: int, rows: NDArray[np.integer[Any]], tokenizer: Tokenizer) -> None:
        """Keep the rows (N, T + 1) of a part."""
        content = rows.astype(tokenizer.dtype).tobytes()
        write_atomically(self._part(number), content + _seal(content))

    def _read(self, number: int) -> bytes | None:
        """The tokens of a part; None where it is missing or not as it was written."""
        try:
            content = self._part(number).read_bytes()
        except FileNotFoundError:
            return None
        if len(content) % 2 == 0:  # ids have two or four bytes: parts of the previous version have no seal
            return content
        tokens, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
        return tokens if seal == _seal(tokens) else None

    def publish(self, made: SampledSet, num_parts: int, block_size: int, tokenizer: Tokenizer) -> None:
        """Make a store of all parts, unless a killed process had done so, and give it its name."""
        if not (self.folder / store.LEDGER).exists():
            self._assemble(made, num_parts, block_size, tokenizer)
        for path in [*self.folder.glob("part-*.bin"), self.folder / "documents.bin", self.folder / MADE_BY]:
            path.unlink(missing_ok=True)
        sync(self.folder)
        self.folder.rename(self.path)
        sync(self.path.parent)

    def _assemble(self, made: SampledSet, num_parts: int, block_size: int, tokenizer: Tokenizer) -> None:
        width = block_size + 1
        kind, sizes = np.dtype(tokenizer.dtype), tokenizer.token_bytes()
        left, num_bytes = made.num_rows, 0
        with (self.folder / "tokens.bin").open("wb") as tokens, (self.folder / "documents.bin").open("wb") as records:
            for number in range(num_parts):
                part = self._read(number)
                if part is None:
                    raise UserError(f"{self._part(number)}: damaged while it was waited for; the same command makes it")
                rows = np.frombuffer(part, kind).reshape(-1, width)[:left]
                found = _records(rows, sizes)
                tokens.write(rows.tobytes())
                records.write(found.tobytes())
                left, num_bytes = left - len(rows), num_bytes + int(found["bytes"].sum(dtype=np.int64))
        assert left == 0, f"{left} rows are missing"
        ledger = _ledger(made, made.num_rows * width, num_bytes, tokenizer) | {"content": content_of(self.folder)}
        store.finish(self.folder, ledger | {"made_by": dict(self.made_by)}, sizes)


def _seal(content: bytes) -> bytes:
    """What stands behind the tokens of a part: an odd number of bytes, their checksum."""
    return b"#" + zlib.crc32(content).to_bytes(SEAL_BYTES - 1, "big")


def _records(rows: NDArray[Any], sizes: NDArray[np.int32]) -> NDArray[Any]:
    """What a store notes of each row."""
    records = np.zeros(len(rows), RECORD)
    records["length"] = rows.shape[1]
    records["bytes"] = sizes[rows].sum(axis=1)
    keys = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    records["key"] = records["group"] = np.frombuffer(b"".join(keys), "<u8")
    return records


def _ledger(made: SampledSet, num_tokens: int, num_bytes: int, tokenizer: Tokenizer) -> Json:
    return {
        "format": store.FORMAT,
        "source": SELF.name,
        "split": f"stage {made.stage}",
        "kind": "text",
        "fingerprint": made.fingerprint,
        "documents": made.num_rows,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "dtype": np.dtype(tokenizer.dtype).str,
        "broken": {"counts": {}, "examples": {}},
        "rows": made.num_rows,
        "stopped_at_max_tokens": False,
        "step": made.step,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "pad_id": tokenizer.pad_id,
        },
    }


def write_stand_in(run_dir: Path, made: SampledSet, block_size: int, tokenizer: Tokenizer) -> None:
    """A set of rows of zeros that takes next to no room, for rehearsals, where only shapes count."""
    folder = set_path(run_dir, made)
    folder.mkdir(parents=True)
    width = block_size + 1
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(made.num_rows * width * np.dtype(tokenizer.dtype).itemsize)
    records = np.zeros(made.num_rows, RECORD)
    records["length"] = width
    (folder / "documents.bin").write_bytes(records.tobytes())
    store.finish(folder, _ledger(made, made.num_rows * width, 0, tokenizer), tokenizer.token_bytes())
