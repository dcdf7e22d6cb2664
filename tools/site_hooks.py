"""What mkdocs.yml adds to the pages of docs/: links, the command reference, and the fields of config classes.

A link that leads out of docs/ becomes one to the project's `Source`. `commands.md` is made from the commands
themselves. A line `<!-- fields: MODULE.CLASS -->` becomes the class as it is declared: every field with its path and
default, those of its bases included.
"""

import dataclasses
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from configuration_reference import cell, row

ROOT = Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
LINK = re.compile(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")
FIELDS = re.compile(r"^<!-- fields: ([\w.]+)\.(\w+) -->$", re.MULTILINE)
EXAMPLE = re.compile(r"^Example: (.+)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that no file holds."""
    files.append(File.generated(config, "commands.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Fill in fields and turn links that leave docs/."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def turned(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, hash_, anchor = target.partition("#")
        found = (folder / path).resolve()
        if found.is_relative_to(config.docs_dir):
            return link[0]
        return f"{text}({SOURCE}/blob/main/{found.relative_to(ROOT).as_posix()}{hash_}{anchor})"

    return FIELDS.sub(lambda found: fields(found[1], found[2]), LINK.sub(turned, markdown))


def fields(module: str, name: str) -> str:
    """A config class as its declaration and as a table."""
    cls = getattr(importlib.import_module(module), name)
    found = list(fields_of(cls))
    declared = [
        f"    {field}: {spelled(entry.type)} = field('{entry.path}', {default})" for field, entry, default in found
    ]
    table = [
        f"| `{field}`<br>`{entry.path}` | {cell(shown.type)} | {cell(shown.default)} | {cell(shown.help)} |"
        for field, entry, _ in found
        for shown in [row(entry)]
    ]
    head = ["| field, path | type | default | what |", "|---|---|---|---|"]
    block = ["```python", f"{name}(", ",\n".join(declared) + ",", ")", "```"]
    return "\n".join([*block, "", *head, *table])


def fields_of(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Name, entry and default of each field; those of a class inside follow as `outer.inner`."""
    from holdfast.config import plain, schema
    from holdfast.conversion import hints

    entries = schema(cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]  # a config class is a dataclass
        if "path" not in item.metadata:
            inner = hints(cls)[item.name]
            yield from ((f"{item.name}.{name}", entries[entry.path], text) for name, entry, text in fields_of(inner))
            continue
        entry = entries[item.metadata["path"]]
        missing = entry.default is dataclasses.MISSING
        yield item.name, entry, "…" if missing else f"default={python(plain(entry.default))}"


def python(value: Any) -> str:
    """A default as Python writes it, mappings in short."""
    if isinstance(value, list):
        return f"[{', '.join(map(python, value))}]"
    return json.dumps(value) if isinstance(value, dict) else repr(value)


def spelled(kind: Any) -> str:
    """A type as the code spells it."""
    return (
        kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else re.sub(r"\b\w+\.", "", str(kind))
    )


def command_reference() -> str:
    """The page of all commands, from what `--help` shows."""
    from typer.main import get_command

    from holdfast.cli.app import app

    parts = ["# Commands\n\nMade from the commands themselves; `holdfast COMMAND --help` shows the same.\n"]
    parts += ["Exit codes: 0 done, 1 a run failed, 2 a mistake in what was asked, above 128 stopped by a signal.\n"]
    root: Any = get_command(app)
    parts.append(options_table(root.params))
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            parts.append(command_text(f"holdfast {name}", command, 2))
            continue
        parts.append(f"## holdfast {name}\n\n{command.help}\n")
        parts += [command_text(f"holdfast {name} {each}", sub, 3) for each, sub in inner.items()]
    return "\n".join(parts)


def command_text(name: str, command: Any, level: int) -> str:
    """One command: what it does, an example, its arguments and options."""
    text = command.help or ""
    example = EXAMPLE.search(text)
    said = EXAMPLE.sub("", text).strip()
    wanted = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *map(argument_name, wanted)])
    parts = [f"{'#' * level} {name}\n", f"{said}\n", f"```text\n{usage}\n```\n"]
    if example:
        parts.append(f"```bash\n{example[1]}\n```\n")
    return "\n".join([*parts, options_table(command.params)])


def argument_name(argument: Any) -> str:
    """An argument as a usage line has it: in brackets when it may be left out."""
    name = str(argument.metavar or argument.name.upper()).strip("[]")
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def options_table(params: Any) -> str:
    """Arguments and options as a table."""
    rows = []
    for each in params:
        if each.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in [*each.opts, *each.secondary_opts])
        named = f"`{argument_name(each)}`" if each.param_type_name == "argument" else names
        plain_default = each.default is not None and not callable(each.default) and each.default is not False
        default = f"`{each.default}`" if plain_default and str(each.default) not in ("()", "[]") else ""
        rows.append(f"| {named} | {cell(each.help or '')} | {'required' if each.required else default} |")
    return "\n".join(["| | what | default |", "|---|---|---|", *rows]) + "\n" if rows else ""
