"""Datasets that the user describes in the configuration, under `data/sources/NAME`."""

import glob
import re
from pathlib import Path

from holdfast.data.config import DataConfig, SourceConfig
from holdfast.data.sources.files import format_of, split_files
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
        tokens = token_source(name, config, _matches)
    except ConfigError:
        raise
    except UserError as error:
        raise UserError(f"{here}/path: {error}") from None
    if tokens is not None:
        return tokens
    for key in ("prompt", "answer", "group"):
        template = getattr(config, key)
        if template is not None:
            check(template, f"{here}/{key}")
    for index, choice in enumerate(config.choices or []):
        check(choice, f"{here}/choices/{index}")
    for label, text in (config.labels or {}).items():
        check(text, f"{here}/labels/{label}")
    template = Template(
        text=None if config.prompt is not None else config.text or "text",
        prompt=config.prompt,
        answer=config.answer,
        choices=tuple(config.choices or ()),
        label=config.label,
        labels=config.labels or {},
        group=config.group,
    )
    hub = None if _files(name, config) else _hub(name, config)
    return TableSource(name, template, hub, lambda *_: _files(name, config), config.format, config.sample_by)


def _files(name: str, config: SourceConfig) -> Files:
    try:
        found = {"train": _matches(config.path, config.format)}
    except UserError as error:
        raise UserError(f"data/sources/{name}/path: {error}") from None
    folder = Path(config.path).expanduser()
    if folder.is_dir() and (train := split_files(folder, "train")):
        found = {"train": train, "validation": split_files(folder, "validation")}
    if config.validation is not None and found["train"]:
        found["validation"] = _matches(config.validation, config.format)
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


def _matches(pattern: str, format: str | None) -> list[Path]:
    """The files that a path or a glob names; one that looks through a whole disk is refused."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    start = path
    while glob.has_magic(str(start)):
        start = start.parent
    start = start.resolve()
    if start == Path(start.anchor) and (path.is_dir() or "**" in pattern):
        raise UserError(f"{pattern}: looks through the whole disk; name a folder below {start.anchor}")
    # Path.glob takes no absolute patterns.
    found = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True))  # noqa: PTH207
    files = []
    for number, item in enumerate(found):
        if number == MOST_FILES:
            raise UserError(f"{pattern}: more than {MOST_FILES:,} files; name a smaller folder")
        if item.is_file() and (format is not None or format_of(item)):
            files.append(item)
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
    return TableSource(name, Template(text="text"))
