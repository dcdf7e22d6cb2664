"""README.md of an exported model: what it is, what it was taught in which order, and what it forgot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.models.config import ModelSpec

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [holdfast, continual-learning]
---
"""


def imported_card(source: str, family: str, spec: ModelSpec) -> str:
    """The card of a model that was only converted."""
    return f"{HEAD}\n# {Path(source).name}\n\nConverted by Holdfast from `{source}`.\n\n{_facts(family, spec)}"


def run_card(run_dir: Path, checkpoint: str, manifest: Mapping[str, Any], family: str, spec: ModelSpec) -> str:
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
        kept = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        lines += ["## Configuration\n", "```yaml\n" + "\n".join(kept).strip() + "\n```\n"]
    return "\n".join(lines)


def _average(average: Mapping[str, Any]) -> str:
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


def _results(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else None


def _curriculum(results: Mapping[str, Any]) -> str:
    return "".join(f"{number}. {name}\n" for number, name in enumerate(results["stages"], start=1))


def _matrices(results: Mapping[str, Any]) -> str:
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
