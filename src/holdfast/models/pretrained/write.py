"""Folders that other programs load: a model with its tokenizer and model card, or adapters apart from their base.

A family may hold several of our projections in one tensor (GPT-2's q, k and v). Their adapters become one of the summed
rank, each in its own rows and columns, which is exactly the same map; patterns of the `peft` library say so.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from holdfast.conversion import from_yaml, to_yaml_text, without_places
from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.execution.files import sync, write_atomically, write_json
from holdfast.execution.topology import Topology
from holdfast.models.config import ModelSpec
from holdfast.models.parameters import LORA_IN, LORA_OUT
from holdfast.models.pretrained.families import Family, family_for
from holdfast.models.pretrained.formats import Array, Weight
from holdfast.models.pretrained.read import load_params
from holdfast.models.pretrained.source import CONFIG, INDEX, SINGLE, open_model
from holdfast.models.pretrained.tokenizers import find_tokenizer, save_tokenizer, tokenizer_for
from holdfast.types import Json, JsonView, Tree

MAX_FILE_BYTES = 5_000_000_000
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"  # of the `peft` library
HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [holdfast, continual-learning]
---
"""


@dataclass
class Stored:
    """A tensor to write and the parameters that stand in it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[str, tuple[int, ...], Weight]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_pretrained(
    params: Tree,
    spec: ModelSpec,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
    card: str | None = None,
    extra: JsonView | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Family:
    """Write a model as `transformers` reads it; the folder appears whole or not at all.

    Args:
        params: as the decoder has them.
        family: its name in config.json; None takes the first that can express the specification.
        card: text of README.md.
        extra: further keys of config.json.
        max_file_bytes: size from which weights go into several files.
    """
    chosen = family_for(spec, family)
    leaves: Json = traverse_util.flatten_dict(params, sep="/")
    config = {
        "architectures": [chosen.architecture],
        "model_type": chosen.model_type,
        "torch_dtype": str(np.dtype(leaves["embed/embedding"].dtype)),
        **chosen.config(spec),
        **(extra or {}),
    }
    # What a family takes where nothing is said may lie outside this vocabulary.
    tokens: Json = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        tokens = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id, "pad_token_id": tokenizer.pad_id}
    with new_folder(folder) as temporary:
        write_json(temporary / CONFIG, {**tokens, **config})
        write_json(temporary / "generation_config.json", tokens)
        if card is not None:
            write_atomically(temporary / "README.md", card)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, spec.block_size)
        write_weights(leaves, chosen.weights(spec), temporary, max_file_bytes)
    return chosen


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the wanted one, renamed to it when the block ends well."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors makes files that others cannot read
                sync(file)
        temporary.chmod(0o755)
        temporary.replace(folder)  # an empty folder gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(folder: Path) -> None:
    """Refuse a place that holds something."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder}: there is something already; name a new folder")


