"""The trainers' options with the spec's names, paths and defaults, all options of a run, and the table of jobs.

Nothing here imports JAX. A config class brings its own `curriculum(options)`.
"""

from dataclasses import dataclass
from typing import Any, List, Optional, TypeVar

from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import Entry, build, configure, field, flatten, schema
from holdfast.conversion import check_path
from holdfast.curriculum import LISTS, MOST_STEPS, MOST_TOKENS, SINGLE, Curriculum, FadeConfig, Stage
from holdfast.data.config import DataConfig, TokenizerConfig
from holdfast.data.sampling import DatasetStyle, Sampling
from holdfast.errors import ConfigError
from holdfast.evaluation.config import EvaluationConfig
from holdfast.execution.topology import TopologyConfig
from holdfast.methods import ELSEWHERE
from holdfast.methods.budget import KeepConfig
from holdfast.models.config import ArchitectureConfig
from holdfast.optim.config import OptimConfig
from holdfast.tracking.config import TrackingConfig
from holdfast.training import stages
from holdfast.training.stages import ReplayConfig, StageConfig


def _fineweb() -> Sampling:
    return Sampling(name="fineweb", rate=1, style=DatasetStyle.PMD)


def _task(name: str) -> List[Sampling]:
    return [Sampling(name=name, rate=1, style=DatasetStyle.PADDED)]


_TOKENS_HELP = "tokens of each stage"
_DATASET_HELP = "mixture of each stage: lists of {name, rate, style}, rates summing to 1"


@dataclass(frozen=True)
class BaseTrainerConfig:
    """Config of the single-stage trainer."""

    batch_size: int = field(
        "training/batch_size", resume="planned", default=512, help="rows of one optimizer step", ge=1, le=2**20
    )
    per_device_batch_size: int = field(
        "training/per_device_batch_size",
        resume="free",
        default=-1,
        help="rows per data x fsdp shard and micro-batch, at most; -1 = the most that fits the memory",
        ge=-1,
        le=2**20,
    )
    total_tokens: int = field(
        "training/tokens",
        resume="planned",
        replaced_by="stages",
        default=1_000_000_000,
        help="tokens to train on",
        ge=1,
        le=MOST_TOKENS,
    )
    lr: float = field("optimization/lr", default=3e-4, help="peak learning rate", ge=0, le=100)
    warmup_pct: float = field("training/warmup_pct", default=0.01, help="share of the steps that warm up", ge=0, le=1)
    decay_pct: float = field("training/decay_pct", default=0.1, help="share of the steps that decay", ge=0, le=1)
    validate: bool = field(
        "training/validation", resume="free", default=True, help="measure validation losses during the run"
    )
    evaluate: bool = field(
        "training/evaluate", resume="free", default=True, help="evaluate before, at boundaries and at the end"
    )
    datasets: List[Sampling] = field(
        "training/dataset",
        resume="planned",
        replaced_by="stages",
        default_factory=lambda: [_fineweb()],
        help="mixture: a list of {name, rate, style}, rates summing to 1",
    )
    evaluations: List[str] = field(
        "eval/evaluations", resume="free", default_factory=list, help="names of evaluations to run"
    )
    block_size: int = field(
        "architecture/block_size", resume="planned", default=512, help="tokens of a row", ge=1, le=2**24
    )
    report_interval: int = field(
        "logging/report_interval",
        resume="free",
        tells="nothing",
        default=32,
        help="steps between train records",
        ge=1,
        le=MOST_STEPS,
    )
    checkpoint_interval: int = field(
        "logging/checkpoint_interval",
        resume="free",
        tells="nothing",
        default=1024,
        help="steps between rolling checkpoints",
        ge=1,
        le=MOST_STEPS,
    )
    validation_interval: int = field(
        "logging/validation_interval",
        resume="free",
        tells="nothing",
        default=512,
        help="steps between validations",
        ge=1,
        le=MOST_STEPS,
    )
    validation_steps: int = field(
        "training/validation_steps",
        resume="free",
        default=2048,
        help="validation rows per source, at most the split",
        ge=1,
        le=10**12,
    )
    wandb: bool = field(
        "logging/wandb",
        resume="free",
        tells="nothing",
        default=False,
        help="send metrics to Weights & Biases (extra: wandb)",
    )

    def curriculum(self, options: "RunOptions") -> Curriculum:  # noqa: ARG002  # what subclasses look at
        """The stages of a run with these options."""
        stage = Stage("train", self.total_tokens, tuple(self.datasets))
        return Curriculum((stage,), self.batch_size, self.block_size, spelling=SINGLE)

    @property
    def schedule_section(self) -> str:
        """Where the shares of the schedule stand."""
        return "training"

    @property
    def own_schedule(self) -> str:
        """The schedule of the built-in trainers of this config, unless `optimization/schedule` names another."""
        return "wsd"

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
        "optimization/kl/beta",
        resume="planned",
        replaced_by="stages",
        default=0.1,
        help="weight of the KL penalty in the second stage",
        ge=0,
        le=1e6,
    )


