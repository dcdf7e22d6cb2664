"""Memory in huge pages, for processes that compute on a CPU under Linux.

XLA takes the working memory of a step anew every time. In pages of 4 KB the kernel hands out and clears more than a
hundred thousand of them in each step of a small model, a tenth of its time; in pages of 2 MB that all but vanishes.
The C library decides it when a process starts, from its environment, so a process that wants it starts once more.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE, SETTING = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wants_huge_pages(environment: Mapping[str, str]) -> bool:
    """Whether huge pages can be had here and nobody has decided about them yet."""
    if not sys.platform.startswith("linux") or SETTING in environment.get(VARIABLE, ""):
        return False
    try:
        library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = (int(part) for part in version.split(".")[:2])
        offered = "[madvise]" in SWITCH.read_text()  # [always] needs no word of ours, [never] hears none
    except (OSError, ValueError):
        return False
    return library == "glibc" and (major, minor) >= (2, 35) and offered


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to have them, where they can be had."""
    if not wants_huge_pages(environment):
        return dict(environment)
    others = environment.get(VARIABLE)
    return {**environment, VARIABLE: f"{others + ':' if others else ''}{SETTING}=1"}


def start_with_huge_pages() -> None:
    """Start this very process once more with huge pages, where it has none and can have them; call it first of all."""
    if wants_huge_pages(os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_huge_pages(os.environ))
