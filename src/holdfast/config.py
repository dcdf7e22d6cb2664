"""Configuration: dataclasses <-> slash paths <-> YAML and command-line overrides.

A class declares its options with `field("training/batch_size", default=512, help="...")`. `build` collects
the fields of several classes into one OmegaConf tree, `configure` makes a typed, validated instance of a
class from such a tree, and `configuration` makes a tree the current one. A dataclass without a path of its
own inside another (`fade: FadeConfig = FadeConfig()`) is collected and filled by its own fields' paths; a
dataclass below a path (`List[Sampling]`) is filled from a mapping by field name.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from holdfast.errors import ConfigError, UserError

C = TypeVar("C")

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
) -> Any:
    """A dataclass field that lives at a slash path of the configuration.

    Args:
        path: where the value stands, for example `training/batch_size`.
        default: its default; or `default_factory` for lists.
        help: one line that `configure` writes as a comment.
        ge, gt, le, lt: bounds of a number, or of every number in a list.
        choices: the values that are allowed.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Small:
    ...     rows: int = field("training/rows", default=8, ge=1)
    >>> configure(Small, build(Small)).rows
    8
    """
    bounds = {name: limit for name, limit in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if limit is not None}
    metadata = {"path": path, "help": help, "bounds": bounds, "choices": choices}
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


def schema(*classes: type) -> dict[str, Entry]:
    """All options that the classes declare, by path; contradictory declarations raise ValueError."""
    entries: dict[str, Entry] = {}
    for cls in classes:
        for entry in _entries_of(cls):
            known = entries.setdefault(entry.path, entry)
            if (known.type, plain(known.default)) != (entry.type, plain(entry.default)):
                raise ValueError(
                    f"{entry.path} is declared twice, by {known.owner} ({_type_name(known.type)} = {known.default!r}) "
                    f"and by {entry.owner} ({_type_name(entry.type)} = {entry.default!r})"
                )
    for path, entry in entries.items():
        for parent in itertools.accumulate(path.split("/")[:-1], "{}/{}".format):
            if parent in entries:
                raise ValueError(
                    f"{parent} ({entries[parent].owner}) is a value and cannot also hold {path} ({entry.owner})"
                )
    return entries


def _entries_of(cls: type) -> Iterator[Entry]:
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if "path" not in item.metadata:
            if dataclasses.is_dataclass(kind):
                yield from _entries_of(typing.cast(type, kind))
                continue
            raise ValueError(f"{cls.__name__}.{item.name} has no path: declare it with field('some/path', ...)")
        default = item.default
        if item.default_factory is not _NOTHING:
            default = item.default_factory()
        yield Entry(
            path=item.metadata["path"],
            type=kind,
            default=default,
            help=item.metadata["help"],
            bounds=item.metadata["bounds"],
            choices=item.metadata["choices"],
            owner=cls.__name__,
        )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(*classes: type) -> DictConfig:
    """The default configuration of the classes as one OmegaConf tree."""
    tree: dict[str, Any] = {}
    for path, entry in schema(*classes).items():
        _put(tree, path, "???" if entry.default is _NOTHING else plain(entry.default))
    return OmegaConf.create(tree)


def plain(value: Any) -> Any:
    """A value as YAML can hold it: enums by name, dataclasses as mappings, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
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


def _container(cfg: DictConfig) -> dict[str, Any]:
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return typing.cast(dict[str, Any], tree)


def _instance(cls: type[C], tree: dict[str, Any]) -> C:
    hints = _hints(typing.cast(Any, cls))
    values: dict[str, Any] = {}
    for item in dataclasses.fields(typing.cast(Any, cls)):
        kind = hints[item.name]
        if "path" not in item.metadata:
            values[item.name] = _instance(kind, tree)
            continue
        path = item.metadata["path"]
        found = _find(tree, path)
        if found is _NOTHING:
            continue
        value = convert(found, kind, path)
        _check(value, item.metadata, path)
        values[item.name] = value
    return cls(**values)


