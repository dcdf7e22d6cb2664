"""Options of evaluations, under `eval/` (which evaluations a run has is the trainer's own option)."""

from dataclasses import dataclass
from typing import List, Optional

from holdfast.config import field
from holdfast.conversion import check_path
from holdfast.errors import ConfigError

KINDS = ("choice", "generate")


@dataclass(frozen=True)
class EvaluationConfig:
    """How evaluations are run: how many examples, how answers are compared, how text is generated."""

    limit: Optional[int] = field(
        "eval/limit",
        resume="free",
        default=None,
        ge=1,
        le=10**12,
        help="examples per evaluation, always the same ones; null is all",
    )
    held_out: List[str] = field(
        "eval/held_out",
        resume="free",
        default_factory=list,
        help="datasets whose held-out loss is measured at every boundary, whether or not the run trains on them",
    )
    seed: int = field(
        "eval/seed",
        resume="free",
        default=0,
        ge=0,
        lt=2**63,
        help="chooses the examples of a limit, and sampled tokens",
    )
    batch_size: int = field(
        "eval/batch_size", resume="free", default=32, ge=1, le=2**20, help="rows that are scored or generated at once"
    )
    kind: Optional[str] = field(
        "eval/kind", resume="free", default=None, choices=KINDS, help="how tasks are asked; null leaves it to each task"
    )
    normalise: str = field(
        "eval/normalise",
        resume="free",
        default="raw",
        choices=("raw", "length"),
        help="what chooses an answer: its log-likelihood, or that divided by its characters (acc_norm of the harness)",
    )
    end_of_text: str = field(
        "eval/end_of_text",
        resume="free",
        default="auto",
        choices=("auto", "always", "never"),
        help="whether the end of the text counts in an answer's score; auto: where one answer begins another",
    )
    max_new_tokens: int = field(
        "eval/max_new_tokens", resume="free", default=32, ge=1, le=2**24, help="longest generated answer, in tokens"
    )
    temperature: float = field(
        "eval/temperature", resume="free", default=0.0, ge=0, le=1000, help="0 takes the likeliest token"
    )
    top_k: int = field(
        "eval/top_k", resume="free", default=0, ge=0, le=2**24, help="sample among that many likeliest tokens; 0 is all"
    )
    top_p: float = field(
        "eval/top_p",
        resume="free",
        default=1.0,
        gt=0,
        le=1,
        help="sample among the likeliest tokens that reach this probability",
    )
    harness_include_path: Optional[str] = field(
        "eval/harness/include_path",
        resume="free",
        tells="nothing",
        default=None,
        help="folder with task definitions (YAML) of one's own for harness:NAME; null is the harness's own alone",
    )
    harness_num_fewshot: Optional[int] = field(
        "eval/harness/num_fewshot",
        resume="free",
        default=None,
        ge=0,
        le=10**4,
        help="solved examples before each question of harness:NAME; null leaves it to the task",
    )
    probe_interval: int = field(
        "eval/probe_interval",
        resume="free",
        default=0,
        ge=0,
        le=10**12,
        help="steps between small evaluations around a boundary; 0 is none",
    )
    probe_window: int = field(
        "eval/probe_window",
        resume="free",
        default=64,
        ge=1,
        le=10**12,
        help="steps before and after a boundary that are probed",
    )
    probe_rows: int = field(
        "eval/probe_rows",
        resume="free",
        default=16,
        ge=1,
        le=2**20,
        help="examples per evaluation and held-out rows per dataset of a probe",
    )

    steps: List[int] = field(
        "eval/steps",
        resume="free",
        default_factory=list,
        ge=1,
        le=10**8,
        help="further steps after which everything is evaluated, counted from the start of the run",
    )

    def __post_init__(self) -> None:
        check_path(self.harness_include_path, "eval/harness/include_path", "a folder with task definitions")
        for index, name in enumerate(self.held_out):
            if name in self.held_out[:index]:
                raise ConfigError(f"eval/held_out/{index}", name, "each dataset once")
