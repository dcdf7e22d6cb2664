"""YAML text -> plain values -> the types that config fields declare, with errors that name the path.

YAML is read by the rules of version 1.2: only true and false are booleans; on, off, yes, no, y and n are texts. It is
written so that readers of version 1.1 understand it too: what either of them would not take for a text is quoted.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from holdfast.errors import ConfigError, unknown_key
from holdfast.types import Json, JsonView

REQUIRED = "???"  # how OmegaConf writes a value that has no default
INTERPOLATION = "${"
DEEPEST, MOST_NODES = 64, 100_000  # of a YAML text: deeper ones overflow the stack of the parser
MOST_CHARACTERS = 1 << 24
MOST_DIGITS = 100  # of a whole number

_BOUND_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_BOUND_TESTS = {
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
}
_SCALAR_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}
_TRUE, _FALSE = {"yes", "on", "y"}, {"no", "off", "n"}  # what YAML 1.1 took for booleans

# The core schema of YAML 1.2, with 1_000 as a number and << as a merge beside it, as before.
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F_]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where there is a compiled one


def _resolvers(tables: Sequence[Mapping[str, tuple[str, list[str]]]]) -> dict[str, list[tuple[str, Any]]]:
    """PyYAML's table of what plain texts mean: by their first letter a tag and a pattern."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for kind, (pattern, letters) in (item for table in tables for item in table.items()):
        for letter in letters:
            found.setdefault(letter, []).append((_TAG + kind, re.compile(f"(?:{pattern})$")))
    return found


class YamlReader(_PARSER):  # type: ignore[misc]  # the base is one of two
    """YAML by the rules of version 1.2; a key that stands twice in a mapping is an error."""

    yaml_implicit_resolvers = _resolvers([_CORE])

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A mapping whose keys are all different."""
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) and key.value != "<<" else id(key)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping", node.start_mark, f"found the key {key.value} twice", key.start_mark
                    )
                seen.add(name)
        return super().construct_mapping(node, deep)


def _whole_number(_: Any, node: Any) -> int:
    text = node.value.replace("_", "")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    if len(text) > MOST_DIGITS:  # what is longer cannot even be shown
        raise yaml.constructor.ConstructorError(
            None, None, f"found a number of {len(text)} digits", node.start_mark, "numbers have at most 100"
        )
    return int(text[2:] if base != 10 else text, base)


YamlReader.add_constructor(_TAG + "int", _whole_number)


class _YamlWriter(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 would take for something else."""

    yaml_implicit_resolvers = {
        letter: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(letter, []),
            *_resolvers([_CORE, {"bool": (r"[yYnN]", list("yYnN"))}]).get(letter, []),
        ]
        for letter in {*yaml.SafeDumper.yaml_implicit_resolvers, *"~nNtTfF-+0123456789.<yY", ""}
    }

    def ignore_aliases(self, _: Any) -> bool:
        """Write a value that stands in two places twice."""
        return True


def from_yaml(text: str | bytes) -> Any:
    """The value that a YAML text holds.

    >>> from_yaml("{on: [yes, no, true], time: 1:30, octal: 0o17, zeros: 010}")
    {'on': ['yes', 'no', True], 'time': '1:30', 'octal': 15, 'zeros': 10}
    """
    _check_extent(text)
    return yaml.load(text, Loader=YamlReader)


def _check_extent(text: str | bytes) -> None:
    """Refuse what would overflow the stack or fill the memory; events come one by one, whatever the depth."""
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"the text has {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    opened: list[list[Any]] = [["", 0, 0]]  # of each open collection: its anchor, values in it, levels below it
    anchors: dict[str, tuple[int, int]] = {}  # what an alias stands for: so many values, so many levels
    for event in yaml.parse(text, Loader=_PARSER):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append([event.anchor, 1, 0])
        elif isinstance(event, yaml.AliasEvent | yaml.ScalarEvent | yaml.CollectionEndEvent):
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, values, levels = opened.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor, (values, levels) = None, anchors.get(event.anchor or "", (0, 0))
            else:
                anchor, values, levels = event.anchor, 1, 0
            if anchor:
                anchors[anchor] = (values, levels)
            opened[-1][1] += values
            opened[-1][2] = max(opened[-1][2], levels + 1)
        depth = len(opened) - 1 + opened[-1][2]
        if depth > DEEPEST or opened[-1][1] > MOST_NODES:
            what = f"more than {DEEPEST} levels" if depth > DEEPEST else f"more than {MOST_NODES:,} values"
            raise yaml.MarkedYAMLError(problem=f"found {what}", problem_mark=event.start_mark)


