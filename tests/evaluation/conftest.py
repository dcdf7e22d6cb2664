"""A tiny untrained model and small sources for the tests of evaluations."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.data.documents import Document
from holdfast.data.encode import encode_documents
from holdfast.data.rows import Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.data.store import LEDGER, TokenStore
from holdfast.data.tokenizers.bytelevel import BytesTokenizer
from holdfast.evaluation.forward import Runner
from holdfast.models.config import ModelSpec
from holdfast.models.family import Model, decoder

TOKENIZER = BytesTokenizer()


class Tiny(NamedTuple):
    """A model, its numbers and two sets of parameters."""

    model: Model
    spec: ModelSpec
    params: Any
    other: Any
    runner: Runner  # one for all tests, so that shapes are compiled once

    def logits(self, tokens: Sequence[int], params: Any = None) -> np.ndarray:
        """Logits of one row, read alone; padding on its right changes nothing and saves compilations."""
        padded = np.zeros((1, self.spec.block_size), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = _logits(self.model, self.params if params is None else params, padded)
        return np.asarray(logits[0, : len(tokens)], np.float64)

    def log_p(self, tokens: Sequence[int], params: Any = None) -> np.ndarray:
        """Log-probabilities (T, V) of one row, in float64."""
        logits = self.logits(tokens, params)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Model, params: Any, tokens: np.ndarray) -> jax.Array:
    return model.module.apply({"params": params}, tokens)


def make_tiny(positions: str = "learned", block_size: int = 64) -> Tiny:
    spec = ModelSpec(
        2, 32, 4, 2, 8, 64, vocab_size=320, block_size=block_size, positions=positions, tie_embeddings=False
    )
    model = decoder(spec)

    def init(seed: int) -> Any:
        params = nn.unbox(model.module.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32)))["params"]
        return jax.tree.map(lambda leaf: leaf * 4, params)  # far from uniform, so that mistakes show

    return Tiny(model, spec, init(0), init(1), Runner(model))


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture(scope="session")
def rotary() -> Tiny:
    return make_tiny("rotary")


def store(folder: Path, documents: list[Document], kind: str = "text") -> TokenStore:
    """A store with the fields that rows read, without files but the tokens."""
    flat, records, _ = encode_documents(documents, TOKENIZER)
    folder.mkdir(parents=True, exist_ok=True)
    flat.tofile(folder / "tokens.bin")
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(records["length"], dtype=np.int64)]))
    np.save(folder / "prompt_lengths.npy", records["prompt"])
    np.save(folder / "doc_bytes.npy", records["bytes"])
    np.save(folder / "keys.npy", np.stack([records["key"], records["group"]], 1))
    np.save(folder / "token_bytes.npy", TOKENIZER.token_bytes())
    ledger = {
        "source": "made",
        "split": "validation",
        "kind": kind,
        "fingerprint": "made",
        "documents": len(documents),
        "tokens": len(flat),
        "bytes": int(records["bytes"].sum()),
        "dtype": flat.dtype.str,
    }
    (folder / LEDGER).write_text("{}")
    return TokenStore(folder, ledger)


def make_rows(folder: Path, documents: list[Document], style: DatasetStyle, block_size: int = 64) -> Rows:
    return Rows(store(folder, documents), style, block_size)