def write_weights(leaves: JsonView, table: Mapping[str, Weight], folder: Path, max_file_bytes: int) -> None:
    """Write parameters as safetensors, one file in memory at a time."""
    from safetensors.numpy import save_file

    groups = _groups(_tensors(leaves, table), max_file_bytes)
    names = [SINGLE] if len(groups) == 1 else []
    names = names or [f"model-{at:05d}-of-{len(groups):05d}.safetensors" for at in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        save_file({key: _build(leaves, stored) for key, stored in group.items()}, folder / name, {"format": "pt"})
    if len(groups) > 1:
        total = sum(stored.num_bytes for group in groups for stored in group.values())
        places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        write_atomically(
            folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        )


def _tensors(leaves: JsonView, table: Mapping[str, Weight]) -> dict[str, Stored]:
    """The tensors of the files, by name."""
    found: dict[str, Stored] = {}
    for path, leaf in leaves.items():
        weight = table[path]
        shape = weight.stored_shape(tuple(leaf.shape[weight.num_stacked :]))
        for at, name in weight.places_of(leaf.shape):
            found.setdefault(name, Stored(shape, np.dtype(leaf.dtype))).parts.append((path, at, weight))
    return found


def _groups(tensors: Mapping[str, Stored], max_file_bytes: int) -> list[dict[str, Stored]]:
    """The tensors of each file."""
    groups: list[dict[str, Stored]] = [{}]
    room = max_file_bytes
    for name, stored in tensors.items():
        if stored.num_bytes > room and groups[-1]:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = stored
        room -= stored.num_bytes
    return groups


def _build(leaves: JsonView, stored: Stored) -> Array:
    tensor: Array = np.empty(stored.shape, stored.dtype)
    for path, at, weight in stored.parts:
        weight.write(tensor, np.asarray(leaves[path][at] if at else leaves[path]))
    return tensor


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    family: str
    spec: ModelSpec
    tokenizer: str | None


def import_model(source: str, folder: Path, *, dtype: str = "float32") -> Imported:
    """Read a model and write it as a folder that `architecture/from` and transformers take.

    Args:
        source: a folder, a llama2.c file, or a hub name.
        dtype: type of the weights to write.
    """
    check_free(folder)
    model = open_model(source, weights=True)
    spec = dataclasses.replace(model.spec(), param_dtype=dtype)
    tokenizer = tokenizer_for(source, TokenizerConfig()) if find_tokenizer(source) else None
    params = load_params(source, spec, local_mesh())
    family = model.family.model_type
    card = imported_card(source, family, spec)
    save_pretrained(params, spec, folder, tokenizer, family=family, card=card)
    return Imported(family, spec, tokenizer.name if tokenizer else None)


def local_mesh() -> jax.sharding.Mesh:
    """One device whose memory is the host's: weights only pass through."""
    return Topology.build(devices=jax.devices("cpu")[:1]).mesh


def imported_card(source: str, family: str, spec: ModelSpec) -> str:
    """The card of a model that was only converted."""
    name = without_places(source)
    return f"{HEAD}\n# {Path(source).name}\n\nConverted by Holdfast from `{name}`.\n\n{_facts(family, spec)}"


def run_card(run_dir: Path, checkpoint: str, manifest: JsonView, family: str, spec: ModelSpec) -> str:
    """The card of a checkpoint: its model, the curriculum, the score matrix and the whole configuration."""
    lines = [
        f"{HEAD}\n# {run_dir.name}\n",
        f"Trained with Holdfast through a curriculum; this is checkpoint `{checkpoint}`: "
        f"step {manifest['step']:,}, {manifest['tokens']:,} tokens.\n",
        _facts(family, spec),
    ]
    average = manifest.get("average")
    if average is not None:
        lines.insert(2, _average(average))
    results = _results(run_dir / "results.json")
    if results is not None:
        lines += ["## Curriculum\n", _curriculum(results), "## Scores after each stage\n", _matrices(results)]
    config = run_dir / "config.yaml"
    if config.is_file():
        shared = to_yaml_text(without_places(from_yaml(config.read_bytes())))
        lines += ["## Configuration\n", f"```yaml\n{shared}```\n"]
    return "\n".join(lines)


def _average(average: JsonView) -> str:
    alpha = average["alpha"]
    first, second = (f"`{Path(average[f'{end}_run']).name}@{average[end]}`" for end in ("first", "second"))
    return f"Its weights are an average of two checkpoints: {1 - alpha:.4g} of {first} and {alpha:.4g} of {second}.\n"


def _facts(family: str, spec: ModelSpec) -> str:
    rows = [
        ("family", family),
        ("parameters", f"{spec.num_parameters():,}"),
        ("layers, width", f"{spec.n_layers}, {spec.n_embd}"),
        ("heads, key/value heads", f"{spec.n_head}, {spec.n_kv_head}"),
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("tokens in a row", f"{spec.block_size:,}"),
    ]
    return table(("", ""), rows)


def _results(path: Path) -> Json | None:
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else None


def _curriculum(results: JsonView) -> str:
    return "".join(f"{number}. {name}\n" for number, name in enumerate(results["stages"], start=1))


def _matrices(results: JsonView) -> str:
    """One table for each measure that was taken, with its metrics; a cell that was not measured is a dash."""
    text = ""
    names = ["start", *results["stages"]]
    for measure, rows in results["matrix"].items():
        if not any(_is_number(value) for row in rows for value in row):
            continue
        cells = [(name, *(_number(value) for value in row)) for name, row in zip(names, rows, strict=False)]
        text += f"**{measure}**\n\n" + table(("after", *results["tasks"]), cells)
        metrics = results.get("metrics", {}).get(measure, {})
        values = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in metrics.items() if _is_number(value)]
        text += ", ".join(values) + "\n\n" if values else ""
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(("a", "b"), [("1", "2")]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    <BLANKLINE>
    """
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n\n"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else "–"


def save_adapters(
    adapters: JsonView,
    spec: ModelSpec,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    alpha: float,
    family: str | None = None,
    base: str = "",
    card: str | None = None,
) -> None:
    """Write adapters as `peft` reads them; the folder appears whole or not at all.

    Args:
        adapters: arrays by slash path, such as `layers/attention/q/lora_in`.
        family: as which their base is known; None takes the first that can express the specification.
        alpha: of which a rank-th part is the scale.
        base: where the base is, a path or a hub name.
        card: text of README.md.
    """
    from safetensors.numpy import save_file

    table = family_for(spec, family).weights(spec)
    if any(table[f"{path.rsplit('/', 1)[0]}/kernel"].num_stacked > 1 for path in adapters):
        raise UserError(
            "--adapters: adapters of experts have no form that peft knows; export the merged model, or train with "
            "optimization/lora/targets: [q, k, v, o]"
        )
    groups: dict[str, list[str]] = {}  # the name of a tensor, and our projections in it
    for path in adapters:
        module, name = path.rsplit("/", 1)
        if name == LORA_IN:
            groups.setdefault(table[f"{module}/kernel"].name, []).append(module)
    tensors: dict[str, Array] = {}
    for name, modules in groups.items():
        weights = [table[f"{module}/kernel"] for module in modules]
        for layer in range(spec.n_layers):
            stem = "base_model.model." + name.format(layer).removesuffix(".weight")
            inward = [np.asarray(adapters[f"{module}/{LORA_IN}"][layer]) for module in modules]
            outward = [np.asarray(adapters[f"{module}/{LORA_OUT}"][layer]) for module in modules]
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(np.concatenate(inward, axis=1).T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(_beside(weights, outward).T)
    rank = next(leaf.shape[2] for path, leaf in adapters.items() if path.endswith(LORA_IN))
    with new_folder(folder) as temporary:
        write_json(temporary / ADAPTER_CONFIG, _adapter_config(groups, table, rank, alpha, base))
        save_file(tensors, temporary / ADAPTERS, {"format": "pt"})
        if card is not None:
            write_atomically(temporary / "README.md", card)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, spec.block_size)


def _beside(weights: Sequence[Weight], outward: Sequence[Array]) -> Array:
    """The second matrices below each other, each in the columns of its tensor that are its own."""
    rank, width = outward[0].shape[0], weights[0].num_places or outward[0].shape[1]
    placed: Array = np.zeros((rank * len(outward), width), outward[0].dtype)
    for index, (weight, matrix) in enumerate(zip(weights, outward, strict=True)):
        columns = slice(None) if weight.places is None else weight.places
        placed[index * rank : (index + 1) * rank, columns] = matrix
    return placed


def _adapter_config(
    groups: Mapping[str, Sequence[str]], table: Mapping[str, Weight], rank: int, alpha: float, base: str
) -> Json:
    """adapter_config.json."""
    # Two parts of a name, because GPT-2 calls two different projections c_proj.
    short = {name: ".".join(name.removesuffix(".weight").split(".")[-2:]) for name in groups}
    fused = {short[name]: len(modules) for name, modules in groups.items() if len(modules) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(short.values()),
        "rank_pattern": {name: rank * count for name, count in fused.items()},
        "alpha_pattern": {name: alpha * count for name, count in fused.items()},
        "fan_in_fan_out": not any(table[f"{modules[0]}/kernel"].transposed for modules in groups.values()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
