"""The trainers' options, with the spec's names, paths and defaults; nothing here imports JAX."""

from dataclasses import dataclass
from typing import List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.curriculum import FadeConfig
from holdfast.data.sampling import DatasetStyle, Sampling
from holdfast.errors import ConfigError
from holdfast.training.spellings import ReplayConfig, StageConfig


def _fineweb() -> Sampling:
    return Sampling(name="fineweb", rate=1, style=DatasetStyle.PMD)


def _task(name: str) -> List[Sampling]:
    return [Sampling(name=name, rate=1, style=DatasetStyle.PADDED)]


_TOKENS_HELP = "tokens of each stage"
_DATASET_HELP = "mixture of each stage: lists of {name, rate, style}, rates summing to 1"


@dataclass(frozen=True)
class BaseTrainerConfig:
    """Config of the single-stage trainer."""

    batch_size: int = field("training/batch_size", default=512, help="rows of one optimizer step", ge=1)
    per_device_batch_size: int = field(
        "training/per_device_batch_size",
        default=-1,
        help="rows per data x fsdp shard and micro-batch, at most; -1 = the most that fits the memory",
        ge=-1,
    )
    total_tokens: int = field("training/tokens", default=1_000_000_000, help="tokens to train on", ge=1)
    lr: float = field("optimization/lr", default=3e-4, help="peak learning rate", ge=0, le=100)
    warmup_pct: float = field("training/warmup_pct", default=0.01, help="share of the steps that warm up", ge=0, le=1)
    decay_pct: float = field("training/decay_pct", default=0.1, help="share of the steps that decay", ge=0, le=1)
    validate: bool = field("training/validation", default=True, help="measure validation losses during the run")
    evaluate: bool = field("training/evaluate", default=True, help="evaluate before, at boundaries and at the end")
    datasets: List[Sampling] = field(
        "training/dataset",
        default_factory=lambda: [_fineweb()],
        help="mixture: a list of {name, rate, style}, rates summing to 1",
    )
    evaluations: List[str] = field("eval/evaluations", default_factory=list, help="names of evaluations to run")
    block_size: int = field("architecture/block_size", default=512, help="tokens of a row", ge=1)
    report_interval: int = field("logging/report_interval", default=32, help="steps between train records", ge=1)
    checkpoint_interval: int = field(
        "logging/checkpoint_interval", default=1024, help="steps between rolling checkpoints", ge=1
    )
    validation_interval: int = field("logging/validation_interval", default=512, help="steps between validations", ge=1)
    validation_steps: int = field(
        "training/validation_steps", default=2048, help="validation rows per source, at most the split", ge=1
    )
    wandb: bool = field("logging/wandb", default=False, help="send metrics to Weights & Biases (extra: wandb)")

    @property
    def schedule_section(self) -> str:
        """Where the shares of the schedule stand."""
        return "training"

    @property
    def tail_pct(self) -> float:
        """Share of the steps at a constant rate after the decay."""
        return 0.0

    @property
    def validates_first_stage(self) -> bool:
        """Whether periodic validation runs during the first stage."""
        return True


@dataclass(frozen=True)
class KLConfig:
    """KL divergence penalty configuration."""

    beta: float = field(
        "optimization/kl/beta", default=0.1, help="weight of the KL penalty in the second stage", ge=0, le=1e6
    )


@dataclass(frozen=True)
class KLDivergenceTrainerConfig(BaseTrainerConfig):
    """Config for two-stage KL-divergence trainer.

    `total_tokens` is a two-element list: [stage1_tokens, stage2_tokens].
    `datasets` is a two-element list of sampling lists, one per stage.
    """

    total_tokens: List[int] = field(  # type: ignore[assignment]  # the spec redeclares it, one number a stage
        "training/tokens", default_factory=lambda: [1_000_000_000, 100_000_000], help=_TOKENS_HELP, ge=1
    )
    datasets: List[List[Sampling]] = field(  # type: ignore[assignment]  # the spec redeclares it, one mixture a stage
        "training/dataset", default_factory=lambda: [[_fineweb()], [_fineweb()]], help=_DATASET_HELP
    )


def _abcd_tokens() -> List[int]:
    return [1_000_000_000, 100_000_000, 100_000_000, 100_000_000, 100_000_000]


def _abcd_datasets() -> List[List[Sampling]]:
    return [[_fineweb()], _task("mnli"), _task("qqp"), _task("sst2"), _task("siqa")]


def _abcd_evaluations() -> List[str]:
    return ["mnli", "qqp", "sst2", "siqa"]


@dataclass(frozen=True)
class ABCDConfig(BaseTrainerConfig):
    """Config for multi-stage training with optional fades and no penalty."""

    total_tokens: List[int] = field(  # type: ignore[assignment]  # one number a stage
        "training/tokens", default_factory=_abcd_tokens, help=_TOKENS_HELP, ge=1
    )
    warmup_pct: float = field(
        "optimization/warmup_pct", default=0.01, help="share of the steps that warm up", ge=0, le=1
    )
    decay_pct: float = field("optimization/decay_pct", default=0.01, help="share of the steps that decay", ge=0, le=1)
    datasets: List[List[Sampling]] = field(  # type: ignore[assignment]  # one mixture a stage
        "training/dataset", default_factory=_abcd_datasets, help=_DATASET_HELP
    )
    evaluations: List[str] = field(
        "eval/evaluations", default_factory=_abcd_evaluations, help="names of evaluations to run"
    )
    constant_pct: float = field(
        "optimization/constant_pct",
        default=0.3,
        help="share of the steps at the end, after the decay, at a constant rate",
        ge=0,
        le=1,
    )
    skip_first_dataset_validation: bool = field(
        "training/skip_first_dataset_validation",
        default=False,
        help="no periodic validation during the first stage; boundaries are unaffected",
    )
    fade: FadeConfig = FadeConfig()

    @property
    def schedule_section(self) -> str:
        """Where the shares of the schedule stand."""
        return "optimization"

    @property
    def tail_pct(self) -> float:
        """Share of the steps at a constant rate after the decay."""
        return self.constant_pct

    @property
    def validates_first_stage(self) -> bool:
        """Whether periodic validation runs during the first stage."""
        return not self.skip_first_dataset_validation


