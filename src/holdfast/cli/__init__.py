"""The command line; each command is one small file, and what it needs is imported when it runs."""

from holdfast.cli.app import main

__all__ = ["main"]
