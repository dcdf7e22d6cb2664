"""The jobs by name, and the options that each of them has."""

from holdfast import registry
from holdfast.data.config import DataConfig, TokenizerConfig
from holdfast.evaluation.config import EvaluationConfig
from holdfast.execution.topology import TopologyConfig
from holdfast.models.config import ArchitectureConfig
from holdfast.optim.config import OptimConfig
from holdfast.tracking.config import TrackingConfig
from holdfast.training.configs import (
    ABCDConfig,
    ABCDKLConfig,
    BaseTrainerConfig,
    KLConfig,
    KLDivergenceTrainerConfig,
    PenaltyConfig,
    RunConfig,
    StagesConfig,
)

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
    KLDivergenceTrainerConfig: (KLConfig, PenaltyConfig, StagesConfig),
    ABCDConfig: (StagesConfig,),
    ABCDKLConfig: (PenaltyConfig, StagesConfig),
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