@dataclass(frozen=True)
class KLDivergenceTrainerConfig(BaseTrainerConfig):
    """Config for two-stage KL-divergence trainer.

    `total_tokens` is a two-element list: [stage1_tokens, stage2_tokens].
    `datasets` is a two-element list of sampling lists, one per stage.
    """

    total_tokens: List[int] = field(  # type: ignore[assignment]  # the spec redeclares it, one number a stage
        "training/tokens",
        resume="planned",
        replaced_by="stages",
        default_factory=lambda: [1_000_000_000, 100_000_000],
        help=_TOKENS_HELP,
        ge=1,
        le=MOST_TOKENS,
    )
    datasets: List[List[Sampling]] = field(  # type: ignore[assignment]  # the spec redeclares it, one mixture a stage
        "training/dataset",
        resume="planned",
        replaced_by="stages",
        default_factory=lambda: [[_fineweb()], [_fineweb()]],
        help=_DATASET_HELP,
    )

    def curriculum(self, options: "RunOptions") -> Curriculum:
        """Two stages, the second with a penalty to a snapshot of the first; or that one alone, from a model."""
        beta = options.of(KLConfig).beta
        if options.stages.stages:
            return stages.from_section(options, FadeConfig(), exactly=2)
        stages.check_count(self.total_tokens, "training/tokens", options, exactly=2)
        if len(self.total_tokens) == 1:
            own = [] if options.penalty.reference_from else [0]
            made = stages.stages_from_lists(self.total_tokens, self.datasets, [beta], own)
        else:
            made = stages.stages_from_lists(self.total_tokens, self.datasets, [0.0, beta], [1])
        return stages.curriculum_of(options, made, FadeConfig(), LISTS)


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
        "training/tokens",
        resume="planned",
        replaced_by="stages",
        default_factory=_abcd_tokens,
        help=_TOKENS_HELP,
        ge=1,
        le=MOST_TOKENS,
    )
    warmup_pct: float = field(
        "optimization/warmup_pct", default=0.01, help="share of the steps that warm up", ge=0, le=1
    )
    decay_pct: float = field("optimization/decay_pct", default=0.01, help="share of the steps that decay", ge=0, le=1)
    datasets: List[List[Sampling]] = field(  # type: ignore[assignment]  # one mixture a stage
        "training/dataset", resume="planned", replaced_by="stages", default_factory=_abcd_datasets, help=_DATASET_HELP
    )
    evaluations: List[str] = field(
        "eval/evaluations", resume="free", default_factory=_abcd_evaluations, help="names of evaluations to run"
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
        resume="free",
        default=False,
        help="no periodic validation during the first stage; boundaries are unaffected",
    )
    fade: FadeConfig = FadeConfig()

    def curriculum(self, options: "RunOptions") -> Curriculum:
        """Any number of stages with fades between them, and no penalty."""
        if options.stages.stages:
            return stages.from_section(options, self.fade, betas_allowed=False)
        stages.check_count(self.total_tokens, "training/tokens", options)
        made = stages.stages_from_lists(self.total_tokens, self.datasets)
        return stages.curriculum_of(options, made, self.fade, LISTS)

    @property
    def schedule_section(self) -> str:
        """Where the shares of the schedule stand."""
        return "optimization"

    @property
    def own_schedule(self) -> str:
        """The schedule of the built-in trainers of this config, unless `optimization/schedule` names another."""
        return "wsds"

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
        resume="planned",
        replaced_by="stages",
        default_factory=lambda: [0.0, 0.1, 0.1, 0.1, 0.1],
        help="weight of the KL penalty in each stage; 0 = no penalty",
        ge=0,
        le=1e6,
    )
    reference_update_stages: List[int] = field(
        "optimization/kl/reference_update_stages",
        resume="planned",
        replaced_by="stages",
        default_factory=lambda: [1],
        ge=0,
        le=10**6,
        help="stages at whose start the reference snapshot is taken anew (0-based)",
    )

    def curriculum(self, options: "RunOptions") -> Curriculum:
        """Any number of stages with fades between them and a penalty each."""
        if options.stages.stages:
            return stages.from_section(options, self.fade)
        snapshot = 0 in self.reference_update_stages
        stages.check_count(self.total_tokens, "training/tokens", options, snapshot=snapshot)
        made = stages.stages_from_lists(self.total_tokens, self.datasets, self.betas, self.reference_update_stages)
        return stages.curriculum_of(options, made, self.fade, LISTS)


