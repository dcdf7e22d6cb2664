"""Writes docs/configuration.md: every option of every job, from the fields that declare them.

python tools/configuration_reference.py           # write it
python tools/configuration_reference.py --check   # exit 1 when it is not current
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.config import Entry, plain, schema
from holdfast.conversion import spelled, type_name
from holdfast.registry import jobs
from holdfast.training.config import config_classes

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
INTRODUCTION = """# Configuration reference

Written by `make docs` from the fields that declare the options; do not edit it by hand.

A config file is YAML with one mapping per section; the path `training/batch_size` is the key `batch_size` below
`training`. On the command line the same option is `training.batch_size=32`, and `training.dataset.0.0.rate=0.5` reaches
into lists. `holdfast configure JOB OUT.yaml` writes all options of a job with their defaults and these texts.

| job | does |
|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table; jobs that declare an option alike share it."""

    path: str
    type: str
    default: str
    help: str


def reference() -> str:
    """The whole page."""
    rows: dict[Row, list[str]] = {}
    for job in jobs.names():
        for entry in schema(*config_classes(job)).values():
            rows.setdefault(row(entry), []).append(job)
    lines = [INTRODUCTION + "\n".join(f"| `{job}` | {cell(jobs.help(job))} |" for job in jobs.names())]
    for section in dict.fromkeys(sorted(row.path.split("/")[0] for row in rows)):
        lines.append(f"\n## {section}\n\n| path | type | default | what | jobs |\n|---|---|---|---|---|")
        lines.extend(table(section, rows))
    return "\n".join(lines) + "\n"


def table(section: str, rows: dict[Row, list[str]]) -> Iterator[str]:
    """The lines of one section, by path; options of one path that differ between jobs stand together."""
    inside = [item for item in rows if item.path.split("/")[0] == section]
    for item in sorted(inside, key=lambda item: item.path):
        names = "all" if len(rows[item]) == len(jobs.names()) else ", ".join(f"`{job}`" for job in rows[item])
        yield f"| `{item.path}` | {cell(item.type)} | {cell(item.default)} | {cell(item.help)} | {names} |"


def row(entry: Entry) -> Row:
    """An option as the reference shows it."""
    kind = type_name(entry.type)
    if entry.choices:
        kind = f"one of {listed(entry.choices)}" + (" or null" if kind.endswith(" or null") else "")
    limits = ", ".join(f"{BOUNDS[name]} {limit:g}" for name, limit in entry.bounds.items())
    missing = entry.default is dataclasses.MISSING
    default = "must be set" if missing else f"`{json.dumps(plain(entry.default), ensure_ascii=False)}`"
    return Row(entry.path, f"{kind} ({limits})" if limits else kind, default, entry.help)


def listed(choices: Iterable[object]) -> str:
    """Choices as code, separated by commas."""
    return ", ".join(f"`{spelled(plain(choice))}`" for choice in choices)


def cell(text: str) -> str:
    """A text that can stand in a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Write the page, or with `--check` say whether it is current."""
    parser = argparse.ArgumentParser(description="write docs/configuration.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    text = reference()
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"docs/{TARGET.name} is not current: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
