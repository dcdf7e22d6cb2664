"""The ways to write a curriculum down: the spec's parallel lists, a `stages` section, and the replay shorthand."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import List, Optional

from holdfast.curriculum import FadeConfig, Stage
from holdfast.data.sampling import Sampling, SourceKey
from holdfast.errors import ConfigError, UserError


@dataclass(frozen=True)
class StageConfig:
    """One stage in a `stages` section, the other spelling of the spec's parallel lists."""

    tokens: int
    data: List[Sampling]
    name: str = ""
    beta: float = 0.0
    update_reference: bool = False
    optimizer: str = "keep"  # keep | reset
    overlap: Optional[float] = None  # of the fade into this stage; None = training/fade/overlap
    lr: float = 1.0  # learning rate as a multiple of the schedule's

    def __post_init__(self) -> None:
        if self.optimizer not in ("keep", "reset"):
            raise ConfigError("optimizer", self.optimizer, "keep or reset")
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise ConfigError("overlap", self.overlap, "a fraction between 0 and 1")
        for name in ("beta", "lr"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "a number of at least 0")


@dataclass(frozen=True)
class ReplayConfig:
    """Shorthand that mixes earlier stages' data into every later stage."""

    rate: float = 0.05
    from_: Optional[List[str]] = plain_field(default=None, metadata={"key": "from"})
    objective: str = "both"

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ConfigError("rate", self.rate, "a share of at least 0 and below 1", "0.05 replays 5 % of the rows")
        if self.objective not in ("ce", "kl", "both"):
            raise ConfigError("objective", self.objective, "one of ce, kl, both")


def check_equal_lengths(tokens: Sequence[int], datasets: Sequence[object], betas: Sequence[float] | None) -> None:
    """The spec's parallel lists must be equally long."""
    count = len(tokens)
    if len(datasets) != count:
        raise ConfigError(
            "training/dataset", f"{len(datasets)} stages", f"{count} stages, as many as training/tokens has"
        )
    if betas is not None and len(betas) != count:
        raise ConfigError("optimization/kl/betas", list(betas), f"{count} values, as many as training/tokens has")


def stages_from_lists(
    tokens: Sequence[int],
    datasets: Sequence[Sequence[Sampling]],
    betas: Sequence[float] | None = None,
    reference_update_stages: Sequence[int] = (),
) -> tuple[Stage, ...]:
    """Stages from the spec's parallel lists."""
    check_equal_lengths(tokens, datasets, betas)
    for position, index in enumerate(reference_update_stages):
        if not 0 <= index < len(tokens):
            raise ConfigError(
                f"optimization/kl/reference_update_stages/{position}",
                index,
                f"the index of a stage, 0 to {len(tokens) - 1}",
            )
    for position, amount in enumerate(tokens):
        if amount <= 0:
            raise ConfigError(f"training/tokens/{position}", amount, "a positive number of tokens")
    return tuple(
        Stage(
            name=_stage_name(mixture, index),
            tokens=amount,
            mixture=tuple(mixture),
            beta=float(betas[index]) if betas is not None else 0.0,
            update_reference=index in reference_update_stages,
        )
        for index, (amount, mixture) in enumerate(zip(tokens, datasets, strict=True))
    )


def stages_from_section(configs: Sequence[StageConfig]) -> tuple[Stage, ...]:
    """Stages from a `stages` section."""
    stages = tuple(
        Stage(
            name=config.name or _stage_name(config.data, index),
            tokens=config.tokens,
            mixture=tuple(config.data),
            beta=config.beta,
            update_reference=config.update_reference,
            reset_optimizer=config.optimizer == "reset",
            lr=config.lr,
        )
        for index, config in enumerate(configs)
    )
    if configs[0].overlap:
        raise ConfigError("stages/0/overlap", configs[0].overlap, "no overlap: nothing fades into the first stage")
    return stages


def section_fade(configs: Sequence[StageConfig], fade: FadeConfig) -> FadeConfig:
    """The fade of a `stages` section, whose stages may each set the overlap of the fade into them."""
    if all(config.overlap is None for config in configs):
        return fade
    overlaps = [fade.overlap if config.overlap is None else config.overlap for config in configs[1:]]
    return FadeConfig(fade.overlap, fade.curve, fade.steepness, overlaps)


def _stage_name(mixture: Sequence[Sampling], index: int) -> str:
    # The dataset with the largest share names the stage: replayed rows do not.
    return max(mixture, key=lambda sampling: sampling.rate).name if mixture else f"stage {index}"


def with_replay(stages: Sequence[Stage], replay: ReplayConfig | None) -> tuple[Stage, ...]:
    """Stages whose mixtures give a share of their rows to the datasets of earlier stages."""
    if replay is None or replay.rate == 0:
        return tuple(stages)
    names = {sampling.name for stage in stages for sampling in stage.mixture}
    for position, name in enumerate(replay.from_ or ()):
        if name not in names:
            raise ConfigError(
                f"training/replay/from/{position}", name, f"a dataset of a stage: {', '.join(sorted(names))}"
            )
    mixed = [stages[0]] if stages else []
    for index, stage in enumerate(stages[1:], 1):
        earlier = _earlier_shares(stages[:index], replay.from_)
        if not earlier:
            mixed.append(stage)
            continue
        shares = {SourceKey(s.name, s.style): s.rate * (1 - replay.rate) for s in stage.mixture}
        for key, share in earlier.items():
            shares[key] = shares.get(key, 0.0) + replay.rate * share
        mixture = tuple(Sampling(key.name, round(rate, 12), key.style) for key, rate in shares.items())
        mixed.append(dataclasses.replace(stage, mixture=mixture))
    return tuple(mixed)


def _earlier_shares(stages: Sequence[Stage], wanted: Sequence[str] | None) -> Mapping[SourceKey, float]:
    shares: dict[SourceKey, float] = {}
    for stage in stages:
        for sampling in stage.mixture:
            if wanted is None or sampling.name in wanted:
                key = SourceKey(sampling.name, sampling.style)
                shares[key] = shares.get(key, 0.0) + sampling.rate
    total = sum(shares.values())
    return {key: share / total for key, share in shares.items()} if total else {}


def refuse_mixed_spellings(changed: Sequence[str]) -> None:
    """A `stages` section beside list options that were changed from their defaults is refused."""
    if changed:
        raise UserError(
            f"stages and {', '.join(changed)} describe the same thing; write the curriculum in one of the two ways"
        )
