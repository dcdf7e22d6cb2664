"""The `holdfast` command, also as `python -m holdfast`."""

import sys

from holdfast.errors import RunError
from holdfast.execution.pages import start_with_huge_pages
from holdfast.execution.storage import check_address_space

# Commands that hold a model's working memory.
COMPUTING = {"quickstart", "run", "eval", "generate", "diff", "average", "profile"}


def start() -> None:
    """What the installed command calls."""
    try:
        check_address_space()
    except RunError as error:
        sys.exit(f"failed: {error}")
    if COMPUTING & set(sys.argv[1:]):
        start_with_huge_pages()
    from holdfast.cli import main

    main()


if __name__ == "__main__":
    start()
