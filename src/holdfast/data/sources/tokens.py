"""Files of ids that other programs made: where in them the ids are, and where their documents end.

| format | written by | documents end |
|---|---|---|
| `bin` | nanoGPT (bare ids), llm.c (a header of 256 numbers) | at the end-of-text id |
| `npy` | OLMo and dolma (bare ids), numpy | as `NAME.csv.gz` says, else at the end-of-text id |
| `megatron` | Megatron-LM, NeMo: `NAME.bin` with `NAME.idx` | as the index says |
| `ds` | datatrove: `NAME.ds` | as `NAME.ds.index` says, else at the end-of-text id |
| `input_ids` | Hugging Face `datasets`: `save_to_disk`, arrow, parquet | a row is a document |

All but parquet, which is packed, are read where they are. A file that is not what its header, its index or its size
says is refused: it was cut short, or is something else.
"""

import csv
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data.config import SourceConfig
from holdfast.data.documents import Document, LocalSource, SourceContext
from holdfast.data.mapped import Ints, Layout
from holdfast.data.sources.files import TOKEN_ENDINGS, file_hash, format_of, saved_splits
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import ConfigError, UserError

READER = 1  # changes when the same files would give other documents
COLUMN = "input_ids"
TABLES = (".arrow", ".parquet")
LLMC_HEADER = 1024  # bytes: 256 numbers, the first of them the magic one, the third how many ids follow
LLMC_WIDTHS = {20240520: 2, 20240801: 4}
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "<u1", 2: "<u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}  # the signed ones as unsigned
ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
SCRATCH = "ids.bin"  # what is unpacked from parquet while a store is made

Matches = Callable[[str, str | None], list[Path]]
Splits = dict[str, list[Path]]


@dataclass(frozen=True)
class TokenSource(LocalSource):
    """Token files of a `data/sources/NAME` section; its documents are ids, which only `prepare` can use."""

    name: str
    format: str
    files: Mapping[str, Sequence[Path]]
    dtype: str | None = None

    @property
    def kind(self) -> str:
        return "text"

    @property
    def packed(self) -> bool:
        """Whether the ids cannot be read where they are."""
        return self.format == "parquet"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return tuple(self.files)

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        raise UserError(f"data/sources/{self.name}: {self.files['train'][0]} holds ids, and texts are asked for")

    def fingerprint(self, context: SourceContext) -> str:
        cache = context.data.cache_path()
        hashes = {
            split: [file_hash(file, cache) for path in paths for file in (path, *_beside(path, self.format))]
            for split, paths in sorted(self.files.items())
        }
        return f"tokens {READER} {self.format} {self.dtype} {hashes}"

    def layout(self, split: str, tokenizer: Tokenizer, scratch: Path) -> Layout:
        """Where the ids of a split are.

        Args:
            scratch: a folder for ids that must be unpacked.
        """
        if split not in self.files:
            raise UserError(f"dataset {self.name}: there is no split {split!r}; it has {', '.join(self.files)}")
        kind = np.dtype(self.dtype or tokenizer.dtype).newbyteorder("<").str
        paths = list(self.files[split])
        try:
            if self.format == "parquet":
                return _unpacked(paths, scratch / SCRATCH, tokenizer)
            read = {"bin": _bin, "npy": _npy, "ds": _ds, "arrow": _arrow}
            parts = [_megatron(path) if self.format == "megatron" else read[self.format](path, kind) for path in paths]
        except UserError as error:
            raise UserError(f"data/sources/{self.name}: {error}") from None
        except OSError as error:
            raise UserError(f"data/sources/{self.name}: {error.filename}: {error.strerror}") from None
        return _joined(self.name, parts)


