"""Datasets that the user describes in the configuration, under `data/sources/NAME`."""

import functools
import glob
import re
from collections import Counter
from pathlib import Path

from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.documents import SourceContext
from holdfast.data.sources.chats import FIELDS, Chats, is_chat
from holdfast.data.sources.files import (
    BY_ENDING,
    KNOWN,
    Reading,
    format_of,
    listed_endings,
    read_files,
    saved_splits,
    say_left_out,
    split_files,
)
from holdfast.data.sources.tables import Files, Hub, TableSource
from holdfast.data.sources.templates import Template, check
from holdfast.data.sources.tokens import TokenSource, token_source
from holdfast.errors import ConfigError, UserError

MOST_FILES = 1_000_000  # looked at for one dataset
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def user_source(name: str, config: SourceConfig) -> TableSource | TokenSource:
    """The source that a `data/sources/NAME` section describes."""
    here = f"data/sources/{name}"
    try:
        tokens = token_source(name, config, lambda pattern, format: _matches(pattern, format, f"{here}/path"))
    except UserError as error:
        if isinstance(error, ConfigError) or str(error).startswith(here):
            raise
        raise UserError(f"{here}/path: {error}") from None
    if tokens is not None:
        return tokens
    for key in ("text", "prompt", "answer", "group"):
        template = getattr(config, key)
        if template is not None and (key != "text" or "{" in template):
            check(template, f"{here}/{key}")
    for index, choice in enumerate(config.choices or []):
        check(choice, f"{here}/choices/{index}")
    for label, text in (config.labels or {}).items():
        check(text, f"{here}/labels/{label}")
    local = _files(name, config)
    reading = Reading(config.format, config.sample_by, config.delimiter, config.encodings)
    hub = None if local else _hub(name, config)
    asked = any(getattr(config, key) is not None for key in ("messages", "chat_template", "loss_turns"))
    silent = config.text is None and config.prompt is None
    if asked or (silent and local and holds_chats(local["train"][0], reading)):
        turns, tools = config.loss_turns or "all", config.tools or "tools"
        chats = Chats(config.messages, tools, turns, config.chat_template, config.group, here)
        return TableSource(name, chats, hub, lambda *_: _files(name, config), reading)
    template = Template(
        text=None if config.prompt is not None else config.text or "text",
        prompt=config.prompt,
        answer=config.answer,
        choices=tuple(config.choices or ()),
        label=config.label,
        labels=config.labels or {},
        group=config.group,
    )
    return TableSource(name, template, hub, lambda *_: _files(name, config), reading)


def holds_chats(path: Path, reading: Reading) -> bool:
    """Whether the rows of a file look like chats: by its first row, or the names of its columns."""
    kind = reading.format or format_of(path)
    if kind not in ("jsonl", "json", "parquet", "arrow"):
        return False
    try:
        status = path.stat()
        return _holds_chats(path, reading, status.st_size, status.st_mtime_ns)
    except OSError:
        return False  # who reads it will say why it cannot be read


@functools.lru_cache(maxsize=1024)
def _holds_chats(path: Path, reading: Reading, *_: int) -> bool:
    if (reading.format or format_of(path)) == "parquet":
        import pyarrow.parquet as pq

        try:
            names = pq.read_schema(path).names
        except (OSError, ValueError):  # who reads it will say why it cannot be read
            return False
        if "text" in names or not set(names) & set(FIELDS):
            return False
    try:
        first = next(read_files([path], reading, SourceContext(DataConfig())), None)
    except UserError:
        return False
    return first is not None and is_chat(first.fields)


def _files(name: str, config: SourceConfig) -> Files:
    folder = Path(config.path).expanduser()
    try:
        saved = saved_splits(folder)
    except UserError as error:
        raise UserError(f"data/sources/{name}/path: {error}") from None
    found = saved or {"train": _matches(config.path, config.format, f"data/sources/{name}/path")}
    if not saved and folder.is_dir() and (train := split_files(folder, "train")):
        found = {"train": train, "validation": split_files(folder, "validation")}
    if "train" not in found:
        raise UserError(f"data/sources/{name}/path: {folder} has no split train, only {', '.join(found)}")
    if config.validation is not None and found["train"]:
        found["validation"] = _matches(config.validation, config.format, f"data/sources/{name}/validation")
        if not found["validation"]:
            raise ConfigError(
                f"data/sources/{name}/validation", config.validation, "a file, folder or glob that exists"
            )
        held_out = {path.resolve() for path in found["validation"]}
        found["train"] = [path for path in found["train"] if path.resolve() not in held_out]
        if not found["train"]:
            raise ConfigError(
                f"data/sources/{name}/validation", config.validation, "files other than all of the training files"
            )
    return {split: paths for split, paths in found.items() if paths}


def _matches(pattern: str, format: str | None, where: str) -> list[Path]:
    """The files that a path or a glob names; what is left out is told, and a whole disk is not looked through.

    Args:
        where: of the pattern in the configuration.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        if format is None and format_of(path) is None:
            raise UserError(f"{where}: {path}: an ending that is not known; known are {KNOWN}; or set format")
        return [path]
    if (saved := saved_splits(path)) is not None:
        return saved.get("validation") or saved.get("train") or []
    start = path
    while glob.has_magic(str(start)):
        start = start.parent
    start = start.resolve()
    if start == Path(start.anchor) and (path.is_dir() or "**" in pattern):
        raise UserError(f"{where}: {pattern}: looks through the whole disk; name a folder below {start.anchor}")
    # Path.glob takes no absolute patterns.
    found = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True))  # noqa: PTH207
    files: list[Path] = []
    others: list[Path] = []
    for number, item in enumerate(found):
        if number == MOST_FILES:
            raise UserError(f"{where}: {pattern}: more than {MOST_FILES:,} files; name a smaller folder")
        if item.is_file():
            (files if format is not None or format_of(item) else others).append(item)
    if others and not files:
        endings = listed_endings(Counter(item.suffix for item in others))
        raise UserError(
            f"{where}: {pattern}: only unknown kinds of files ({endings}); known are {KNOWN}; or set format"
        )
    say_left_out(f"{where}: {pattern}", others)
    return sorted(files)


def _hub(name: str, config: SourceConfig) -> Hub:
    if not _HUB_NAME.fullmatch(config.path) or format_of(Path(config.path)):
        raise ConfigError(
            f"data/sources/{name}/path",
            config.path,
            "a file, folder or glob with files that exist, or a hub name such as owner/name",
            "relative paths start from the folder the command runs in",
        )
    splits = {"train": config.train}
    if config.validation is not None:
        splits["validation"] = config.validation
    stream = config.max_documents is not None or config.max_tokens is not None
    return Hub(config.path, config.config, config.revision, splits, stream)


def root_source(name: str, data: DataConfig) -> TableSource | None:
    """A folder under `data/root` with files of texts, used by its bare name."""
    root = data.root_path()
    if root is None or not split_files(root / name, "train"):
        return None
    first = split_files(root / name, "train")[0]
    return TableSource(name, Chats() if holds_chats(first, BY_ENDING) else Template(text="text"))
