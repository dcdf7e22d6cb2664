"""Names that become folders: validated before any path is made of them."""

import re

from holdfast.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


def check_name(name: str, what: str) -> str:
    """The name itself if it can be a folder name, else a UserError.

    >>> check_name("try-1", "--name")
    'try-1'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"{what}: got {name!r}, expected up to 100 letters, digits or . _ + = - that begin with a letter or digit; "
            "choose another name"
        )
    return name
