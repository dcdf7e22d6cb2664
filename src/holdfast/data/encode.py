"""From documents to tokens: batches of documents are encoded in the background, in order, in bounded memory."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.documents import Document, digest, normalise
from holdfast.data.store import RECORD
from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.errors import UserError

BATCH_CHARACTERS = 1 << 20  # an encoding takes about 200 bytes a token while it lives
BATCH_DOCUMENTS = 1 << 13


class Encoded(NamedTuple):
    """The tokens of a batch of documents, end-of-text ids included, and a record of each document."""

    flat: NDArray[Any]
    records: NDArray[Any]  # of dtype RECORD
    loss_mask: NDArray[np.uint8] | None = None  # of chats: 1 where the assistant says a token


def encode_documents(documents: list[Document], tokenizer: Tokenizer) -> Encoded:
    """Tokenise documents; prompt and answer separately, so that a prompt's tokens do not depend on the answer."""
    if documents and documents[0].rendered:
        return _encode_chats(documents, tokenizer)
    records = np.zeros(len(documents), RECORD)
    flat, lengths = tokenizer.encode_flat([document.text or document.prompt for document in documents])
    pieces = [flat, *_answers(documents, tokenizer)]
    is_task = np.fromiter((not document.text for document in documents), bool, len(documents))
    records["prompt"] = np.where(is_task, lengths, 0)
    records["length"] = lengths + np.fromiter(map(len, pieces[1:]), np.int64, len(documents))
    records["bytes"] = [len(document.full_text.encode()) for document in documents]
    _note_keys(records, documents)
    ends = np.cumsum(records["length"], dtype=np.int64)
    tails = np.concatenate(pieces[1:])  # of each document what follows its first text, the end of text included
    is_tail = np.ones(len(flat) + len(tails), bool)
    starts = ends - records["length"]
    is_tail[np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(len(flat))] = False
    result = np.empty(len(is_tail), tokenizer.dtype)
    result[~is_tail] = flat
    result[is_tail] = tails
    return Encoded(result, records)


def _note_keys(records: NDArray[Any], documents: list[Document]) -> None:
    keys = [digest(normalise(document.subject)) for document in documents]
    groups = (document.key if document.group else key for document, key in zip(documents, keys, strict=True))
    records["key"] = np.frombuffer(b"".join(keys), "<u8")
    records["group"] = np.frombuffer(b"".join(groups), "<u8")


def _encode_chats(documents: list[Document], tokenizer: Tokenizer) -> Encoded:
    """Tokenise rendered chats as they are; the prompt of one is all before the first token of the assistant.

    A token counts as the assistant's when any of its characters is. The end of text is added, outside the loss, unless
    the template itself ended with it.
    """
    records = np.zeros(len(documents), RECORD)
    ids, masks = [], []
    for index, placed in enumerate(tokenizer.encode_rendered([document.rendered for document in documents])):
        own, mask = placed.ids, np.zeros(len(placed.ids), np.uint8)
        for start, end in documents[index].spans:
            empty = (placed.starts == placed.ends) & (placed.starts >= start)
            mask[(placed.starts < end) & ((placed.ends > start) | empty)] = 1
        if not len(own) or own[-1] != tokenizer.eot_id:
            own, mask = np.append(own, tokenizer.eot_id), np.append(mask, np.uint8(0))
        records["length"][index] = len(own)
        records["prompt"][index] = int(mask.argmax())  # 0 where the assistant says nothing
        ids.append(own)
        masks.append(mask)
    records["bytes"] = [len(document.rendered.encode()) for document in documents]
    _note_keys(records, documents)
    return Encoded(np.concatenate(ids).astype(tokenizer.dtype), records, np.concatenate(masks))


def _answers(documents: list[Document], tokenizer: Tokenizer) -> list[NDArray[Any]]:
    """The tokens of each document's answer and the end of text; equal answers, as labels are, are encoded once."""
    unique = {document.answer: None for document in documents}
    flat, lengths = tokenizer.encode_flat(list(unique))
    ended = [np.append(ids, tokenizer.eot_id) for ids in np.split(flat, np.cumsum(lengths)[:-1])]
    of = dict(zip(unique, ended, strict=True))
    return [of[document.answer] for document in documents]


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about BATCH_CHARACTERS characters."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.prompt) + len(document.answer) + len(document.rendered)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    parts: Iterable[list[Document] | Encoded], tokenizer: Tokenizer, workers: int, saved: Path
) -> Iterator[Encoded]:
    """Encode batches in the background and yield them in order, at most a few ahead.

    Args:
        parts: batches of documents, read in the calling thread; those that are encoded already go through as they are.
        tokenizer: used directly when workers is 0: its Rust code runs on all cores without Python's lock.
        workers: processes to use instead, for machines where one Python process cannot feed all cores.
        saved: folder of the saved tokenizer, which worker processes load.
    """
    if workers == 0:
        # One batch at a time: the library spreads each over all cores by itself.
        with ThreadPoolExecutor(1, "tokenise") as threads:
            yield from _in_order(threads, lambda batch: encode_documents(batch, tokenizer), parts, ahead=2)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the locks of JAX's threads
    try:
        with ProcessPoolExecutor(workers, spawn, _start_worker, (str(saved), os.getpid())) as processes:
            yield from _in_order(processes, _encode_in_worker, parts, ahead=2 * workers)
    except BrokenProcessPool:
        raise UserError(
            f"data/workers: a tokenising process of {workers} ended before its work; set data/workers to 0, and in a "
            "script of your own keep what runs below `if __name__ == '__main__':`"
        ) from None


def _in_order(
    pool: Executor,
    function: Callable[[list[Document]], Encoded],
    parts: Iterable[list[Document] | Encoded],
    ahead: int,
) -> Iterator[Encoded]:
    pending: deque[Future[Encoded]] = deque()
    try:
        for part in parts:
            if isinstance(part, Encoded):
                done: Future[Encoded] = Future()
                done.set_result(part)
                pending.append(done)
            else:
                pending.append(pool.submit(function, part))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


_worker_tokenizer: Tokenizer | None = None  # set once in each worker process


def _start_worker(saved: str, parent: int) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(Path(saved))


def _encode_in_worker(batch: list[Document]) -> Encoded:
    assert _worker_tokenizer is not None
    return encode_documents(batch, _worker_tokenizer)


def die_with_parent(parent: int) -> None:
    """Make this process end when its parent is gone, however the parent ended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        # The signal is tied to the parent's thread on Linux and absent elsewhere: watch the process as well.
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