def token_source(name: str, config: SourceConfig, matches: Matches) -> TokenSource | None:
    """The source of a section that names token files; None where it names texts.

    Args:
        matches: the files that a path or a glob names, all of them unless a format is None.
    """
    asked = config.format in (*TOKEN_ENDINGS.values(), "megatron", COLUMN)
    texts = (config.text, config.prompt, config.answer)
    if not asked and (any(each is not None for each in texts) or config.format not in (None, "arrow", "parquet")):
        return None
    found = _splits(config.path, matches, asked)
    if not found.get("train"):
        if asked or Path(config.path).suffix in TOKEN_ENDINGS:
            raise _missing(name, "path", config.path)
        return None
    if config.validation is not None:
        found["validation"] = _splits(config.validation, matches, asked).get("train", [])
        if not found["validation"]:
            raise _missing(name, "validation", config.validation)
        held_out = {path.resolve() for path in found["validation"]}
        found["train"] = [path for path in found["train"] if path.resolve() not in held_out]
        if not found["train"]:
            raise ConfigError(
                f"data/sources/{name}/validation", config.validation, "files other than all of the training files"
            )
    paths = {path for split in found.values() for path in split}
    formats = {_format(path, config) for path in paths}
    if formats == {None}:
        return None
    if len(formats) > 1:
        shown = ", ".join(sorted(str(each) for each in formats))
        raise ConfigError(f"data/sources/{name}/path", config.path, "token files of one format", f"there are {shown}")
    if asked and any(each is not None for each in texts):
        raise ConfigError(f"data/sources/{name}/text", config.text, "nothing, since token files hold no fields")
    return TokenSource(
        name, str(formats.pop()), {split: files for split, files in found.items() if files}, config.dtype
    )


def _missing(name: str, key: str, path: str) -> ConfigError:
    fix = "relative paths start from the folder the command runs in"
    return ConfigError(f"data/sources/{name}/{key}", path, "token files that exist", fix)


def _format(path: Path, config: SourceConfig) -> str | None:
    """The format of a file; None where it holds no ids."""
    if path.suffix in TABLES and config.format in (None, COLUMN, "arrow", "parquet"):
        return path.suffix[1:] if config.format == COLUMN or _has_ids(path) else None
    if config.format in ("bin", None) and path.with_suffix(".idx").is_file() and path.suffix == ".bin":
        return "megatron"
    return config.format or TOKEN_ENDINGS.get(path.suffix)


