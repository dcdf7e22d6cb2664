"""All options of a run as typed values."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import build, configure, flatten
from holdfast.data.config import DataConfig, TokenizerConfig
from holdfast.evaluation.config import EvaluationConfig
from holdfast.execution.topology import TopologyConfig
from holdfast.models.config import ArchitectureConfig
from holdfast.optim.config import OptimConfig
from holdfast.tracking.config import TrackingConfig
from holdfast.training.configs import BaseTrainerConfig, PenaltyConfig, RunConfig, StagesConfig

C = TypeVar("C", bound=BaseTrainerConfig)
D = TypeVar("D")


@dataclass(frozen=True)
class Settings(Generic[C]):
    """The options of one run: the trainer's own and the shared ones."""

    trainer: C
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
    cfg: DictConfig

    @classmethod
    def read(cls, trainer: type[C], cfg: DictConfig) -> "Settings[C]":
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
            cfg=cfg,
        )

    def of(self, cls: type[D]) -> D:
        """A further config class, read from the same tree."""
        return configure(cls, self.cfg)

    def plugin(self, kind: registry.Registry[Any], name: Any) -> Any:
        """The config instance of a registered plug-in, None where it has none or is not a name."""
        config = kind.config(name) if isinstance(name, str) and name in kind else None
        return None if config is None else configure(config, self.cfg)

    def changed(self, trainer: type, paths: tuple[str, ...]) -> list[str]:
        """Those of the trainer's paths whose values differ from their defaults."""
        defaults = flatten(build(trainer), [trainer])
        values = flatten(self.cfg, [trainer])
        return [path for path in paths if path in defaults and values.get(path) != defaults[path]]