@dataclass(frozen=True)
class RunConfig:
    """Options of every trainer beyond the spec's."""

    seed: int = field(
        "training/seed",
        resume="planned",
        tells="seed",
        default=0,
        help="the only source of randomness of a run",
        ge=0,
        lt=2**63,
    )
    seed_init: Optional[int] = field(
        "training/seed_init",
        resume="planned",
        tells="seed",
        default=None,
        help="seed of the initial weights; null = training/seed",
        ge=0,
        lt=2**63,
    )
    seed_data: Optional[int] = field(
        "training/seed_data",
        resume="planned",
        tells="seed",
        default=None,
        help="seed of the order of rows; null = training/seed",
        ge=0,
        lt=2**63,
    )
    seed_dropout: Optional[int] = field(
        "training/seed_dropout",
        resume="planned",
        tells="seed",
        default=None,
        help="seed of dropout; null = training/seed",
        ge=0,
        lt=2**63,
    )
    mixture_unit: str = field(
        "training/mixture_unit",
        resume="planned",
        default="rows",
        help="what rates and fade weights are shares of",
        choices=("rows", "tokens"),
    )
    z_loss: float = field(
        "training/z_loss", default=0.0, help="weight of the squared log-normaliser in the loss", ge=0, le=1
    )
    ema: float = field(
        "training/ema",
        resume="branch",
        default=0.0,
        help="decay of an exponential average of the trained parameters, such as 0.999; 0 = off",
        ge=0,
        lt=1,
    )
    max_skipped: int = field(
        "training/max_skipped_steps",
        resume="free",
        default=10,
        help="steps in a row with a non-finite loss or gradient after which the run stops",
        ge=1,
        le=10**6,
    )
    disk_patience: float = field(
        "training/disk_patience",
        resume="free",
        default=60.0,
        help="seconds to wait for a disk that is full, read-only or gone before the run ends",
        ge=0,
        le=86400,
    )
    rolling: int = field(
        "logging/rolling_checkpoints",
        resume="free",
        tells="nothing",
        default=2,
        help="newest untagged checkpoints to keep",
        ge=1,
        le=1000,
    )
    methods: List[str] = field(
        "training/methods",
        resume="branch",
        default_factory=list,
        help="ways to keep the old beside replay and the KL anchor; `holdfast jobs` lists them",
    )
    probes: List[str] = field(
        "logging/probes",
        resume="free",
        tells="nothing",
        default_factory=list,
        help="what to measure of steps; `holdfast jobs` lists them",
    )
    probe_interval: int = field(
        "logging/probe_interval",
        resume="free",
        tells="nothing",
        default=0,
        help="steps between probes; 0 = at every train record",
        ge=0,
        le=MOST_STEPS,
    )
    prefetch: int = field(
        "training/prefetch",
        resume="free",
        tells="nothing",
        default=2,
        help="batches made ahead in the background",
        ge=1,
        le=64,
    )

    def __post_init__(self) -> None:
        for path, names, known in (
            ("training/methods", self.methods, registry.methods),
            ("logging/probes", self.probes, registry.probes),
        ):
            for index, name in enumerate(names):
                if name not in known and known is registry.methods and name.lower() in ELSEWHERE:
                    expected = "a method that stages switch on, which this way to keep the old is not"
                    raise ConfigError(f"{path}/{index}", name, expected, ELSEWHERE[name.lower()])
                if name not in known:
                    known.get(name, path=f"{path}/{index}")  # raises, with the nearest name
                if name in names[:index]:
                    raise ConfigError(f"{path}/{index}", name, f"each {known.kind} once")

    def seed_of(self, stream: str) -> int:
        """The seed of a stream: init, data or dropout."""
        own: int | None = getattr(self, f"seed_{stream}")
        return self.seed if own is None else own


