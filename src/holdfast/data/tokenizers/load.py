"""Find a tokenizer by what `tokenizer/name` says: `bytes`, a file, a folder or a hub name."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers.base import META_FILE, Tokenizer
from holdfast.data.tokenizers.bytelevel import BytesTokenizer
from holdfast.errors import ConfigError
from holdfast.types import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

EXPECTED = "bytes, a tokenizer.json, a folder with it or with vocab.json and merges.txt, or a hub name"


def load_tokenizer(name: str | Path | TokenizerConfig, *, eot: str | None = None, pad: str | None = None) -> Tokenizer:
    """The tokenizer of that name, path or config.

    Args:
        name: `bytes`, a path, a hub name, or a TokenizerConfig that holds all three.
        eot: its end-of-text token, where that is not a well-known one.
        pad: its padding token, likewise.
    """
    if isinstance(name, TokenizerConfig):
        return load_tokenizer(name.name, eot=name.eot, pad=name.pad)
    if str(name) == "bytes":
        for path, value in (("tokenizer/eot", eot), ("tokenizer/pad", pad)):
            if value is not None:
                raise ConfigError(path, value, "null: the bytes tokenizer has its own special ids 256 and 257")
        return BytesTokenizer()
    from holdfast.data.tokenizers.bpe import LibraryTokenizer

    folder = Path(name).expanduser()
    if (folder / META_FILE).is_file():
        meta = _read_meta(folder / META_FILE)
        if meta["kind"] == "bytes":
            return BytesTokenizer()
        rust = _read_json(folder / "tokenizer.json")
        return LibraryTokenizer(rust, meta["name"], eot or meta["eot"], pad or meta["pad"])
    if folder.suffix == ".bin" and folder.is_file():
        from holdfast.data.tokenizers.llama2c import read_llama2c

        # Its models saw <s> before every story and never </s>: that is what parts documents.
        return LibraryTokenizer(read_llama2c(folder), str(name), eot or "<s>", pad)
    return LibraryTokenizer(_open(folder, str(name)), str(name), eot, pad)


def _read_meta(path: Path) -> Json:
    """What kind of tokenizer a folder holds, as `write_meta` wrote it."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        whole = meta["kind"] == "bytes" or isinstance(meta["name"], str)
        whole &= all(isinstance(meta.get(key), str | None) for key in ("eot", "pad"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("tokenizer/name", str(path.parent), EXPECTED, f"{path.name} is damaged: {error!r}") from None
    if not whole:
        raise ConfigError("tokenizer/name", str(path.parent), EXPECTED, f"{path.name} is damaged")
    return {"eot": None, "pad": None, **meta}


def _open(path: Path, name: str) -> "RustTokenizer":
    from holdfast.data.tokenizers.bpe import from_vocab_and_merges

    if path.is_file():
        return _read_json(path)
    if (path / "tokenizer.json").is_file():
        return _read_json(path / "tokenizer.json")
    if path.is_dir():
        missing = [file for file in ("vocab.json", "merges.txt") if not (path / file).is_file()]
        if missing:
            raise ConfigError("tokenizer/name", name, EXPECTED, f"{path} has no {' and no '.join(missing)}")
        try:
            return from_vocab_and_merges(path)
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(
                "tokenizer/name", name, EXPECTED, f"vocab.json or merges.txt is broken: {error}"
            ) from None
    return _from_hub(name)


def _read_json(path: Path) -> "RustTokenizer":
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError("tokenizer/name", str(path), "a tokenizer.json", f"it cannot be read: {error}") from None


def _from_hub(name: str) -> "RustTokenizer":
    """A tokenizer.json of the hub: from the local cache when it is there, without touching the network."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json"):
        raise ConfigError("tokenizer/name", name, EXPECTED, "there is no such file or folder")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            found = hf_hub_download(name, "tokenizer.json", local_files_only=True)
        except LocalEntryNotFoundError:
            require_hub()
            found = hf_hub_download(name, "tokenizer.json")
    except Exception as error:  # network, permission, unknown name: each has its own exception type
        fix = f"no such path, and the hub's {name}/tokenizer.json cannot be had ({type(error).__name__})"
        raise ConfigError("tokenizer/name", name, EXPECTED, fix) from None
    return _read_json(Path(found))


def require_hub() -> None:
    """Raise an OSError at once where the hub's name cannot even be looked up; its client would retry for long."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
