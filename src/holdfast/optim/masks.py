"""Which parameters decay: by name, because scanned layers give even a bias two axes."""

import re
from typing import Any

_NO_DECAY_NAME = re.compile(r"(^|_)(bias|scale|gamma|beta|b)$|^bias_|^b_")
_NO_DECAY_MODULE = re.compile(r"norm|(^|_)ln(_|$|\d)")


def path_names(path: Any) -> list[str]:
    """The keys of a parameter's path in lower case, without the attributes of boxes around it."""
    from jax.tree_util import DictKey

    return [str(entry.key).lower() for entry in path if isinstance(entry, DictKey)]


def decays(path: Any, leaf: Any) -> bool:
    """Whether weight decay applies to the parameter at a key path: kernels and embeddings yes, norms and biases no."""
    names = path_names(path)
    if leaf.ndim < 2 or any(_NO_DECAY_MODULE.search(name) for name in names):
        return False
    return not (names and _NO_DECAY_NAME.search(names[-1]))


def decay_mask(params: Any) -> Any:
    """A tree of booleans like the parameters: True where weight decay applies."""
    import jax

    return jax.tree_util.tree_map_with_path(decays, params)
