"""Token files in the formats of other programs, written as those programs write them."""

import gzip
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Documents = Sequence[NDArray[Any]]  # the ids of each, the end-of-text id last
Writer = Callable[[Path, Documents], Path]  # a path without its ending, documents -> what a config names


def nanogpt(path: Path, documents: Documents, dtype: str = "<u2") -> Path:
    """Bare ids, as nanoGPT's prepare.py writes them."""
    np.concatenate(documents).astype(dtype).tofile(target := path.with_suffix(".bin"))
    return target


def llmc(path: Path, documents: Documents, magic: int = 20240520, dtype: str = "<u2") -> Path:
    """A header of 256 numbers, then the ids."""
    header = np.zeros(256, "<i4")
    ids = np.concatenate(documents).astype(dtype)
    header[:3] = magic, 1, len(ids)
    (target := path.with_suffix(".bin")).write_bytes(header.tobytes() + ids.tobytes())
    return target


def llmc_wide(path: Path, documents: Documents) -> Path:
    return llmc(path, documents, 20240801, "<u4")


def olmo(path: Path, documents: Documents) -> Path:
    """Bare ids under a name that ends in .npy."""
    np.concatenate(documents).astype("<u2").tofile(target := path.with_suffix(".npy"))
    return target


def olmo_indexed(path: Path, documents: Documents) -> Path:
    """The same with dolma's list of documents beside it."""
    ends = np.cumsum([len(ids) for ids in documents])
    rows = (f"{end - len(ids)},{end},doc-{end},a.jsonl.gz,1\n" for ids, end in zip(documents, ends, strict=True))
    with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
        file.writelines(rows)
    return olmo(path, documents)


def numpy_file(path: Path, documents: Documents) -> Path:
    np.save(target := path.with_suffix(".npy"), np.concatenate(documents).astype("<i4"))
    return target


def megatron(path: Path, documents: Documents, code: int = 8, dtype: str = "<u2") -> Path:
    """Ids, and an index of sequences and documents; a path without an ending names both."""
    ids, lengths = np.concatenate(documents).astype(dtype), np.array([len(each) for each in documents], "<i4")
    ids.tofile(path.with_suffix(".bin"))
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * ids.itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index = head + lengths.tobytes() + pointers.tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path


def megatron_wide(path: Path, documents: Documents) -> Path:
    return megatron(path, documents, 4, "<i4")


def datatrove(path: Path, documents: Documents, dtype: str = "<u2") -> Path:
    """Ids, the ends of documents, and who made them."""
    target = path.with_suffix(".ds")
    np.concatenate(documents).astype(dtype).tofile(target)
    ends = np.cumsum([len(ids) for ids in documents]).astype("<u8")
    ends.tofile(f"{target}.index")
    Path(f"{target}.metadata").write_text(f"bytes|{np.dtype(dtype).itemsize}\n{ends[-1]}\n{ends[-1]} T")
    return target


def saved_to_disk(path: Path, documents: Documents) -> Path:
    """A folder as `datasets` saves it, in several files of several batches."""
    from datasets import Dataset

    rows = [each.tolist() for each in documents]
    Dataset.from_dict({"input_ids": rows, "id": list(range(len(rows)))}).save_to_disk(str(path), num_shards=2)
    return path


def parquet(path: Path, documents: Documents) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = path.with_suffix(".parquet")
    pq.write_table(pa.table({"input_ids": [each.tolist() for each in documents]}), target, row_group_size=7)
    return target


WRITERS: tuple[Writer, ...] = (
    nanogpt, llmc, llmc_wide, olmo, olmo_indexed, numpy_file, megatron, megatron_wide, datatrove, saved_to_disk,
    parquet,
)  # fmt: skip