def _find(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        if not isinstance(tree, dict) or name not in tree:
            return _NOTHING
        tree = tree[name]
    return tree


_BOUND_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_BOUND_TESTS = {
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
}


def _check(value: Any, metadata: Mapping[str, Any], path: str) -> None:
    if value is None:
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, metadata, f"{path}/{index}")
        return
    if metadata["choices"] is not None and value not in metadata["choices"]:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in metadata["choices"]], n=1)
        allowed = ", ".join(str(choice) for choice in metadata["choices"])
        raise ConfigError(path, value, f"one of {allowed}", f"did you mean {near[0]!r}?" if near else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    for bound, limit in metadata["bounds"].items():
        if not _BOUND_TESTS[bound](value, limit):
            words = " and ".join(f"{_BOUND_WORDS[name]} {edge:g}" for name, edge in metadata["bounds"].items())
            raise ConfigError(path, value, f"a number of {words}", f"change {path}")


def convert(value: Any, kind: Any, path: str) -> Any:
    """A plain value as the type that a field declares; a misfit is a ConfigError that names the path."""
    if isinstance(value, str) and value == "???":
        raise ConfigError(path, None, _type_name(kind), "this value has no default and must be set")
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, kind, arguments, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(path, value, "one of " + ", ".join(str(choice) for choice in arguments))
        return value
    if origin in (list, tuple):
        return _convert_list(value, kind, origin, arguments, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(path, value, "a mapping of names to values")
        return {str(name): convert(item, arguments[1], f"{path}/{name}") for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _convert_enum(value, kind, path)
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(value, typing.cast(type, kind), path)
    return _convert_scalar(value, kind, path)


def _convert_union(value: Any, kind: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    if len(choices) == 1:
        return convert(value, choices[0], path)
    for choice in choices:
        with contextlib.suppress(ConfigError):
            return convert(value, choice, path)
    raise ConfigError(path, value, _type_name(kind))


def _convert_list(value: Any, kind: Any, origin: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(path, value, _type_name(kind), f"write it as a list: [{value}]")
    return origin(convert(item, arguments[0], f"{path}/{index}") for index, item in enumerate(value))


def _convert_enum(value: Any, kind: type[enum.Enum], path: str) -> enum.Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if str(value).lower() == member.name.lower():
            return member
    raise ConfigError(path, value, "one of " + ", ".join(member.name for member in kind))


def _convert_mapping(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        names = ", ".join(item.name for item in dataclasses.fields(kind))
        raise ConfigError(path, value, f"a mapping with the keys {names}")
    hints = _hints(kind)
    known = {item.metadata.get("key", item.name): item for item in dataclasses.fields(kind)}
    values = {}
    for name, inner in value.items():
        if name not in known:
            raise unknown_key(f"{path}/{name}", [f"{path}/{key}" for key in known])
        item = known[name]
        values[item.name] = convert(inner, hints[item.name], f"{path}/{name}")
    for name, item in known.items():
        if name not in value and item.default is _NOTHING and item.default_factory is _NOTHING:
            raise ConfigError(path, value, f"a mapping that has the key {name!r}", f"add {name}: ...")
    try:
        return kind(**values)
    except ConfigError as error:
        # A value's own check knows only its field; the place in the list is known here.
        raise ConfigError(f"{path}/{error.path}", error.value, error.expected, error.fix) from None


def _convert_scalar(value: Any, kind: Any, path: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(path, value, "a finite number")
        return float(value)
    if kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    raise ConfigError(path, value, _type_name(kind))


def _type_name(kind: Any) -> str:
    plain_names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "null",
    }
    if kind in plain_names:
        return plain_names[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(choice) for choice in arguments)
    if origin in (list, tuple):
        inner = _type_name(arguments[0]).removeprefix("a ")
        return f"a list ({inner} each)"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(kind):
        return "a mapping with the keys " + ", ".join(item.name for item in dataclasses.fields(kind))
    return str(getattr(kind, "__name__", kind))


def unknown_key(path: str, known: Sequence[str]) -> UserError:
    """The error for a key that no class declares, with the nearest one that exists."""
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    if not near:
        last = path.rsplit("/", 1)[-1]
        by_name = {key.rsplit("/", 1)[-1]: key for key in known}
        near = [by_name[name] for name in difflib.get_close_matches(last, by_name, n=1)]
    hint = f"did you mean {near[0]}?" if near else "`holdfast configure JOB OUT.yaml` writes all known keys"
    return UserError(f"{path}: unknown configuration key; {hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, as plain containers."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; `holdfast configure JOB {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected a mapping of sections such as `training:`, got {type(loaded).__name__}")
    return typing.cast(dict[str, Any], loaded)


def merge(classes: Sequence[type], values: Mapping[str, Any], overrides: Sequence[str] = ()) -> DictConfig:
    """Defaults of the classes, then a mapping of values, then `path=value` overrides.

    Keys that no class declares are errors; every value is checked against its declared type and bounds.
    """
    entries = schema(*classes)
    tree = _container(build(*classes))
    _merge_into(tree, values, "", entries)
    for override in overrides:
        _override(tree, override, entries)
    for path, entry in entries.items():
        found = _find(tree, path)
        if found is not _NOTHING and found != "???":
            _check(convert(found, entry.type, path), {"choices": entry.choices, "bounds": entry.bounds}, path)
    return OmegaConf.create(tree)


def _merge_into(tree: dict[str, Any], values: Mapping[str, Any], prefix: str, entries: Mapping[str, Entry]) -> None:
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


def _override(tree: dict[str, Any], override: str, entries: Mapping[str, Entry]) -> None:
    key, separator, _ = override.partition("=")
    if not separator or not key:
        raise UserError(f"{override}: expected an override of the form path=value, such as training.batch_size=32")
    path = key.strip().replace(".", "/").strip("/")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist(["value=" + override.partition("=")[2]]), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{override}: the value cannot be parsed: {error}") from None
    assert isinstance(value, dict)
    owner = next((known for known in entries if path == known or path.startswith(known + "/")), None)
    if owner is None:
        _merge_into(tree, _nest(path, value["value"]), "", entries)
        return
    _set_inside(tree, path, owner, value["value"])


def _nest(path: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    _put(tree, path, value)
    return tree


def _set_inside(tree: Any, path: str, owner: str, value: Any) -> None:
    """Set a value at or below a declared path, through lists by index."""
    *parents, last = path.split("/")
    for name in parents:
        if isinstance(tree, dict) and tree.get(name) is None and path != owner:
            tree[name] = {}
        tree = _step_into(tree, name, path)
    if isinstance(tree, list):
        _step_into(tree, last, path)
        tree[int(last)] = value
    else:
        tree[last] = value


def _step_into(tree: Any, name: str, path: str) -> Any:
    if isinstance(tree, list):
        if not name.isdigit() or int(name) >= len(tree):
            raise UserError(f"{path}: {name!r} is not an index into a list of {len(tree)}")
        return tree[int(name)]
    if not isinstance(tree, dict) or name not in tree:
        raise UserError(f"{path}: there is nothing at {name!r} to set a value in")
    return tree[name]


def to_yaml(cfg: DictConfig, classes: Sequence[type], job: str) -> str:
    """A configuration as YAML, each option with its help text as a comment above it."""
    entries = schema(*classes)
    tree = _container(cfg)
    lines = ["# which job this configuration is for", f"{JOB_KEY}: {job}"]
    _write_section(lines, tree, "", entries, 0)
    return "\n".join(lines) + "\n"


def _write_section(
    lines: list[str], tree: dict[str, Any], prefix: str, entries: Mapping[str, Entry], depth: int
) -> None:
    indent = "  " * depth
    for name, value in tree.items():
        path = prefix + name
        if path not in entries:
            if depth == 0:
                lines.append("")
            lines.append(f"{indent}{name}:")
            _write_section(lines, value, path + "/", entries, depth + 1)
            continue
        entry = entries[path]
        if entry.help:
            extra = f" ({', '.join(str(choice) for choice in entry.choices)})" if entry.choices else ""
            lines.append(f"{indent}# {entry.help}{extra}")
        dumped = OmegaConf.to_yaml(OmegaConf.create({name: value})).rstrip("\n")
        lines.extend(indent + line for line in dumped.split("\n"))


def flatten(cfg: DictConfig, classes: Sequence[type]) -> dict[str, Any]:
    """Every declared option and its plain value, by path."""
    tree = _container(cfg)
    return {path: value for path in schema(*classes) if (value := _find(tree, path)) is not _NOTHING}
