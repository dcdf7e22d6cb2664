"""Hostile model folders beside a valid tokenizer: their options, their index, their weights' files.

A small Llama, GPT-2 or NeoX folder is written as transformers writes it; then something in it is changed. It must be
refused in a message, or be read as a model whose weights are finite; never a traceback, never a hang.
"""

import contextlib
import copy
import functools
import io
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "a changed config.json, index or weight file beside a valid tokenizer; refused in a message, or read"
SECONDS = 60
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "²", "9" * 5000, [], [1], {}, {"a": 1}, [[[]]], "../../etc/passwd", "model.safetensors", "💥"),
)
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "mistral")
KEYS = (
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "sliding_window",
    "head_dim",
    "hidden_act",
    "model_type",
)


def tries(seed: int) -> Iterator[Try]:
    """Folders, each of which its number makes."""
    number = 0
    while True:
        chance = random.Random(f"models {seed} {number}")
        yield Try(f"models {seed} {number}", functools.partial(hostile, chance))
        number += 1


@functools.cache
def good(family: str) -> Path:
    """A folder with a model of a family that can be read."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np
    from safetensors.numpy import save_file

    from holdfast.data.tokenizers import load_tokenizer
    from holdfast.models.config import LAYERS, ModelSpec, parameter_shapes
    from holdfast.models.pretrained import families

    known = families.FAMILIES

    own: dict[str, dict[str, Any]] = {
        "gpt2": {"bias": True, "qkv_bias": True},
        "gpt_neox": {
            "bias": True,
            "qkv_bias": True,
            "positions": "rotary",
            "rope_pct": 0.5,
            "parallel_residual": True,
            "tie_embeddings": False,
            "activation": "gelu_exact",
        },
    }
    gated = {"positions": "rotary", "norm": "rms", "activation": "silu_gated"}
    gated |= {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}.get(family, {})
    spec = ModelSpec(2, 16, 4, 4, 4, 32, vocab_size=258, block_size=32, **own.get(family, gated))
    folder = scratch() / "good" / family
    folder.mkdir(parents=True)
    table = known[family].weights(spec)
    random_numbers = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for path, shape in parameter_shapes(spec).items():
        layers = range(shape[0]) if path.startswith(LAYERS) else [None]
        for layer in layers:
            one = shape if layer is None else shape[1:]
            weight = table[path]
            name = weight.name if layer is None else weight.name.format(layer)
            stored = tensors.setdefault(name, np.zeros(weight.stored_shape(one), np.float32))
            weight.write(stored, random_numbers.normal(size=one).astype(np.float32))
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": family, **known[family].config(spec)}
    (folder / "config.json").write_text(json.dumps(config))
    load_tokenizer("bytes").save(folder)
    return folder


def hostile(chance: random.Random) -> Outcome:
    """One change to one folder, and what comes of reading it."""
    family = chance.choice(FAMILIES)
    folder = scratch() / "hostile"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good(family), folder)
    change = chance.choice((options, options, options, options, index, index, header, cut, tokenizer))
    change(folder, chance)
    how, held = looked_at(folder)
    return Outcome(change.__name__, how, held)


def options(folder: Path, chance: random.Random) -> None:
    """Other values in config.json."""
    config = json.loads((folder / "config.json").read_text())
    for _ in range(chance.choice((1, 1, 2, 4))):
        key = chance.choice([*config, *KEYS])
        value = copy.deepcopy(chance.choice(STRANGE))
        if key in ("rope_scaling", "rope_parameters") and chance.random() < 0.7:
            inner = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta")
            value = {"rope_type": chance.choice(("linear", "llama3", "default", "yarn", 7))}
            value |= {name: chance.choice(STRANGE) for name in inner if chance.random() < 0.7}
        if chance.random() < 0.15:
            config.pop(key, None)
        else:
            config[key] = value
    text = json.dumps(config)
    if chance.random() < 0.1:
        text = chance.choice(("", "[]", "null", "{", "[" * 100_000, '{"a":' * 100_000, "\0", text[: len(text) // 2]))
    (folder / "config.json").write_text(text)


def index(folder: Path, chance: random.Random) -> None:
    """An index of weights that is none."""
    tensors = ["model.embed_tokens.weight", "transformer.wte.weight"]
    maps: tuple[Any, ...] = (
        *(None, [], "x", 3, {}, {"a": None}, {"a": 1}, {"a": []}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}),
        *({"a": "\0"}, {"a": "x" * 5000}, {"a": ""}, {"a": "."}, {"a": "config.json"}),
        dict.fromkeys(tensors, "model.safetensors"),
    )
    whole: Any = {"weight_map": chance.choice(maps)}
    text = json.dumps(whole if chance.random() < 0.8 else chance.choice(([], None, "x", {})))
    if chance.random() < 0.1:
        text = chance.choice(("", "{", "[" * 100_000))
    (folder / "model.safetensors.index.json").write_text(text)


def header(folder: Path, chance: random.Random) -> None:
    """Another header of the weights' file."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    if chance.random() < 0.3:
        content[:8] = chance.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
    else:
        for _ in range(chance.choice((1, 1, 3))):
            content[8 + chance.randrange(size)] = chance.randrange(256)
    path.write_bytes(bytes(content))


def cut(folder: Path, chance: random.Random) -> None:
    """A file that is short, empty, gone, or a pickle."""
    name = chance.choice(("model.safetensors", "config.json"))
    path = folder / name
    content = path.read_bytes()
    kind = chance.choice(("short", "empty", "gone", "folder", "pickle", "link"))
    path.unlink()
    if kind == "short":
        path.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(content)
    elif kind == "link":
        path.symlink_to(path)


def tokenizer(folder: Path, chance: random.Random) -> None:
    """A damaged description of the tokenizer beside it."""
    texts = (
        "",
        "[]",
        "{}",
        "null",
        '{"kind": 3}',
        '{"kind": "library"}',
        '{"kind": "library", "name": 3}',
        "[" * 10**5,
    )
    (folder / "holdfast_tokenizer.json").write_text(chance.choice(texts))
    if chance.random() < 0.5:
        (folder / "tokenizer.json").write_text(chance.choice(("", "{}", "[]", '{"model": 3}', "[" * 10**5)))


def _late(_: int, __: FrameType | None) -> None:
    raise TimeoutError


def looked_at(folder: Path) -> tuple[str, bool]:
    """Resolve a run that starts from a folder, and read its weights."""
    import jax
    import numpy as np

    from holdfast.cli.configs import job_config
    from holdfast.errors import RunError, UserError
    from holdfast.models.pretrained.read import load_params
    from holdfast.models.pretrained.write import local_mesh
    from holdfast.training.resolve import resolve

    values: dict[str, object] = {
        "training": {"batch_size": 2, "tokens": 1000, "dataset": [{"name": "arithmetic", "style": "PADDED"}]},
        "architecture": {"from": str(folder), "block_size": 16},
    }
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run = resolve("gpt/train/pretrain", job_config("gpt/train/pretrain", values, []).cfg)
            spec: Any = run.model.options
            params = load_params(folder, spec, local_mesh())
        finite = all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(params))
    except (UserError, RunError) as error:
        return ("refused", True) if str(error).strip() else ("refused without a word", False)
    except TimeoutError:
        return f"no answer in {SECONDS} s", False
    except Exception as error:
        print("".join(traceback.format_exception(error)[-4:]), file=sys.stderr)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}", False
    finally:
        signal.alarm(0)
    return ("read", True) if finite else ("read, with weights that are not finite", False)
