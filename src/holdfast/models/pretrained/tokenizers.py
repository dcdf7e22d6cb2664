"""The tokenizer of a pretrained model: found beside it, and written beside it for other programs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.data.tokenizers.base import META_FILE
from holdfast.errors import ConfigError, UserError
from holdfast.execution.files import write_atomically, write_json
from holdfast.models.pretrained.source import locate
from holdfast.types import Json

FILES = (META_FILE, "tokenizer.json", "vocab.json")
EOT, PAD = "<|endoftext|>", "<|pad|>"  # of bytes, where other programs want a text


def tokenizer_for(source: str | None, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a run: the configured one, or that of the pretrained model it starts from.

    Args:
        source: `architecture/from`.
        config: its name must be the default, or the same tokenizer as the model's.
    """
    if source is None:
        return load_tokenizer(config)
    own = find_tokenizer(source)
    asked = config.name != TokenizerConfig().name
    if own is None:
        if asked:
            return load_tokenizer(config)
        raise ConfigError(
            "tokenizer/name", config.name, "a tokenizer, since there is none beside architecture/from", "name one"
        )
    eot = config.eot or _end_of_text(own)
    try:
        found = load_tokenizer(own, eot=eot, pad=config.pad)
    except ConfigError as error:
        if eot is None or config.eot is not None:
            raise
        raise UserError(f"architecture/from: {error}") from None
    if asked and load_tokenizer(dataclasses.replace(config, eot=eot)).fingerprint != found.fingerprint:
        raise ConfigError(
            "tokenizer/name", config.name, f"the tokenizer of architecture/from = {source}", "leave it at its default"
        )
    found.name = str(source)
    return found


def find_tokenizer(source: str | Path) -> Path | None:
    """The tokenizer beside a model, None where there is none."""
    path = locate(source)
    folder = path.parent if path.is_file() else path
    if any((folder / name).is_file() for name in FILES):
        return folder
    llama2c = sorted(folder.glob("tok*.bin"))
    return llama2c[0] if len(llama2c) == 1 else None


def _end_of_text(path: Path) -> str | None:
    """The token that tokenizer_config.json says ends a text; None leaves it to the well-known names."""
    if (path / META_FILE).is_file():
        return None
    try:
        token = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write a tokenizer for Holdfast and for transformers, which both find the same ids."""
    tokenizer.save(folder)
    meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    if meta["kind"] == "bytes":
        bytes_as_library().save(str(folder / "tokenizer.json"))
        meta = {**meta, "eot": EOT, "pad": PAD}
    special = {"bos_token": meta["eot"], "eos_token": meta["eot"], "pad_token": meta["pad"]}
    templates = dict(tokenizer.chat.templates)
    if templates:  # they say `bos_token` and mean that of the model they come from
        special |= {key: token for key, token in tokenizer.chat.tokens.items() if key in special}
    if list(templates) == ["default"]:
        write_atomically(folder / "chat_template.jinja", templates.pop("default"))
    write_json(folder / "special_tokens_map.json", special)
    options: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **special,
    }
    if templates:
        options["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    write_json(folder / "tokenizer_config.json", options)


def bytes_as_library() -> Any:
    """The bytes tokenizer as an object of the `tokenizers` library."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    letters = {value: chr(value) for value in printable} | {value: chr(256 + at) for at, value in enumerate(others)}
    rust = Tokenizer(models.BPE({letters[value]: value for value in range(256)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (EOT, PAD)])
    return rust
