"""The figures that must be shown, their thresholds, and the tables made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure: its key in the JSON, what it is, where its value is found, and its threshold."""

    key: str
    title: str
    path: str
    at_least: float | None = None
    at_most: float | None = None

    def value(self, results: Mapping[str, Any]) -> float | None:
        """The measured value; None where it was not measured."""
        found: Any = results
        for part in self.path.split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def threshold(self) -> str:
        """The threshold in words."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def passed(self, value: float) -> bool:
        """Whether a value keeps the threshold."""
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


FIGURES = (
    Figure("small_over_torch_eager", "small: ours / torch eager", "small/ratios/torch_eager", at_least=1.05),
    Figure("small_over_transformers", "small: ours / transformers", "small/ratios/transformers", at_least=1.25),
    Figure("small_over_levanter", "small: ours / levanter", "small/ratios/levanter", at_least=1.6),
    Figure("wide_vocab_over_torch_eager", "wide vocabulary: ours / torch eager", "wide_vocab/ratios/torch_eager", 1.1),
    Figure(
        "wide_vocab_memory", "wide vocabulary: peak memory, ours / torch eager", "wide_vocab/memory_ratio", at_most=0.8
    ),
    Figure("deep_over_torch_eager", "deep: ours / torch eager", "deep/ratios/torch_eager", at_least=1.05),
    Figure("share_of_matmul_peak", "small: share of the float32 matmul peak", "small/share_of_matmul_peak", 0.72),
    Figure("kl_step", "exact KL: step time / plain step", "small/kl_step_over_plain_step", at_most=1.4),
    Figure("packed_over_padded", "MNLI at block 512, useful tokens/s: PACKED / PADDED", "packing/speed", at_least=8),
    Figure("packed_loss_difference", "per-token losses PACKED and PADDED", "packing/loss_difference", at_most=1e-5),
    Figure("batch_over_step", "data: time in batch_at / step time", "data/batch_over_step", at_most=0.01),
    Figure("resume_first_batch", "first batch at step 1,000,000 / at step 0", "data/late_over_early", at_most=1.5),
    Figure("store_checksums", "preparing a store with checksums / without", "data/checksum_ratio", at_most=1.05),
    Figure("checkpoint_share", "loop time lost to a checkpoint every 50 steps", "checkpoints/share", at_most=0.03),
    Figure(
        "checksum_share", "of that, its checksums and whether all is finite", "checkpoints/checksum_share", at_most=0.01
    ),
    Figure("second_start", "second start / first start, to the first step", "start/second_over_first", at_most=0.5),
    Figure("help_seconds", "`holdfast --help`, seconds", "command/help_seconds", at_most=0.3),
    Figure("growth_memory", "growth over 5,000 steps: memory", "growth/memory", at_most=0.02),
    Figure("growth_step_time", "growth over 5,000 steps: step time", "growth/step_time", at_most=0.02),
)
ROWS = ("ours", "torch_eager", "torch_compile", "torch_bfloat16", "torch_huge_pages", "transformers", "levanter")


def judged(results: Mapping[str, Any]) -> dict[str, Any]:
    """All figures with their values and whether they keep their thresholds; what was not measured is null."""
    found = {}
    for figure in FIGURES:
        value = figure.value(results)
        limit = {"at_least": figure.at_least} if figure.at_least is not None else {"at_most": figure.at_most}
        found[figure.key] = {"value": value, **limit, "passed": None if value is None else figure.passed(value)}
    return found


def figure_table(results: Mapping[str, Any], *, whole: bool = True) -> str:
    """The figures as a Markdown table; of a run that is not whole, those that were measured."""
    lines = ["| figure | wanted | measured | |", "|---|---|---|---|"]
    for figure in FIGURES:
        value = figure.value(results)
        if value is None and not whole:
            continue
        verdict = "not measured" if value is None else "kept" if figure.passed(value) else "**missed**"
        lines.append(f"| {figure.title} | {figure.threshold} | {_shown(value)} | {verdict} |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"


def shape_table(result: Mapping[str, Any]) -> str:
    """One shape as a Markdown table: tokens a second, ratio, memory."""
    lines = ["| | tokens/s (spread) | ours / it | peak memory |", "|---|---|---|---|"]
    for name in ROWS:
        if name in result["missing"]:
            lines.append(f"| {name} | missing: {result['missing'][name]} | | |")
        elif name in result["peak_memory"]:
            rate = result["ours_tokens_per_s" if name == "ours" else name]
            ratio = f"{result['ratios'][name]:.2f}" if name != "ours" else ""
            memory = result["peak_memory"][name] / 2**30
            lines.append(f"| {name} | {rate:,.0f} ({result['spread'][name]:,.0f}) | {ratio} | {memory:.2f} GiB |")
    return "\n".join(lines)
