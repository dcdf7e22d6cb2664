"""Plain values as YAML holds them -> the types that config fields declare, with errors that name the path."""

import contextlib
import dataclasses
import difflib
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError, unknown_key

REQUIRED = "???"  # how OmegaConf writes a value that has no default
INTERPOLATION = "${"

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


@functools.cache
def hints(cls: type) -> dict[str, Any]:
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


def check(value: Any, metadata: Mapping[str, Any], path: str) -> None:
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
            words = " and ".join(f"{_BOUND_WORDS[name]} {edge:g}" for name, edge in metadata["bounds"].items())
            raise ConfigError(path, value, f"a number of {words}", f"change {path}")


def _not_among(path: str, value: Any, choices: Sequence[Any]) -> ConfigError:
    names = [str(choice) for choice in choices]
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
        raise ConfigError(path, value, type_name(kind), f"write it as a list: [{value}]")
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


def _convert_mapping(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise ConfigError(path, value, type_name(kind))
    known = {item.name: item for item in dataclasses.fields(kind)}
    values = {}
    for name, inner in value.items():
        if name not in known:
            raise unknown_key(f"{path}/{name}", [f"{path}/{key}" for key in known])
        values[name] = convert(inner, hints(kind)[name], f"{path}/{name}")
        if "bounds" in known[name].metadata:
            check(values[name], known[name].metadata, f"{path}/{name}")
    for name, item in known.items():
        if name not in value and not has_default(item):
            raise ConfigError(path, value, f"a mapping that has the key {name!r}", f"add {name}: ...")
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
        return "a mapping with the keys " + ", ".join(item.name for item in dataclasses.fields(kind))
    return str(getattr(kind, "__name__", kind))
