"""The `holdfast` command, also as `python -m holdfast`."""

import sys

from holdfast.errors import RunError
from holdfast.execution.limits import check_address_space, check_files, watch_memory
from holdfast.execution.pages import start_with_huge_pages

# Commands that hold a model's working memory.
COMPUTING = frozenset(
    {"quickstart", "keep", "run", "eval", "generate", "diff", "bisect", "average", "profile", "selftest", "study"}
)


def start() -> None:
    """What the installed command calls."""
    computes = bool(COMPUTING & set(sys.argv[1:]))
    try:
        check_address_space()
        if computes:
            check_files()
    except RunError as error:
        sys.exit(f"failed: {error}")
    if computes:
        watch_memory()
        start_with_huge_pages()
    from holdfast.cli import main

    main()


if __name__ == "__main__":
    start()
