"""From a trainer's options to its curriculum; nothing here imports JAX."""

import functools
from typing import Any

from holdfast.curriculum import (
    LISTS,
    SECTION,
    SINGLE,
    Curriculum,
    FadeConfig,
    Spelling,
    Stage,
)
from holdfast.errors import ConfigError
from holdfast.training.configs import ABCDConfig, ABCDKLConfig, BaseTrainerConfig, KLConfig, KLDivergenceTrainerConfig
from holdfast.training.settings import Settings
from holdfast.training.spellings import (
    refuse_mixed_spellings,
    section_fade,
    stages_from_lists,
    stages_from_section,
    with_replay,
)

# What a `stages` section says in another way; unused, and at their defaults, in a run that has one.
LIST_PATHS = (
    "training/tokens",
    "training/dataset",
    "training/fade/per_boundary_overlap",
    "optimization/kl/betas",
    "optimization/kl/reference_update_stages",
)


def curriculum_for(settings: Settings[Any]) -> Curriculum:
    """The curriculum that the options of a run describe, in whichever spelling."""
    return _curriculum(settings.trainer, settings)


@functools.singledispatch
def _curriculum(config: Any, settings: Settings[Any]) -> Curriculum:  # noqa: ARG001
    raise TypeError(f"no curriculum for {type(config).__name__}")


@_curriculum.register
def _single(config: BaseTrainerConfig, settings: Settings[Any]) -> Curriculum:  # noqa: ARG001
    stage = Stage("train", config.total_tokens, tuple(config.datasets))
    return Curriculum((stage,), config.batch_size, config.block_size, spelling=SINGLE)


@_curriculum.register
def _two_stages(config: KLDivergenceTrainerConfig, settings: Settings[Any]) -> Curriculum:
    beta = settings.of(KLConfig).beta
    if settings.stages.stages:
        if beta != KLConfig().beta:
            refuse_mixed_spellings(["optimization/kl/beta"])
        return _staged(settings, FadeConfig(), (), betas_allowed=True, exactly=2)
    _check_count(config.total_tokens, "training/tokens", exactly=2)
    stages = stages_from_lists(config.total_tokens, config.datasets, [0.0, beta], [1])
    return _finish(settings, stages, FadeConfig(), LISTS)


@_curriculum.register
def _fading(config: ABCDConfig, settings: Settings[Any]) -> Curriculum:
    if settings.stages.stages:
        return _staged(settings, config.fade, LIST_PATHS, betas_allowed=False)
    _check_count(config.total_tokens, "training/tokens")
    return _finish(settings, stages_from_lists(config.total_tokens, config.datasets), config.fade, LISTS)


@_curriculum.register
def _fading_kl(config: ABCDKLConfig, settings: Settings[Any]) -> Curriculum:
    if settings.stages.stages:
        return _staged(settings, config.fade, LIST_PATHS, betas_allowed=True)
    _check_count(config.total_tokens, "training/tokens")
    stages = stages_from_lists(config.total_tokens, config.datasets, config.betas, config.reference_update_stages)
    return _finish(settings, stages, config.fade, LISTS)


def _staged(
    settings: Settings[Any],
    fade: FadeConfig,
    paths: tuple[str, ...],
    *,
    betas_allowed: bool,
    exactly: int | None = None,
) -> Curriculum:
    configs = settings.stages.stages
    refuse_mixed_spellings(settings.changed(type(settings.trainer), paths or LIST_PATHS))
    _check_count([stage.tokens for stage in configs], "stages", exactly=exactly)
    for index, stage in enumerate(configs):
        if not betas_allowed and (stage.beta or stage.update_reference):
            name = "beta" if stage.beta else "update_reference"
            raise ConfigError(
                f"stages/{index}/{name}",
                getattr(stage, name),
                "nothing: this job has no penalty",
                "use the job continual/train/abcd_kl",
            )
    return _finish(settings, stages_from_section(configs), section_fade(configs, fade), SECTION)


def _check_count(tokens: list[int], path: str, exactly: int | None = None) -> None:
    if exactly is not None and len(tokens) != exactly:
        raise ConfigError(path, tokens, f"{exactly} stages", "use a continual/train job for any number of stages")
    if len(tokens) < 2:
        raise ConfigError(path, tokens, "at least 2 stages", "use the job gpt/train/pretrain for one")


def _finish(settings: Settings[Any], stages: tuple[Stage, ...], fade: FadeConfig, spelling: Spelling) -> Curriculum:
    config, replay = settings.trainer, settings.stages.replay
    unpenalised = [index for index, stage in enumerate(stages) if index > 0 and stage.beta == 0]
    if replay is not None and replay.objective == "kl" and unpenalised:
        raise ConfigError(
            "training/replay/objective",
            "kl",
            f"ce or both, because stage {unpenalised[0]} has no penalty that could look at replayed rows",
            f"or give it one ({spelling.beta.format(unpenalised[0])})",
        )
    return Curriculum(
        with_replay(stages, replay),
        config.batch_size,
        config.block_size,
        fade,
        reference_at=settings.penalty.reference_at,
        initial_reference=settings.penalty.reference_from is not None,
        spelling=spelling,
    )