def _has_ids(path: Path) -> bool:
    """Whether a table has ids and no texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names if path.suffix == ".parquet" else _arrow_reader(path)[1].schema.names
    except (pa.ArrowException, OSError, UserError):
        return False  # whoever reads it as texts says what is wrong with it
    return COLUMN in names and "text" not in names


def _splits(pattern: str, matches: Matches, asked: bool) -> Splits:
    """The files that a path names, by split where the folder says so."""
    path = Path(pattern).expanduser()
    if (saved := saved_splits(path)) is not None:
        return saved
    if path.name and path.with_name(path.name + ".idx").is_file() and path.with_name(path.name + ".bin").is_file():
        return {"train": [path.with_name(path.name + ".bin")]}
    if path.suffix == ".idx":
        return {"train": [path.with_suffix(".bin")] if path.with_suffix(".bin").is_file() else []}
    if path.is_file():
        return {"train": [path]}
    files = matches(pattern, "any")
    ids = [each for each in files if each.suffix in (*TOKEN_ENDINGS, *TABLES)]
    if not path.is_dir():
        return {"train": files if asked else ids}
    named = {
        split: [each for each in ids if each.name.startswith(start)]
        for split, start in (("train", "train"), ("validation", "val"))
    }
    if named["train"]:
        return {split: chosen for split, chosen in named.items() if chosen}
    others = [each for each in files if each not in ids and format_of(each) and not each.name.endswith(".csv.gz")]
    return {"train": ids if asked or not others else []}


def _beside(path: Path, format: str) -> list[Path]:
    """The files that say where the documents of a file end."""
    found = {
        "megatron": [path.with_suffix(".idx")],
        "npy": [path.with_suffix(".csv.gz")],
        "ds": [path.with_name(f"{path.name}.index"), path.with_name(f"{path.name}.metadata")],
    }.get(format, [])
    return [each for each in found if each.is_file()]


def _joined(name: str, parts: list[Layout]) -> Layout:
    """Several files as one."""
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1:
        shown = ", ".join(f"{part.files[0].name} {np.dtype(part.dtype).name}" for part in parts[:8])
        raise UserError(f"data/sources/{name}: files whose ids have different widths: {shown}; use several datasets")
    spans = np.concatenate([part.spans + np.array([number, 0, 0]) for number, part in enumerate(parts)])
    counts = [int(part.spans[:, 2].sum()) for part in parts]
    begins = np.cumsum([0, *counts])
    ends = None
    if any(part.ends is not None for part in parts):
        bare = [part.files[0] for part in parts if part.ends is None]
        if bare:
            raise UserError(f"data/sources/{name}: {bare[0]} has no index of its documents, and other files have one")
        ends = np.concatenate([part.ends + begin for part, begin in zip(parts, begins, strict=False)])
    if begins[-1] == 0:
        raise UserError(f"data/sources/{name}: {parts[0].files[0]}: there is no id in it")
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Layout(tuple(part.files[0] for part in parts), kinds.pop(), spans, ends, tuple(notes))


def _one(path: Path, dtype: str, first: int, count: int, ends: Ints | None = None, *notes: str) -> Layout:
    """The layout of a file whose ids lie end to end."""
    if ends is not None and (not len(ends) or ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != count):
        last = int(ends[-1]) if len(ends) else 0
        raise UserError(f"{path}: it holds {count:,} ids, its index ends at {last:,}: one of them was cut short")
    return Layout((path,), dtype, np.array([[0, first, count]], np.int64), ends, notes)


def _bare(path: Path, dtype: str) -> int:
    """How many ids a file of nothing else has."""
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise UserError(
            f"{path}: {size:,} bytes are no whole number of {np.dtype(dtype).name} ids: it was cut short, or its ids "
            "have another width, which `dtype` tells"
        )
    return size // width


def _bin(path: Path, dtype: str) -> Layout:
    with path.open("rb") as file:
        head = file.read(LLMC_HEADER)
    numbers = np.frombuffer(head[:12], "<i4") if len(head) >= 12 else np.zeros(3, "<i4")
    width = LLMC_WIDTHS.get(int(numbers[0]))
    if width is None:
        return _one(path, dtype, 0, _bare(path, dtype))
    _check_size(path, "header", int(numbers[2]), LLMC_HEADER + width * int(numbers[2]))
    return _one(path, f"<u{width}", LLMC_HEADER, int(numbers[2]))


def _check_size(path: Path, told: str, count: int, expected: int) -> None:
    """Refuse a file that has not as many bytes as its header or index says."""
    if (size := path.stat().st_size) != expected:
        has = f"it has {size:,} bytes{_short(size, expected)}"
        raise UserError(f"{path}: its {told} tells of {count:,} ids, {expected:,} bytes; {has}")


def _short(size: int, expected: int) -> str:
    return ": it was cut short" if size < expected else ""


def _npy(path: Path, dtype: str) -> Layout:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            return _one(path, dtype, 0, _bare(path, dtype), _olmo_ends(path))
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, kind = read(file)
        except ValueError as error:
            raise UserError(f"{path}: a .npy file whose header cannot be read: {error}") from None
        first = file.tell()
    if kind.kind not in "iu" or (fortran and len(shape) > 1):
        raise UserError(f"{path}: an array of {kind}; an array of whole numbers expected, row after row")
    count = int(np.prod(shape, dtype=np.int64))
    _check_size(path, "header", count, first + count * kind.itemsize)
    if first % kind.itemsize:
        raise UserError(f"{path}: its ids do not start at a multiple of their width; save it again with numpy")
    return _one(path, kind.str.replace("i", "u"), first, count)


def _olmo_ends(path: Path) -> Ints | None:
    """Where the documents end that dolma notes beside a file: start, end, id and more in each line."""
    index = path.with_suffix(".csv.gz")
    if not index.is_file():
        return None
    try:
        with gzip.open(index, "rt", encoding="utf-8", newline="") as file:
            found = np.array([(int(row[0]), int(row[1])) for row in csv.reader(file)], np.int64).reshape(-1, 2)
    except (OSError, EOFError, zlib.error, ValueError, IndexError, csv.Error) as error:
        raise UserError(f"{index}: cannot be read as an index of documents: {error}") from None
    if (found[1:, 0] != found[:-1, 1]).any() or (len(found) and found[0, 0] != 0):
        raise UserError(f"{index}: documents that do not follow each other")
    return found[:, 1]


def _megatron(path: Path) -> Layout:
    index = path.with_suffix(".idx")
    content = np.memmap(index, np.uint8, mode="r") if index.stat().st_size else np.empty(0, np.uint8)
    head = content[:34].tobytes()
    if len(head) < 34 or not head.startswith(MEGATRON_MAGIC):
        raise UserError(f"{index}: not an index of Megatron (MMIDIDX), or cut short")
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
    if version != 1 or code not in MEGATRON_TYPES:
        raise UserError(f"{index}: version {version} and type {code} of ids; version 1 and whole numbers expected")
    needed = 34 + 12 * sequences + 8 * documents
    if len(content) not in (needed, needed + sequences):  # a byte for each sequence where there are several kinds
        raise UserError(f"{index}: {len(content):,} bytes, {needed:,} expected{_short(len(content), needed)}")
    lengths = content[34 : 34 + 4 * sequences].view("<i4")
    pointers = content[34 + 4 * sequences : 34 + 12 * sequences].view("<i8")
    parts = content[34 + 12 * sequences : needed].view("<i8")
    width = np.dtype(MEGATRON_TYPES[code]).itemsize
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or (pointers != ends[:-1] * width).any():
        raise UserError(f"{index}: sequences that do not follow each other; merge the file again with Megatron's tools")
    if len(parts) and (parts.min() < 0 or parts.max() > sequences or (np.diff(parts) < 0).any()):
        raise UserError(f"{index}: documents of sequences that are not there")
    _check_size(path, "index", int(ends[-1]), int(ends[-1]) * width)
    return _one(path, MEGATRON_TYPES[code], 0, int(ends[-1]), np.unique(np.append(ends[parts], ends[-1])))


def _ds(path: Path, dtype: str) -> Layout:
    index, told = path.with_name(f"{path.name}.index"), path.with_name(f"{path.name}.metadata")
    notes, size, count = [], path.stat().st_size, None
    if path.with_name(f"{path.name}.loss").is_file():
        raise UserError(
            f"{path}: {path.name}.loss beside it says which ids count in the loss, which is not read; move it away "
            "where all may count"
        )
    if told.is_file():
        lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) < 2 or not lines[1].strip().isdigit():
            raise UserError(f"{told}: the name of a tokenizer and a number of ids expected, a line each")
        count = int(lines[1])
        made_by, _, width = lines[0].partition("|")
        dtype = f"<u{width}" if width in ("2", "4") else dtype
        notes = [f"made with the tokenizer {made_by}, as {told.name} says"]
    ends = None
    if index.is_file():
        if index.stat().st_size % 8:
            raise UserError(f"{index}: {index.stat().st_size:,} bytes are no whole number of ends: it was cut short")
        ends = np.fromfile(index, "<u8").astype(np.int64)
        count = count if count is not None else int(ends[-1]) if len(ends) else 0
    if count is not None:
        widths = [width for width in (2, 4) if size == count * width]
        if not widths:
            raise UserError(
                f"{path}: {size:,} bytes; {count:,} ids of 2 or 4 bytes expected: it was cut short, or its index"
            )
        dtype = f"<u{widths[0]}"
    return _one(path, dtype, 0, _bare(path, dtype), ends, *notes)


def _arrow_reader(path: Path) -> tuple[Any, Any]:
    """The mapped bytes of an arrow file, and a reader of its batches, none of which is copied."""
    import pyarrow as pa

    whole = pa.memory_map(str(path)).read_buffer()
    try:
        return whole, pa.ipc.open_stream(whole)
    except (pa.ArrowException, OSError):
        pass
    try:
        return whole, pa.ipc.open_file(whole)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as arrow, or was cut short: {error}") from None


def _arrow(path: Path, dtype: str) -> Layout:  # noqa: ARG001 (the file says it)
    import pyarrow as pa

    whole, reader = _arrow_reader(path)
    is_stream = not isinstance(reader, pa.ipc.RecordBatchFileReader)
    if is_stream and whole[-8:].to_pybytes() != ARROW_END:
        raise UserError(f"{path}: it was cut short: an arrow stream ends with a mark, which is not there")
    try:
        batches = list(reader) if is_stream else [reader.get_batch(n) for n in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as arrow, or was cut short: {error}") from None
    width, spans, lengths = 0, [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for batch in batches:
        values, sizes = _rows_of(path, batch)
        width = values.type.bit_width // 8
        data = values.buffers()[1]
        place = data.address - whole.address + values.offset * width if data is not None else 0
        if not 0 <= place <= whole.size - len(values) * width or place % width:
            raise UserError(f"{path}: its batches are compressed, and cannot be read in place; save it uncompressed")
        spans.append(np.array([[0, place, len(values)]], np.int64))
        lengths.append(sizes)
    ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    return Layout((path,), f"<u{width or 2}", np.concatenate(spans), ends)


def _rows_of(path: Path, batch: Any) -> tuple[Any, Ints]:
    """The ids of a batch of rows, and how many each row has; masks that would be ignored are refused."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if COLUMN not in batch.schema.names:
        raise UserError(f"{path}: there is no column {COLUMN}; it has {', '.join(batch.schema.names)}")
    rows = batch.column(COLUMN)
    if not _is_list(rows.type) or not pa.types.is_integer(rows.type.value_type):
        raise UserError(f"{path}: {COLUMN} holds {rows.type}; lists of whole numbers expected")
    values = rows.flatten()
    if rows.null_count or values.null_count:
        raise UserError(f"{path}: {COLUMN} has empty values (null); leave such rows out")
    sizes = np.asarray(pc.list_value_length(rows), np.int64)
    for name in ("labels", "attention_mask"):
        if name not in batch.schema.names or not _is_list(batch.column(name).type):
            continue
        other = np.asarray(batch.column(name).flatten())
        plain = np.asarray(values) if name == "labels" else np.ones(len(values), other.dtype)
        if not np.array_equal(other, plain):
            raise UserError(
                f"{path}: its column {name} masks some ids, which is not read from token files: all ids would count in "
                f"the loss; leave out the ids or the column, or bring the texts and let `prompt` and `answer` mask them"
            )
    return values, sizes


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _unpacked(paths: list[Path], scratch: Path, tokenizer: Tokenizer) -> Layout:
    """The ids of parquet files, which are packed, written end to end into a file of their own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, lengths = 0, [np.empty(0, np.int64)]
    with scratch.open("wb") as file:
        for path in paths:
            try:
                table = pq.ParquetFile(path)
                names = [name for name in (COLUMN, "labels", "attention_mask") if name in table.schema_arrow.names]
                for batch in table.iter_batches(columns=names):
                    values, sizes = _rows_of(path, batch)
                    ids = np.asarray(values)
                    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
                        wrong = int(ids.max() if ids.max() >= tokenizer.vocab_size else ids.min())
                        raise UserError(
                            f"{path}: the id {wrong} is not in the vocabulary of the tokenizer {tokenizer.name}, which "
                            f"has {tokenizer.vocab_size:,} ids; set tokenizer/name to the one that made the file"
                        )
                    file.write(ids.astype(tokenizer.dtype).tobytes())
                    count += len(ids)
                    lengths.append(sizes)
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{path}: cannot be read as parquet, or was cut short: {error}") from None
    return _one(scratch, np.dtype(tokenizer.dtype).str, 0, count, np.cumsum(np.concatenate(lengths), dtype=np.int64))