@dataclass(frozen=True)
class StagesConfig:
    """The curriculum in one section, instead of the spec's parallel lists."""

    stages: List[StageConfig] = field(
        "stages",
        resume="planned",
        default_factory=list,
        help="the curriculum in one place: {name, tokens, data, beta, update_reference, optimizer, overlap}",
    )
    replay: Optional[ReplayConfig] = field(
        "training/replay",
        resume="planned",
        default=None,
        help="{rate, from, objective, source, rows, temperature, stages}: mix earlier data or own samples into stages",
    )


@dataclass(frozen=True)
class PenaltyConfig:
    """How far from the reference the model may go, and where that is measured."""

    estimator: str = field(
        "optimization/kl/estimator",
        resume="unused",
        default="nll_difference",
        help="nll_difference (the spec's; gradient of plain training), or exact: forward, reverse; l2_reference",
    )
    target: Optional[float] = field(
        "optimization/kl/target",
        resume="unused",
        default=None,
        help="KL budget in nats per token: beta adapts so that the KL's running mean stays under it; null = off",
        gt=0,
        le=100,
    )
    reference_at: str = field(
        "optimization/kl/reference_at",
        resume="unused",
        default="boundary",
        help="when a stage's reference snapshot is taken",
        choices=("boundary", "fade_start"),
    )
    reference_from: Optional[str] = field(
        "optimization/kl/reference_from",
        resume="unused",
        default=None,
        help="RUN[@checkpoint] whose weights are the reference from the first step; null = snapshots of this run",
    )
    reference_memory: str = field(
        "optimization/kl/reference_memory",
        resume="free",
        tells="nothing",
        default="device",
        help="where the reference's weights lie: on the device, or on its host, from where each layer comes when used",
        choices=("device", "host"),
    )
    reference_dtype: Optional[str] = field(
        "optimization/kl/reference_dtype",
        resume="unused",
        default=None,
        help="type in which the reference's weights are held; null: the parameters' own",
        choices=("float32", "bfloat16"),
    )
    tokens: str = field(
        "optimization/kl/tokens",
        resume="unused",
        default="all",
        help="tokens that forward and reverse see: all real ones, or those of the loss",
        choices=("all", "loss"),
    )
    on: str = field(
        "optimization/kl/on",
        resume="unused",
        default="batch",
        help="rows that forward and reverse see: the whole batch, or those of earlier stages' datasets",
        choices=("batch", "old"),
    )
    probe: bool = field(
        "logging/penalty_probe",
        resume="free",
        tells="nothing",
        default=False,
        help="log the cosine between the penalty's gradient and the cross-entropy's at every report",
    )

    def __post_init__(self) -> None:
        check_path(self.reference_from, "optimization/kl/reference_from", "RUN or RUN@checkpoint")
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


D = TypeVar("D")


