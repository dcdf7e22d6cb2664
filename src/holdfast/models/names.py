"""The names and shapes of a decoder's parameters, known from its specification alone; nothing here imports JAX.

A name is a slash path as in `decoder.py`: `embed/embedding`, `layers/attention/q/kernel`. All layers stand in one
array; `layers/3/attention/q/kernel` is the fourth row of it. Patterns are globs over these names in which `*` also
matches slashes, and the name of a module stands for everything below it.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable

from holdfast.models.config import ModelSpec

LAYERS = "layers/"
LORA_IN, LORA_OUT, LORA_SCALE = "lora_in", "lora_out", "lora_scale"  # beside a kernel that has an adapter
_RANGE = re.compile(r"layers/(?P<first>\d+)(?P<dash>-(?P<last>\d+)?)?(?:/(?P<rest>.*))?$")


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of a decoder and its shape, stacked layers first axis first.

    >>> shapes = parameter_shapes(ModelSpec(2, 8, 2, 2, 4, 32, vocab_size=16, block_size=4))
    >>> shapes["layers/attention/q/kernel"], shapes["embed/embedding"]
    ((2, 8, 8), (16, 8))
    """
    width = spec.n_embd
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (spec.vocab_size, width)}
    if spec.positions == "learned":
        shapes["positions/embedding"] = (spec.block_size, width)
    for module, (inputs, outputs, bias) in projections(spec).items():
        shapes[f"{module}/kernel"] = (spec.n_layers, inputs, outputs)
        if bias:
            shapes[f"{module}/bias"] = (spec.n_layers, outputs)
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes[f"layers/attention/{name}/scale"] = (spec.n_layers, spec.head_dim)
    biased_norms = spec.norm == "layer" and spec.bias
    for norm, stack in (("layers/attention_norm", (spec.n_layers,)), ("layers/mlp_norm", (spec.n_layers,))):
        shapes |= {f"{norm}/{name}": (*stack, width) for name in ("scale", "bias")[: 2 if biased_norms else 1]}
    shapes |= {f"final_norm/{name}": (width,) for name in ("scale", "bias")[: 2 if biased_norms else 1]}
    if not spec.tie_embeddings:
        shapes["unembed/kernel"] = (width, spec.vocab_size)
    return shapes


def projections(spec: ModelSpec) -> dict[str, tuple[int, int, bool]]:
    """The linear maps inside the layers by module: inputs, outputs, whether it has a bias."""
    queries, keys = spec.n_head * spec.head_dim, spec.n_kv_head * spec.head_dim
    found = {
        "layers/attention/q": (spec.n_embd, queries, spec.qkv_bias),
        "layers/attention/k": (spec.n_embd, keys, spec.qkv_bias),
        "layers/attention/v": (spec.n_embd, keys, spec.qkv_bias),
        "layers/attention/out": (queries, spec.n_embd, spec.bias),
        "layers/mlp/up": (spec.n_embd, spec.n_ff, spec.bias),
    }
    if spec.gated:
        found["layers/mlp/gate"] = (spec.n_embd, spec.n_ff, spec.bias)
    return {**found, "layers/mlp/down": (spec.n_ff, spec.n_embd, spec.bias)}


def is_adapter(path: str) -> bool:
    """Whether a name is that of an adapter's array."""
    return path.rsplit("/", 1)[-1] in (LORA_IN, LORA_OUT, LORA_SCALE)


def split_range(pattern: str, num_layers: int) -> tuple[str, range]:
    """A pattern without its layer numbers, and the layers that it speaks of.

    >>> split_range("layers/0-3/attention/*", 12), split_range("layers/8-", 12), split_range("embed*", 12)
    (('layers/attention/*', range(0, 4)), ('layers/*', range(8, 12)), ('embed*', range(0, 12)))
    """
    found = _RANGE.match(pattern)
    if found is None:
        return pattern, range(num_layers)
    first = int(found["first"])
    last = int(found["last"]) if found["last"] else num_layers - 1 if found["dash"] else first
    return LAYERS + (found["rest"] or "*"), range(first, last + 1)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without layer numbers stands for a name, or for a module above it.

    >>> matches("embed*", "embed/embedding"), matches("layers/mlp", "layers/mlp/up/kernel"), matches("mlp", "mlp_norm")
    (True, True, False)
    """
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The name, or the module above one, that is most like a pattern that matches nothing."""
    known: set[str] = set()
    for name in names:
        parts = name.split("/")
        known |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    plain = pattern.rstrip("*/") or pattern
    return max(sorted(known), key=lambda name: difflib.SequenceMatcher(None, plain, name).ratio())