def without_places(value: Any) -> Any:
    """A plain value in which absolute paths are their last names: what is shared tells nothing of the machine.

    >>> without_places({"root": "/some/where/data", "names": ["a/b", "~/x.txt"], "url": "https://a/b"})
    {'root': 'data', 'names': ['a/b', 'x.txt'], 'url': 'https://a/b'}
    """
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_places(item) for item in value)
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str) and "\n" not in value and _ABSOLUTE.match(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


_ABSOLUTE = re.compile(r"/|\\|~|file:/|[A-Za-z]:[\\/]")


def to_yaml_text(value: Any) -> str:
    """A plain value as YAML, one key or element a line.

    >>> print(to_yaml_text({"on": "yes", "steps": 3}), end="")
    'on': 'yes'
    steps: 3
    """
    text: str = yaml.dump(value, Dumper=_YamlWriter, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


@functools.cache
def hints(cls: type) -> Json:
    """The resolved type hints of a class."""
    return typing.get_type_hints(cls)


def has_default(item: dataclasses.Field[Any]) -> bool:
    """Whether a dataclass field can be left out."""
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


def convert(value: Any, kind: Any, path: str) -> Any:
    """A plain value as the type that a field declares; a misfit is a ConfigError that names the path.

    >>> convert(1e9, int, "training/tokens")
    1000000000
    >>> convert([1, 2], tuple[float, ...], "optimization/betas")
    (1.0, 2.0)
    """
    if isinstance(value, str):
        _check_text(value, kind, path)
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, kind, arguments, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise _not_among(path, value, arguments)
        return value
    if origin in (list, tuple):
        return _convert_list(value, kind, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(path, value, "a mapping of names to values")
        return {str(name): convert(item, arguments[1], f"{path}/{name}") for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _convert_enum(value, kind, path)
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(value, typing.cast(type, kind), path)
    return _convert_scalar(value, kind, path)


def _check_text(value: str, kind: Any, path: str) -> None:
    if value == REQUIRED:
        raise ConfigError(path, None, type_name(kind), "this value has no default and must be set")
    if INTERPOLATION in value:
        # Interpolation could carry environment variables into configs, logs and reports.
        raise ConfigError(path, value, f"{type_name(kind)} without ${{...}}", "write the value itself")


def check(value: Any, metadata: JsonView, path: str) -> None:
    """Hold a converted value, or every value inside it, to a field's bounds and choices."""
    if isinstance(value, list | tuple | dict):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            check(item, metadata, f"{path}/{name}")
        return
    if value is None:
        return
    if metadata["choices"] is not None and value not in metadata["choices"]:
        raise _not_among(path, value, metadata["choices"])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    for bound, limit in metadata["bounds"].items():
        if not _BOUND_TESTS[bound](value, limit):
            words = " and ".join(f"{_BOUND_WORDS[name]} {_edge(edge)}" for name, edge in metadata["bounds"].items())
            raise ConfigError(path, value, f"a number of {words}", f"change {path}")


def _edge(edge: float) -> str:
    return str(edge) if isinstance(edge, int) else f"{edge:g}"


def check_path(text: str | None, path: str, expected: str = "a path") -> None:
    """Refuse texts that no system takes for a path, and the empty one, which would mean the current folder."""
    if text is None:
        return
    if not text.strip():
        raise ConfigError(path, text, expected, "an empty text would mean the current folder: write . for that")
    if "\0" in text or len(text) > 4096 or any(len(part.encode("utf-8", "replace")) > 255 for part in text.split("/")):
        raise ConfigError(path, text, f"{expected} of at most 4096 characters, 255 between two slashes")


def spelled(choice: Any) -> str:
    """A choice as a config file has it.

    >>> spelled(True), spelled("full")
    ('true', 'full')
    """
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def _not_among(path: str, value: Any, choices: Sequence[Any]) -> ConfigError:
    names = [spelled(choice) for choice in choices]
    near = difflib.get_close_matches(str(value), names, n=1)
    return ConfigError(path, value, f"one of {', '.join(names)}", f"did you mean {near[0]!r}?" if near else "")


def _convert_union(value: Any, kind: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    if len(choices) == 1:
        return convert(value, choices[0], path)
    for choice in choices:
        with contextlib.suppress(ConfigError):
            return convert(value, choice, path)
    raise ConfigError(path, value, type_name(kind))


def _convert_list(value: Any, kind: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if not isinstance(value, list | tuple):
        fix = "write [] for none" if value is None else f"write it as a list: [{value}]"
        raise ConfigError(path, value, type_name(kind), fix)
    if origin is list or arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    elif len(value) != len(arguments):
        raise ConfigError(path, value, f"a list of {len(arguments)} values")
    pairs = zip(value, arguments, strict=True)
    return origin(convert(item, inner, f"{path}/{index}") for index, (item, inner) in enumerate(pairs))


def _convert_enum(value: Any, kind: type[enum.Enum], path: str) -> enum.Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if str(value).lower() == member.name.lower():
            return member
    raise _not_among(path, value, [member.name for member in kind])


def key_of(item: dataclasses.Field[Any]) -> str:
    """The key of a field in a mapping: its name, unless that cannot be a name in Python (`from`)."""
    return str(item.metadata.get("key", item.name))


def respelled(value: Any, kind: Any, path: str) -> Any:
    """A mapping for a dataclass with the keys that are documented, where a file has the names of fields (`from_`)."""
    choices = [choice for choice in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(choice)]
    if not isinstance(value, dict) or not choices:
        return value
    keys = {item.name: key_of(item) for item in dataclasses.fields(choices[0])}
    for name, key in keys.items():
        if name != key and name in value and key in value:
            raise ConfigError(f"{path}/{key}", value[key], f"{key} or {name}, not both", f"remove {name}")
    return {keys.get(name, name): inner for name, inner in value.items()}


def _convert_mapping(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise ConfigError(path, value, type_name(kind))
    known = {key_of(item): item for item in dataclasses.fields(kind)}
    values = {}
    for key, inner in respelled(value, kind, path).items():
        if key not in known:
            raise unknown_key(f"{path}/{key}", [f"{path}/{other}" for other in known])
        item = known[key]
        values[item.name] = convert(inner, hints(kind)[item.name], f"{path}/{key}")
        if "bounds" in item.metadata:
            check(values[item.name], item.metadata, f"{path}/{key}")
    for key, item in known.items():
        if item.name not in values and not has_default(item):
            raise ConfigError(path, value, f"a mapping that has the key {key!r}", f"add {key}: ...")
    try:
        return kind(**values)
    except ConfigError as error:
        # A value's own check knows only its field; the place in the list is known here.
        raise ConfigError(f"{path}/{error.path}", error.value, error.expected, error.fix) from None


def _convert_scalar(value: Any, kind: Any, path: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is float and number:
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
        raise ConfigError(path, value, "a finite number")
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        right = "true" if value.lower() in _TRUE else "false"
        raise ConfigError(path, value, type_name(kind), f"write {right}: in YAML 1.2 {value} is a text")
    # YAML has already read 007 as 7 and 1e5 as 100000.0: the text that was meant is gone.
    quotes = kind is str and isinstance(value, bool | int | float)
    raise ConfigError(path, value, type_name(kind), "put it in quotes" if quotes else "")


def type_name(kind: Any) -> str:
    """What a value of a type is called in messages and in the configuration reference.

    >>> type_name(list[int] | None)
    'a list (whole number each) or null'
    """
    if kind in _SCALAR_NAMES:
        return _SCALAR_NAMES[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(choice) for choice in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} values"
    if origin in (list, tuple):
        return f"a list ({type_name(arguments[0]).removeprefix('a ')} each)"
    if origin is dict:
        return "a mapping"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(member.name for member in kind)
    if dataclasses.is_dataclass(kind):
        return "a mapping with the keys " + ", ".join(key_of(item) for item in dataclasses.fields(kind))
    return str(getattr(kind, "__name__", kind))
