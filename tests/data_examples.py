"""Small stores and raw data for the tests of the data side."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data import store
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document
from holdfast.data.encode import encode_documents
from holdfast.data.store import TokenStore
from holdfast.data.tokenizers import Tokenizer
from holdfast.data.tokenizers.bytelevel import BytesTokenizer

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[2] / "shared"))
needs_shared = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason="the shared real data is not here (HOLDFAST_SHARED names its folder)"
)
GPT2 = SHARED / "tokenizers" / "gpt2"


def make_store(
    folder: Path, documents: Sequence[Document], tokenizer: Tokenizer | None = None, name: str = "made"
) -> TokenStore:
    """A store of documents, without preparation."""
    tokenizer = tokenizer or BytesTokenizer()
    flat, records, mask = encode_documents(list(documents), tokenizer)
    path = folder / name
    path.mkdir(parents=True)
    flat.tofile(path / "tokens.bin")
    records.tofile(path / "documents.bin")
    if mask is not None:
        mask.tofile(path / store.LOSS_MASK)
    ledger = {
        "format": store.FORMAT,
        "source": name,
        "split": "train",
        "kind": "chat" if mask is not None else "task" if documents[0].prompt else "text",
        "fingerprint": name,
        "documents": len(documents),
        "tokens": len(flat),
        "bytes": int(records["bytes"].sum()),
        "dtype": np.dtype(tokenizer.dtype).str,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
    }
    store.finish(path, ledger, tokenizer.token_bytes())
    return TokenStore.open(path)


def texts(*contents: str) -> list[Document]:
    """Text documents."""
    return [Document(str(index), text=text) for index, text in enumerate(contents)]


def tasks(*pairs: tuple[str, str]) -> list[Document]:
    """Task documents, prompt and answer."""
    return [Document(str(index), prompt=prompt, answer=answer) for index, (prompt, answer) in enumerate(pairs)]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """A file of JSON lines; rows that are bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def data_config(tmp_path: Path, **values: Any) -> DataConfig:
    """A config with its cache, and the folder of raw data, under a temporary folder."""
    return DataConfig(**{"root": str(tmp_path / "root"), "cache": str(tmp_path / "cache"), **values})


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
