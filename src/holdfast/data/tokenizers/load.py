"""Find a tokenizer by what `tokenizer/name` says: `bytes`, a file, a folder or a hub name."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers.base import META_FILE, ChatFormat, Tokenizer
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
        found = LibraryTokenizer(rust, meta["name"], eot or meta["eot"], pad or meta["pad"])
        found.chat = ChatFormat(**meta["chat"]) if "chat" in meta else chat_format(folder)
        return found
    if folder.suffix == ".bin" and folder.is_file():
        from holdfast.data.tokenizers.llama2c import read_llama2c

        # Its models saw <s> before every story and never </s>: that is what parts documents.
        return LibraryTokenizer(read_llama2c(folder), str(name), eot or "<s>", pad)
    rust = _open(folder, str(name))
    found = LibraryTokenizer(rust, str(name), eot, pad)
    if folder.exists():
        found.chat = chat_format(folder if folder.is_dir() else folder.parent)
    else:
        found.chat = _hub_chat_format(str(name))
    return found


def _read_meta(path: Path) -> Json:
    """What kind of tokenizer a folder holds, as `write_meta` wrote it."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        whole = meta["kind"] == "bytes" or isinstance(meta["name"], str)
        whole &= all(isinstance(meta.get(key), str | None) for key in ("eot", "pad"))
        for names in ChatFormat(**meta.get("chat", {})):
            whole &= all(isinstance(text, str) for text in (*names, *names.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("tokenizer/name", str(path.parent), EXPECTED, f"{path.name} is damaged: {error!r}") from None
    if not whole:
        raise ConfigError("tokenizer/name", str(path.parent), EXPECTED, f"{path.name} is damaged")
    return {"eot": None, "pad": None, **meta}


def chat_format(folder: Path) -> ChatFormat:
    """The chat templates beside a tokenizer: of chat_template.jinja, or else of tokenizer_config.json."""
    config = _settings(folder / "tokenizer_config.json")
    named = _settings(folder / "special_tokens_map.json") | config
    contents = {
        key: token.get("content") if isinstance(token, dict) else token
        for key, token in named.items()
        if key.endswith("_token")
    }
    tokens = {key: token for key, token in contents.items() if isinstance(token, str)}
    own = config.get("chat_template")
    templates = {"default": own} if isinstance(own, str) else {}
    if isinstance(own, list):  # several, by name
        found = ((each.get("name"), each.get("template")) for each in own if isinstance(each, dict))
        templates = {key: text for key, text in found if isinstance(key, str) and isinstance(text, str)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files |= {"default": file} if (file := folder / "chat_template.jinja").is_file() else {}
    for key, path in files.items():
        try:
            templates[key] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError("tokenizer/name", str(folder), EXPECTED, f"{path.name} cannot be read: {error}") from None
    return ChatFormat(templates, tokens)


def _settings(path: Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tokenizer/name", str(path), "a file of settings as JSON", str(error)) from None
    return found if isinstance(found, dict) else {}


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


def _hub_chat_format(name: str) -> ChatFormat:
    """The chat templates of a tokenizer of the hub; a file that is not there is none."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    folders = set()
    for file in ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        found = try_to_load_from_cache(name, file)
        if found is None:  # never asked for: the cache also remembers what does not exist
            try:
                require_hub()
            except Exception:  # no network
                break
            try:
                found = hf_hub_download(name, file)
            except Exception:  # no such file, no permission: the library has a type for each
                continue
        if isinstance(found, str):
            folders.add(Path(found).parent)
    return chat_format(folders.pop()) if len(folders) == 1 else ChatFormat()


def require_hub() -> None:
    """Raise an OSError at once where the hub's name cannot even be looked up; its client would retry for long."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
