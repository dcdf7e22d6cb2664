"""Options of evaluations, under `eval/` (which evaluations a run has is the trainer's own option)."""

from dataclasses import dataclass
from typing import Optional

from holdfast.config import field

KINDS = ("choice", "generate")


@dataclass(frozen=True)
class EvaluationConfig:
    """How evaluations are run: how many examples, how answers are compared, how text is generated."""

    limit: Optional[int] = field(
        "eval/limit", default=None, ge=1, help="examples per evaluation, always the same ones; null is all"
    )
    seed: int = field("eval/seed", default=0, ge=0, help="chooses the examples of a limit, and sampled tokens")
    batch_size: int = field("eval/batch_size", default=32, ge=1, help="rows that are scored or generated at once")
    kind: Optional[str] = field(
        "eval/kind", default=None, choices=KINDS, help="how tasks are asked; null leaves it to each task"
    )
    normalise: str = field(
        "eval/normalise",
        default="raw",
        choices=("raw", "length"),
        help="what chooses an answer: its log-likelihood, or that divided by its bytes",
    )
    end_of_text: str = field(
        "eval/end_of_text",
        default="auto",
        choices=("auto", "always", "never"),
        help="whether the end of the text counts in an answer's score; auto: where one answer begins another",
    )
    max_new_tokens: int = field("eval/max_new_tokens", default=32, ge=1, help="longest generated answer, in tokens")
    temperature: float = field("eval/temperature", default=0.0, ge=0, help="0 takes the likeliest token")
    top_k: int = field("eval/top_k", default=0, ge=0, help="sample among that many likeliest tokens; 0 is all")
    top_p: float = field(
        "eval/top_p", default=1.0, gt=0, le=1, help="sample among the likeliest tokens that reach this probability"
    )
    probe_interval: int = field(
        "eval/probe_interval", default=0, ge=0, help="steps between small evaluations around a boundary; 0 is none"
    )
    probe_window: int = field(
        "eval/probe_window", default=64, ge=1, help="steps before and after a boundary that are probed"
    )
    probe_rows: int = field(
        "eval/probe_rows", default=16, ge=1, help="examples per evaluation and held-out rows per dataset of a probe"
    )