@dataclass(frozen=True)
class ABCDKLConfig(ABCDConfig, KLDivergenceTrainerConfig):
    """Config for multi-stage ABCD training with per-stage KL penalties.

    Extends KLDivergenceTrainerConfig to an arbitrary number of stages, per-stage KL penalty weights, and
    configurable stages at which the reference policy is updated.
    """

    betas: List[float] = field(
        "optimization/kl/betas",
        default_factory=lambda: [0.0, 0.1, 0.1, 0.1, 0.1],
        help="weight of the KL penalty in each stage; 0 = no penalty",
        ge=0,
        le=1e6,
    )
    reference_update_stages: List[int] = field(
        "optimization/kl/reference_update_stages",
        default_factory=lambda: [1],
        help="stages at whose start the reference snapshot is taken anew (0-based)",
    )


@dataclass(frozen=True)
class RunConfig:
    """Options of every trainer beyond the spec's."""

    seed: int = field("training/seed", default=0, help="the only source of randomness of a run", ge=0, lt=2**63)
    seed_init: Optional[int] = field(
        "training/seed_init", default=None, help="seed of the initial weights; null = training/seed", ge=0, lt=2**63
    )
    seed_data: Optional[int] = field(
        "training/seed_data", default=None, help="seed of the order of rows; null = training/seed", ge=0, lt=2**63
    )
    seed_dropout: Optional[int] = field(
        "training/seed_dropout", default=None, help="seed of dropout; null = training/seed", ge=0, lt=2**63
    )
    mixture_unit: str = field(
        "training/mixture_unit",
        default="rows",
        help="what rates and fade weights are shares of",
        choices=("rows", "tokens"),
    )
    z_loss: float = field(
        "training/z_loss", default=0.0, help="weight of the squared log-normaliser in the loss", ge=0, le=1
    )
    ema: float = field(
        "training/ema",
        default=0.0,
        help="decay of an exponential average of the trained parameters, such as 0.999; 0 = off",
        ge=0,
        lt=1,
    )
    max_skipped: int = field(
        "training/max_skipped_steps",
        default=10,
        help="steps in a row with a non-finite loss or gradient after which the run stops",
        ge=1,
    )
    disk_patience: float = field(
        "training/disk_patience",
        default=60.0,
        help="seconds to wait for a disk that is full, read-only or gone before the run ends",
        ge=0,
        le=86400,
    )
    rolling: int = field("logging/rolling_checkpoints", default=2, help="newest untagged checkpoints to keep", ge=1)
    prefetch: int = field("training/prefetch", default=2, help="batches made ahead in the background", ge=1, le=64)

    def seed_of(self, stream: str) -> int:
        """The seed of a stream: init, data or dropout."""
        own: int | None = getattr(self, f"seed_{stream}")
        return self.seed if own is None else own


@dataclass(frozen=True)
class StagesConfig:
    """The curriculum in one section, instead of the spec's parallel lists."""

    stages: List[StageConfig] = field(
        "stages",
        default_factory=list,
        help="the curriculum in one place: {name, tokens, data, beta, update_reference, optimizer, overlap}",
    )
    replay: Optional[ReplayConfig] = field(
        "training/replay",
        default=None,
        help="{rate, from, objective}: mix earlier stages' data into later ones; null = off, {} = 5 %",
    )


@dataclass(frozen=True)
class PenaltyConfig:
    """How far from the reference the model may go, and where that is measured."""

    estimator: str = field(
        "optimization/kl/estimator",
        default="nll_difference",
        help="nll_difference (the spec's; gradient of plain training), or exact: forward, reverse; l2_reference",
    )
    target: Optional[float] = field(
        "optimization/kl/target",
        default=None,
        help="KL budget in nats per token: beta adapts so that the KL stays at or under it; null = off",
        gt=0,
        le=100,
    )
    reference_at: str = field(
        "optimization/kl/reference_at",
        default="boundary",
        help="when a stage's reference snapshot is taken",
        choices=("boundary", "fade_start"),
    )
    reference_from: Optional[str] = field(
        "optimization/kl/reference_from",
        default=None,
        help="RUN[@checkpoint] whose weights are the reference from the first step; null = snapshots of this run",
    )
    tokens: str = field(
        "optimization/kl/tokens",
        default="all",
        help="tokens that forward and reverse see: all real ones, or those of the loss",
        choices=("all", "loss"),
    )
    on: str = field(
        "optimization/kl/on",
        default="batch",
        help="rows that forward and reverse see: the whole batch, or those of earlier stages' datasets",
        choices=("batch", "old"),
    )
    probe: bool = field(
        "logging/penalty_probe",
        default=False,
        help="log the cosine between the penalty's gradient and the cross-entropy's at every report",
    )

    def __post_init__(self) -> None:
        if self.estimator not in registry.penalties:
            raise ConfigError(
                "optimization/kl/estimator", self.estimator, f"one of {', '.join(registry.penalties.names())}"
            )
        if self.target is not None and self.estimator not in ("forward", "reverse"):
            raise ConfigError(
                "optimization/kl/target",
                self.target,
                f"null with the estimator {self.estimator}, which measures no KL",
                "set optimization/kl/estimator to forward or reverse",
            )
