"""Configuration: dataclasses <-> slash paths <-> YAML and command-line overrides.

A class declares its options with `field("training/batch_size", default=512, help="...")`. `build` collects
the fields of several classes into one OmegaConf tree, `configure` makes a typed, validated instance of a
class from such a tree, and `configuration` makes a tree the current one. A dataclass without a path of its
own inside another (`fade: FadeConfig = FadeConfig()`) is collected and filled by its own fields' paths; a
dataclass below a path (`List[Sampling]`) is filled from a mapping by field name.
"""

import contextlib
import copy
import dataclasses
import enum
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from holdfast.conversion import (
    INTERPOLATION,
    REQUIRED,
    check,
    convert,
    from_yaml,
    has_default,
    hints,
    key_of,
    respelled,
    spelled,
    to_yaml_text,
    type_name,
)
from holdfast.errors import ConfigError, UserError, unknown_key
from holdfast.types import Json, JsonView, Tree

C = TypeVar("C")

Resume = Literal["free", "planned", "unused", "branch", "fixed"]
Tells = Literal["config", "seed", "nothing"]

_NOTHING = dataclasses.MISSING
JOB_KEY = "job"


def field(
    path: str,
    *,
    default: Any = _NOTHING,
    default_factory: Any = _NOTHING,
    help: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] | None = None,
    resume: Resume = "fixed",
    tells: Tells = "config",
    replaced_by: str = "",
) -> Any:
    """A dataclass field that lives at a slash path of the configuration.

    Args:
        path: where the value stands, for example `training/batch_size`.
        default: its default; or `default_factory` for lists.
        help: one line that `configure` writes as a comment.
        ge, gt, le, lt: bounds of a number, or of every number in a list.
        choices: the values that are allowed.
        resume: whether a run may go on with another value. `free`: always; `planned`: while the plan's past stays the
            same; `unused`: until a step has used it; `branch`: in a branch of the run; `fixed`: never.
        tells: what another value makes of a run: another `config`, another `seed` of one, or `nothing` else.
        replaced_by: the path of another way to write the same; beside it this one stays at its default.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Small:
    ...     rows: int = field("training/rows", default=8, ge=1)
    >>> configure(Small, build(Small)).rows
    8
    """
    bounds = {name: limit for name, limit in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if limit is not None}
    metadata = {"path": path, "help": help, "bounds": bounds, "choices": choices}
    metadata |= {"resume": resume, "tells": tells, "replaced_by": replaced_by}
    if default_factory is not _NOTHING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    if default is not _NOTHING:
        return dataclasses.field(default=default, metadata=metadata)
    return dataclasses.field(metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One option of a configuration: a declared field and where it came from."""

    path: str
    type: Any
    default: Any  # dataclasses.MISSING where there is none
    help: str
    bounds: dict[str, float]
    choices: Sequence[Any] | None
    owner: str
    resume: Resume = "fixed"
    tells: Tells = "config"
    replaced_by: str = ""


def schema(*classes: type) -> dict[str, Entry]:
    """All options that the classes declare, by path; contradictory declarations raise ValueError."""
    entries: dict[str, Entry] = {}
    for cls in classes:
        for entry in _entries_of(cls):
            known = entries.setdefault(entry.path, entry)
            if (known.type, plain(known.default)) != (entry.type, plain(entry.default)):
                raise ValueError(
                    f"{entry.path} is declared twice, by {known.owner} ({type_name(known.type)} = {known.default!r}) "
                    f"and by {entry.owner} ({type_name(entry.type)} = {entry.default!r})"
                )
    for path, entry in entries.items():
        for parent in itertools.accumulate(path.split("/")[:-1], "{}/{}".format):
            if parent in entries:
                raise ValueError(
                    f"{parent} ({entries[parent].owner}) is a value and cannot also hold {path} ({entry.owner})"
                )
    return entries


def entry_of(path: str, entries: Mapping[str, Entry]) -> Entry | None:
    """The option that a path is, or lies in, as `stages/0/beta` lies in `stages`; None where there is none."""
    while path not in entries and "/" in path:
        path = path.rpartition("/")[0]
    return entries.get(path)


def _entries_of(cls: type, given: Any = None) -> Iterator[Entry]:
    """The options of a class; `given` is the instance that an outer class has as its default."""
    for item in dataclasses.fields(cls):
        kind = hints(cls)[item.name]
        default = _default(item) if given is None else getattr(given, item.name)
        if "path" not in item.metadata:
            if not dataclasses.is_dataclass(kind):
                raise ValueError(f"{cls.__name__}.{item.name} has no path: declare it with field('some/path', ...)")
            yield from _entries_of(typing.cast(type, kind), None if default is _NOTHING else default)
            continue
        yield Entry(
            path=item.metadata["path"],
            type=kind,
            default=default,
            help=item.metadata["help"],
            bounds=item.metadata["bounds"],
            choices=item.metadata["choices"],
            owner=cls.__name__,
            resume=item.metadata["resume"],
            tells=item.metadata["tells"],
            replaced_by=item.metadata["replaced_by"],
        )


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is _NOTHING else item.default_factory()


def build(*classes: type) -> DictConfig:
    """The default configuration of the classes as one OmegaConf tree."""
    return OmegaConf.create(_defaults(schema(*classes)))


def _defaults(entries: Mapping[str, Entry]) -> Json:
    tree: Json = {}
    for path, entry in entries.items():
        _put(tree, path, REQUIRED if entry.default is _NOTHING else plain(entry.default))
    return tree


def plain(value: Any) -> Any:
    """A value as YAML can hold it: enums by name, dataclasses as mappings, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key_of(item): plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _put(tree: Json, path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


_current: ContextVar[DictConfig | None] = ContextVar("holdfast_configuration", default=None)


@contextlib.contextmanager
def configuration(cfg: DictConfig) -> Iterator[DictConfig]:
    """Make a tree the one that `configure` reads inside the `with` block."""
    token = _current.set(cfg)
    try:
        yield cfg
    finally:
        _current.reset(token)


def current() -> DictConfig:
    """The tree of the innermost `configuration` block."""
    cfg = _current.get()
    if cfg is None:
        raise RuntimeError("no configuration is active: wrap the call in `with configuration(cfg):`")
    return cfg


def configure(cls: type[C], cfg: DictConfig | None = None) -> C:
    """A validated instance of a config class from a tree (the current one unless given)."""
    tree = _container(current() if cfg is None else cfg)
    return _instance(cls, tree)


def _container(cfg: DictConfig) -> Json:
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return typing.cast(Json, tree)


def _instance(cls: type[C], tree: Json, given: Any = None) -> C:
    values: Json = {}
    for item in dataclasses.fields(typing.cast(Any, cls)):
        kind = hints(typing.cast(Any, cls))[item.name]
        if "path" not in item.metadata:
            default = _default(item) if given is None else getattr(given, item.name)
            values[item.name] = _instance(kind, tree, None if default is _NOTHING else default)
            continue
        path = item.metadata["path"]
        found = _find(tree, path)
        if found is not _NOTHING:
            values[item.name] = convert(found, kind, path)
            check(values[item.name], item.metadata, path)
        elif given is not None:
            values[item.name] = getattr(given, item.name)
        elif not has_default(item):
            raise ConfigError(path, None, type_name(kind), "this value has no default and must be set")
    return cls(**values)


def _find(tree: Tree, path: str) -> Any:
    for name in path.split("/"):
        if not isinstance(tree, dict) or name not in tree:
            return _NOTHING
        tree = tree[name]
    return tree


# PyYAML lets ValueError (0x_) and RecursionError (an anchor inside itself) through.
_PARSE_ERRORS = (YAMLError, OmegaConfBaseException, ValueError, RecursionError)


def read_yaml(path: Path) -> Json:
    """The mapping in a YAML file, as plain containers."""
    try:
        loaded = from_yaml(path.read_text(encoding="utf-8"))
        loaded = {} if loaded is None else loaded
        if isinstance(loaded, dict):
            loaded = _container(OmegaConf.create(loaded))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; `holdfast configure JOB {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except _PARSE_ERRORS as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected a mapping of sections such as `training:`, got {type(loaded).__name__}")
    return typing.cast(Json, loaded)


def merge(classes: Sequence[type], values: JsonView, overrides: Sequence[str] = ()) -> DictConfig:
    """Defaults of the classes, then a mapping of values, then `path=value` overrides.

    Keys that no class declares are errors; every value is checked against its declared type and bounds.
    """
    entries = schema(*classes)
    tree = _defaults(entries)
    given = _container(values) if isinstance(values, DictConfig) else copy.deepcopy(dict(values))
    _merge_into(tree, given, "", entries)
    for override in overrides:
        _override(tree, override, entries)
    for path, entry in entries.items():
        found = _find(tree, path)
        # A file may leave open what has no default, never what has one.
        if found is not _NOTHING and not (found == REQUIRED and entry.default is _NOTHING):
            found = respelled(found, entry.type, path)
            _put(tree, path, found)
            check(convert(found, entry.type, path), {"choices": entry.choices, "bounds": entry.bounds}, path)
    return OmegaConf.create(tree)


def _merge_into(tree: Json, values: JsonView, prefix: str, entries: Mapping[str, Entry]) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in entries:
            _put(tree, path, value)
        elif any(known.startswith(path + "/") for known in entries):
            if value is None:
                continue
            if not isinstance(value, dict):
                raise ConfigError(path, value, "a section with keys below it", f"write {path}/KEY instead")
            _merge_into(tree, value, path + "/", entries)
        else:
            raise unknown_key(path, list(entries))


def _override(tree: Json, override: str, entries: Mapping[str, Entry]) -> None:
    key, separator, text = override.partition("=")
    path = key.strip().replace(".", "/").strip("/")
    if not separator or not path:
        raise UserError(
            f"{override[:200]}: expected an override of the form path=value, such as training.batch_size=32"
        )
    owner = next((known for known in entries if path == known or path.startswith(known + "/")), None)
    value = _parse(text, override)
    if isinstance(value, bool | int | float) and owner == path and entries[path].type in (str, str | None):
        value = text  # 007 and 1e5 are as good a text as any
    if owner is None:
        _merge_into(tree, _nest(path, value), "", entries)
    else:
        _set_inside(tree, path, owner, value)


def _parse(text: str, override: str) -> Any:
    if INTERPOLATION in text:
        raise UserError(f"{override[:200]}: values have no ${{...}} interpolation; write the value itself")
    try:
        return _container(OmegaConf.create({"value": from_yaml(text)}))["value"]
    except _PARSE_ERRORS as error:
        raise UserError(f"{override[:200]}: the value cannot be parsed: {error}") from None


def _nest(path: str, value: Any) -> Json:
    tree: Json = {}
    _put(tree, path, value)
    return tree


def _set_inside(tree: Tree, path: str, owner: str, value: Any) -> None:
    """Set a value at or below a declared path, through lists by index."""
    *parents, last = path.split("/")
    for name in parents:
        if isinstance(tree, dict) and tree.get(name) is None and path != owner:
            tree[name] = {}
        tree = tree[_key(tree, name, path)]
    tree[last if isinstance(tree, dict) else _key(tree, last, path)] = value


def _key(tree: Tree, name: str, path: str) -> str | int:
    if isinstance(tree, list):
        if not name.isdecimal() or int(name) >= len(tree):
            raise UserError(f"{path}: {name!r} is not an index into a list of {len(tree)}")
        return int(name)
    if not isinstance(tree, dict) or name not in tree:
        raise UserError(f"{path}: there is nothing at {name!r} to set a value in")
    return name


def to_yaml(cfg: DictConfig, classes: Sequence[type], job: str) -> str:
    """A configuration as YAML, each option with its help text as a comment above it."""
    entries = schema(*classes)
    tree = _container(cfg)
    lines = ["# which job this configuration is for", f"{JOB_KEY}: {job}"]
    _write_section(lines, tree, "", entries, 0)
    return "\n".join(lines) + "\n"


def _write_section(lines: list[str], tree: Json, prefix: str, entries: Mapping[str, Entry], depth: int) -> None:
    indent = "  " * depth
    for name, value in tree.items():
        path = prefix + name
        if path not in entries:
            if depth == 0:
                lines.append("")
            lines.append(f"{indent}{_dumped({name: None}).removesuffix(' null')}")
            _write_section(lines, value, path + "/", entries, depth + 1)
            continue
        entry = entries[path]
        if entry.help:
            extra = f" ({', '.join(spelled(choice) for choice in entry.choices)})" if entry.choices else ""
            lines.append(f"{indent}# {entry.help}{extra}")
        lines.extend(indent + line for line in _dumped({name: value}).split("\n"))


def _dumped(value: Any) -> str:
    return to_yaml_text(value).rstrip("\n")


def flatten(cfg: DictConfig, classes: Sequence[type]) -> Json:
    """Every declared option and its plain value, by path."""
    tree = _container(cfg)
    return {path: value for path in schema(*classes) if (value := _find(tree, path)) is not _NOTHING}
