"""The `holdfast` command, also as `python -m holdfast`."""

import sys

from holdfast.execution.pages import start_with_huge_pages

# Commands that hold a model's working memory.
COMPUTING = {"quickstart", "run", "eval", "generate", "diff", "average", "profile"}


def start() -> None:
    """What the installed command calls."""
    if COMPUTING & set(sys.argv[1:]):
        start_with_huge_pages()
    from holdfast.cli import main

    main()


if __name__ == "__main__":
    start()
