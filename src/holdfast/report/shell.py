"""What stands around every page: its style and script inside it, and a policy under which nothing else is run."""

import base64
import functools
import hashlib
import string
from html import escape
from importlib import resources


@functools.cache
def part(name: str) -> str:
    """The text of a file that pages are made of."""
    return resources.files("holdfast.report").joinpath(name).read_text(encoding="utf-8")


def policy(css: str, js: str, *, ask: bool = False) -> str:
    """A content policy that knows the page's own style and script by their hashes: what a name brings in is not run.

    Args:
        ask: the script may ask the server that it came from.
    """
    return (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(js)}; img-src data:; "
        f"connect-src {_SELF if ask else _NONE}; base-uri 'none'; form-action 'none'"
    )


_SELF, _NONE = "'self'", "'none'"


@functools.lru_cache(maxsize=16)
def _digest(text: str) -> str:
    """How a policy names an inline text.

    >>> _digest("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(title: str, body: str) -> str:
    """A whole page around a body; style attributes and scripts in the body are not applied."""
    css, js = part("page.css"), part("page.js")
    filled = {"title": escape(title), "policy": escape(policy(css, js)), "css": css, "js": js, "body": body}
    return string.Template(part("page.html")).substitute(filled)