@dataclass(frozen=True)
class RunOptions:
    """The options of one run: the trainer's own and the shared ones."""

    trainer: BaseTrainerConfig
    run: RunConfig
    architecture: ArchitectureConfig
    optim: OptimConfig
    topology: TopologyConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    stages: StagesConfig
    penalty: PenaltyConfig
    keep: KeepConfig
    cfg: DictConfig

    @classmethod
    def read(cls, trainer: type[BaseTrainerConfig], cfg: DictConfig) -> "RunOptions":
        """The options in a tree, validated."""
        return cls(
            trainer=configure(trainer, cfg),
            run=configure(RunConfig, cfg),
            architecture=configure(ArchitectureConfig, cfg),
            optim=configure(OptimConfig, cfg),
            topology=configure(TopologyConfig, cfg),
            tokenizer=configure(TokenizerConfig, cfg),
            data=configure(DataConfig, cfg),
            evaluation=configure(EvaluationConfig, cfg),
            tracking=configure(TrackingConfig, cfg),
            stages=configure(StagesConfig, cfg),
            penalty=configure(PenaltyConfig, cfg),
            keep=configure(KeepConfig, cfg),
            cfg=cfg,
        )

    def of(self, cls: type[D]) -> D:
        """A further config class, read from the same tree."""
        return configure(cls, self.cfg)

    def plugin(self, kind: registry.Registry[Any], name: Any) -> Any:
        """The config instance of a registered plug-in, None where it has none or is not a name."""
        config = kind.config(name) if isinstance(name, str) and name in kind else None
        return None if config is None else configure(config, self.cfg)

    def changed_beside(self, section: str) -> list[str]:
        """Options that a section replaces and that yet are not at their defaults."""
        classes = config_classes(type(self.trainer))
        defaults, values = flatten(build(*classes), classes), flatten(self.cfg, classes)
        replaced = [path for path, entry in schema(*classes).items() if entry.replaced_by == section]
        return [path for path in replaced if values.get(path) != defaults[path]]


SHARED = (
    RunConfig,
    ArchitectureConfig,
    OptimConfig,
    TopologyConfig,
    TokenizerConfig,
    DataConfig,
    EvaluationConfig,
    TrackingConfig,
)

EXTRA: dict[type, tuple[type, ...]] = {
    BaseTrainerConfig: (),
    KLDivergenceTrainerConfig: (KLConfig, PenaltyConfig, StagesConfig, KeepConfig),
    ABCDConfig: (StagesConfig, KeepConfig),
    ABCDKLConfig: (PenaltyConfig, StagesConfig, KeepConfig),
}

registry.jobs.lazy(
    "gpt/train/pretrain",
    "holdfast.training.base:BaseTrainer",
    config=BaseTrainerConfig,
    help="train on one mixture",
)
registry.jobs.lazy(
    "gpt/train/kl",
    "holdfast.training.kl_divergence:KLDivergenceTrainer",
    config=KLDivergenceTrainerConfig,
    help="two stages, the second with a KL penalty to a snapshot of the first",
)
registry.jobs.lazy(
    "continual/train/abcd",
    "holdfast.training.abcd:ABCDBaseTrainer",
    config=ABCDConfig,
    help="any number of stages with fades between their datasets",
)
registry.jobs.lazy(
    "continual/train/abcd_kl",
    "holdfast.training.abcd:ABCDKLDivergenceTrainer",
    config=ABCDKLConfig,
    help="stages with fades and a KL penalty to reference snapshots",
)


registry.probes.lazy(
    "penalty_cosine",
    "holdfast.training.probes:penalty_cosine",
    help="cosine between the gradients of the penalty and of the cross-entropy; at 1 the penalty holds nothing",
)
registry.probes.lazy(
    "update_norms",
    "holdfast.training.probes:update_norms",
    help="norm of the update of each layer and of each other module",
)
registry.probes.lazy(
    "hidden_drift",
    "holdfast.training.probes:hidden_drift",
    help="how far hidden states have moved from the reference's, relative to their length",
)


def config_classes(job: str | type) -> list[type]:
    """All classes whose fields make up a job's configuration, plug-ins' included.

    Args:
        job: the job's name, or its trainer's config class.
    """
    own = registry.jobs.config(job) if isinstance(job, str) else job
    assert own is not None, f"the job {job} was registered without a config class"
    extra = next((EXTRA[base] for base in own.__mro__ if base in EXTRA), ())
    plugins = [cls for kind in registry.KINDS.values() if kind is not registry.jobs for cls in kind.configs()]
    return [own, *extra, *SHARED, *plugins]


def option_entries(job: str) -> dict[str, Entry]:
    """All options of a job by path; where the job is not known here, those of every job that is."""
    jobs = [job] if job in registry.jobs else registry.jobs.names()
    return {path: entry for name in jobs for path, entry in schema(*config_classes(name)).items()}
