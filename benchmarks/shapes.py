"""What is trained in the benchmarks: the shapes, the optimizer's numbers, and a corpus that any system can read.

Words are drawn at random, frequent ones more often, from a vocabulary as large as the model's. Every document starts
with the word that also ends it, so that the next tokens of a row are the row itself, moved by one: systems that shift
their labels themselves (transformers, levanter) then have the same targets as those that are given them.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ADAMW = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
NUM_DOCUMENTS = 512


@dataclass(frozen=True)
class Shape:
    """A model and a batch; `steps` are timed together in one round."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int
    vocabulary: int
    steps: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


SHAPES = {
    "small": Shape(6, 384, 6, 256, 8, 512, steps=4),
    "wide_vocab": Shape(6, 384, 6, 256, 8, 50_304),
    "deep": Shape(12, 512, 8, 512, 4, 8_192),
}
TINY = Shape(2, 32, 2, 16, 2, 64, steps=1)  # of the harness's own tests


def write_corpus(folder: Path, shape: Shape) -> None:
    """A tokenizer.json and documents of exactly one row each."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"w{index}": index for index in range(shape.vocabulary)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(10, shape.vocabulary + 10)
    for split, count in (("train", NUM_DOCUMENTS), ("validation", 16)):
        words = rng.choice(shape.vocabulary, (count, shape.length), p=shares / shares.sum())
        words[:, 0] = 0
        lines = (json.dumps({"text": " ".join(f"w{word}" for word in row)}) for row in words)
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def options(shape: Shape, corpus: Path, cache: Path) -> dict[str, Any]:
    """The config of our own run: GPT-2's design, every number equal to the peers'."""
    adamw = {"beta1": ADAMW["beta1"], "beta2": ADAMW["beta2"], "epsilon": ADAMW["epsilon"]}
    return {
        "training": {
            "batch_size": shape.rows,
            "per_device_batch_size": shape.rows,
            "tokens": shape.tokens * 100_000,
            "dataset": [{"name": "corpus", "style": "PADDED"}],
            "validation": False,
            "evaluate": False,
        },
        "architecture": {
            "preset": "gpt-mini",
            "n_layers": shape.layers,
            "n_embd": shape.width,
            "n_head": shape.heads,
            "block_size": shape.length,
        },
        "optimization": {
            "lr": ADAMW["lr"],
            "schedule": "constant",
            "weight_decay": ADAMW["weight_decay"],
            "clip_norm": ADAMW["clip_norm"],
            "adamw": adamw,
        },
        "tokenizer": {"name": str(corpus / "tokenizer.json"), "eot": "w0", "pad": "w0"},
        "data": {"sources": {"corpus": {"path": str(corpus)}}, "cache": str(cache)},
    }


def as_json(shape: Shape, **more: Any) -> str:
    """What a worker is told on its command line."""
    return json.dumps({**dataclasses.asdict(shape), "adamw": ADAMW, **more})
