"""Flipped bits, cut and missing files in prepared stores, in what killed preparations left and in notes beside them.

In one process, without JAX: a store is damaged, then asked for and read as a run does, in every style. What is read
must be what it was, to the last bit.
"""

import contextlib
import functools
import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "a flipped bit, a cut or a missing file of a prepared store; noticed, and what is read is identical"
DOCUMENTS = 600


def tries(seed: int) -> Iterator[Try]:
    """Damages, each of a file and a place that its number chooses."""
    number = 0
    while True:
        chance = random.Random(f"stores {seed} {number}")
        act = unfinished if number % 8 == 7 else published
        yield Try(f"{act.__name__} {seed} {number}", functools.partial(act, chance))
        number += 1


@functools.cache
def options() -> Any:
    """A dataset of questions and answers, and where its stores go."""
    from holdfast.data.config import DataConfig, SourceConfig

    chance = random.Random(0)
    file = scratch() / "stores" / "questions.jsonl"
    file.parent.mkdir(parents=True)
    rows = [{"q": f"{n} " + "x" * chance.randrange(300), "a": str(chance.random())} for n in range(DOCUMENTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(file), prompt="{q}", answer="{a}")
    return DataConfig(cache=str(file.parent / "cache"), sources={"questions": source})


def read() -> tuple[list[bytes], str]:
    """All that a run reads of the store, and what was said on the way."""
    from holdfast.data.leaks import check_leaks
    from holdfast.data.prepare import prepare
    from holdfast.data.rows import Rows
    from holdfast.data.sampling import DatasetStyle
    from holdfast.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer("bytes")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        found = prepare("questions", "train", data=options(), tokenizer=tokenizer, progress=False)
        arrays: list[Any] = [found.keys, found.doc_bytes, found.token_bytes]
        for style in DatasetStyle:
            rows = Rows(found, style, 96)
            arrays += rows.rows(range(len(rows)))
        leaks = check_leaks({"questions": found}, {"questions": found}, tokenizer, cache=options().cache_path())
    return [array.tobytes() for array in arrays] + [repr(leaks).encode()], said.getvalue()


@functools.cache
def whole() -> tuple[Path, list[bytes]]:
    """A copy of the good cache, and what is read from it."""
    wanted, _ = read()
    copy = options().cache_path().with_name("copy")
    shutil.copytree(options().cache_path(), copy)
    return copy, wanted


def restored() -> Path:
    """The cache as it was before it was damaged."""
    copy, _ = whole()
    cache: Path = options().cache_path()
    shutil.rmtree(cache)
    shutil.copytree(copy, cache)
    return cache


def damaged(path: Path, chance: random.Random) -> str:
    """Damage a file; returns how."""
    kind = chance.choice(("flip",) * 8 + ("cut", "missing", "empty"))
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(content))
    else:
        path.write_bytes(bytes(content[: chance.randrange(len(content))] if kind == "cut" else b""))
    return kind


def published(chance: random.Random) -> Outcome:
    """Damage to a finished store, or to a note about it."""
    cache = restored()
    files = [path for path in sorted(cache.rglob("*")) if path.is_file() and not path.name.endswith(".lock")]
    path = chance.choice([path for path in files if "tokenizers" not in path.parts])
    kind = damaged(path, chance)
    return judged(f"{kind}: {'note of leaks' if path.parent.name == 'leaks' else path.name}")


def unfinished(chance: random.Random) -> Outcome:
    """Damage to what a killed preparation left."""
    from holdfast.data import prepare, store

    cache = restored()
    shutil.rmtree(store.stores_folder(cache))
    shutil.rmtree(cache / "leaks", ignore_errors=True)
    before = store.finish

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    store.finish = killed  # type: ignore[assignment]  # the point at which it is killed
    try:
        prepare.prepare("questions", "train", data=options(), tokenizer=_tokenizer(), progress=False)
    except KeyboardInterrupt:
        pass
    finally:
        store.finish = before
    (partial,) = store.stores_folder(cache).glob(".*.partial")
    path = chance.choice([partial / "tokens.bin", partial / "documents.bin", partial / "journal"])
    kind = damaged(path, chance)
    return judged(f"unfinished, {kind}: {path.name}")


def _tokenizer() -> Any:
    from holdfast.data.tokenizers import load_tokenizer

    return load_tokenizer("bytes")


def judged(what: str) -> Outcome:
    """Whether all that is read is as it was, and whether damage was named."""
    found, said = read()
    if found != whole()[1]:
        return Outcome(what, "other rows are read", held=False)
    return Outcome(what, "noticed, identical" if "damaged" in said else "identical")
