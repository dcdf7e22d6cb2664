"""A run's options as a tree that folds, with what differs from the defaults marked."""

from collections.abc import Mapping
from html import escape
from typing import Any

import yaml

from holdfast import registry
from holdfast.config import JOB_KEY, flatten, merge
from holdfast.config import build as build_config
from holdfast.training.config import config_classes
from holdfast.types import JsonView

Defaults = dict[str, tuple[Any, str]]


def defaults(job: str) -> Defaults:
    """Default and help text of every option of a job, by path; empty for a job that is not known here."""
    if job not in registry.jobs:
        return {}
    from holdfast.config import schema

    classes = config_classes(job)
    flat = flatten(build_config(*classes), classes)
    helps = {path: entry.help for path, entry in schema(*classes).items()}
    return {path: (value, helps.get(path, "")) for path, value in flat.items()}


def changed(job: str, config: JsonView) -> dict[str, tuple[Any, Any]]:
    """Options that are not at their default: path -> (default, value)."""
    known = defaults(job)
    if not known:
        return {}
    classes = config_classes(job)
    try:
        own = flatten(merge(classes, {key: value for key, value in config.items() if key != JOB_KEY}), classes)
    except Exception:  # options of another version, or of none
        return {}
    return {path: (known[path][0], value) for path, value in own.items() if path in known and value != known[path][0]}


def tree(job: str, config: JsonView) -> str:
    """The options as nested, folding lists."""
    different = changed(job, config)
    known = defaults(job)
    rest = {key: value for key, value in config.items() if key != JOB_KEY}
    count = f"{len(different)} differ from the defaults" if known else "defaults are not known here"
    short = "".join(_option(path, path, value, different, known) for path, (_, value) in different.items())
    return (
        f'<div class="config"><p>Job <code>{escape(job)}</code>; {count}.</p>{short}'
        f"<details><summary>All options</summary>{_section(rest, '', different, known)}</details></div>"
    )


def _section(values: JsonView, prefix: str, different: Mapping[str, tuple[Any, Any]], known: Defaults) -> str:
    parts = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and path not in known:
            inside = sum(other.startswith(path + "/") for other in different)
            mark = f" <mark>{inside}</mark>" if inside else ""
            below = _section(value, path + "/", different, known)
            parts.append(f"<details><summary>{escape(str(name))}{mark}</summary>{below}</details>")
        else:
            parts.append(_option(path, str(name), value, different, known))
    return "".join(parts)


def _option(path: str, name: str, value: Any, different: Mapping[str, tuple[Any, Any]], known: Defaults) -> str:
    text = escape(shown(value))
    note = ""
    if path in different:
        text = f"<mark>{text}</mark>"
        note = f' <span class="muted">default {escape(shown(different[path][0]))}</span>'
    hint = known.get(path, (None, ""))[1]
    title = f' title="{escape(hint)}"' if hint else ""
    return f'<div class="option" data-path="{escape(path)}"{title}><code>{escape(name)}</code> {text}{note}</div>'


def shown(value: Any) -> str:
    """A value in one line, as YAML writes it.

    >>> shown([{"name": "a", "rate": 1}]), shown(None)
    ('[{name: a, rate: 1}]', 'null')
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
