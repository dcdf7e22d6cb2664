"""The options of a run on MNLI with GPT-2's tokenizer at block size 512, packed or padded."""

from typing import Any

from benchmarks.bench import SHARED, Bench

BLOCK, ROWS = 512, 8
DOCUMENTS = 4000


def missing() -> str | None:
    """Why it cannot be measured here, if it cannot."""
    needed = (SHARED / "data" / "mnli", SHARED / "tokenizers" / "gpt2")
    gone = [path.name for path in needed if not path.is_dir()]
    return f"no {', '.join(gone)} (HOLDFAST_SHARED names the folder of real data)" if gone else None


def options(bench: Bench, style: str) -> dict[str, Any]:
    """The config of a run in a style."""
    architecture: dict[str, Any] = {"preset": "gpt-mini", "block_size": BLOCK}
    if bench.quick:
        architecture |= {"n_layers": 2, "n_embd": 32, "n_head": 2}
    return {
        "training": {
            "batch_size": ROWS,
            "per_device_batch_size": ROWS,
            "tokens": ROWS * BLOCK * 100_000,
            "dataset": [{"name": "mnli", "style": style}],
            "validation": False,
            "evaluate": False,
        },
        "architecture": architecture,
        "tokenizer": {"name": str(SHARED / "tokenizers" / "gpt2")},
        "data": {"root": str(SHARED / "data"), "cache": str(bench.cache), "max_documents": DOCUMENTS},
    }
