"""The package's description: README.md, whose links lead somewhere on a package index too.

In a checkout the links are relative. An index shows the text alone, so there they begin with the project's `Source`.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def description() -> str:
    """README.md with absolute links."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project["urls"]["Source"]

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        return f"{picture}{text}({source}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":  # so it is when the package is built
    from setuptools import setup

    setup(long_description=description(), long_description_content_type="text/markdown")
