"""Names for data whose inside no type describes: objects as JSON holds them, and trees of arrays."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]  # an object as JSON, YAML and manifests hold it
JsonView = Mapping[str, Any]  # the same, to be read alone
Tree = Any  # a pytree: nested dictionaries of arrays, or of their shapes or shardings
