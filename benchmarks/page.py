"""`docs/benchmarks.md`: the tables of a whole run, on what they were measured, and the notes that people add."""

from pathlib import Path
from typing import Any

from benchmarks.figures import figure_table, shape_table
from benchmarks.shapes import SHAPES

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NOTES = "<!-- notes: what stands below this line is kept -->"

INTRODUCTION = """# Benchmarks

Written by `make bench`, which measures everything here in one run: ours and the peers take turns, one at a time, on
the same two cores, {rounds} rounds; figures are medians, in brackets the spread from the slowest to the fastest
round. Measured {started} on {cpu}, {cores} cores, {memory:.0f} GiB, Python {python}; load average before {before:.1f},
after {after:.1f}; {minutes:.0f} minutes.

Every peer has an environment of its own that the command makes ({versions}). All start from the same weights, see the
same tokens and use AdamW with the same numbers, clipping and decay, in float32; a peer whose number of parameters or
whose losses of the first three steps differ from ours by more than 1e-4 (bfloat16: 2e-2) is left out. Ours is the
trainer's own loop with its data loader; peers are given their batches in memory. Ours has the huge memory pages that
`holdfast run` asks the C library for by itself; `torch_huge_pages` is eager torch with the same.
"""

FORMULA = """The step's floating point operations are those of its matrix products, counted by formula: for each token
and weight matrix 2 × its size forward and twice that backward, the unembedding included, the embedding's lookup not;
attention 4 × heads × head size × (T + 1) / 2 visible keys a layer, likewise three times. The peak is a product of two
2048 × 2048 matrices through XLA, measured in the same rounds: {peak:.0f} GFLOP/s (spread {spread:.0f}); the small
shape's step has {flops:.0f} GFLOP.
"""


def write(results: dict[str, Any]) -> Path:
    """Write the page; notes at its end stay."""
    notes = PAGE.read_text(encoding="utf-8").partition(NOTES)[2] if PAGE.exists() else "\n"
    PAGE.write_text(text(results) + NOTES + notes, encoding="utf-8")
    return PAGE


def text(results: dict[str, Any]) -> str:
    """The page up to its notes."""
    machine, small = results["machine"], results["small"]
    introduction = INTRODUCTION.format(
        rounds=results["rounds"], started=results["started"], cpu=machine["cpu"], cores=machine["cores"],
        memory=machine["memory"] / 2**30, python=machine["python"], before=results["load_before"],
        after=results["load_after"], minutes=results["minutes"], versions=versions(small),
    )  # fmt: skip
    formula = FORMULA.format(
        peak=small["matmul_flops_per_s"] / 1e9, spread=small["matmul_spread"] / 1e9, flops=small["flops_per_step"] / 1e9
    )
    parts = [introduction, "## Figures\n", figure_table(results) + "\n", formula, "## Training step\n"]
    for name, shape in SHAPES.items():
        parts.append(
            f"**{name}**: {shape.layers} layers, width {shape.width}, {shape.heads} heads, {shape.length} positions, "
            f"{shape.rows} rows, vocabulary {shape.vocabulary:,}; {results[name]['parameters']:,} parameters\n"
        )
        parts.append(shape_table(results[name]) + "\n")
    return "\n".join([*parts, ""])


def versions(result: dict[str, Any]) -> str:
    """Everybody's versions in one line."""
    found = {name: version for worker in result["versions"].values() for name, version in worker.items()}
    return ", ".join(f"{name} {version}" for name, version in found.items() if name != "jaxlib")
