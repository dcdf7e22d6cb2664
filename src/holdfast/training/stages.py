"""The ways to write a curriculum down: the spec's parallel lists, a `stages` section, and the replay shorthand.

Nothing here imports JAX.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import TYPE_CHECKING, List, Optional

from holdfast.curriculum import MOST_TOKENS, SECTION, Curriculum, FadeConfig, ReplayMemory, SelfReplay, Spelling, Stage
from holdfast.data.sampling import SELF, Sampling, SourceKey
from holdfast.errors import ConfigError, UserError

if TYPE_CHECKING:
    from holdfast.training.config import RunOptions


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
        for name, most in (("beta", 1e6), ("lr", 1e6)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(name, getattr(self, name), f"a number from 0 to {most:g}")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ConfigError("tokens", self.tokens, f"a whole number from 1 to {MOST_TOKENS:,}")


@dataclass(frozen=True)
class ReplayConfig:
    """Shorthand that mixes earlier stages' data, or what the model itself says, into every later stage."""

    rate: float = 0.05
    from_: Optional[List[str]] = plain_field(default=None, metadata={"key": "from"})
    objective: str = "both"
    source: str = "data"  # data | self: rows sampled from the model on entering a stage
    rows: Optional[int | str] = None  # memory of each dataset, null = all; of self: null = as many as are drawn
    temperature: float = 1.0  # that rows of self are sampled at
    stages: Optional[List[int]] = None  # that have replayed rows (0-based); null = all that could

    def __post_init__(self) -> None:
        if self.source not in ("data", SELF.name):
            raise ConfigError(
                "source", self.source, "data (earlier stages' datasets) or self (the model's own samples)"
            )
        self._check_rows()
        if not 0 < self.temperature <= 100:
            raise ConfigError(
                "temperature", self.temperature, "a number above 0 and at most 100", "1 is as the model says"
            )
        if self.source == SELF.name and self.from_ is not None:
            raise ConfigError(
                "from", self.from_, "null with source: self, which replays no dataset", "remove one of them"
            )
        if self.source != SELF.name and self.temperature != 1.0:
            raise ConfigError(
                "temperature", self.temperature, "1 with source: data, where nothing is sampled", "set source: self"
            )
        if not 0 <= self.rate < 1:
            raise ConfigError("rate", self.rate, "a share of at least 0 and below 1", "0.05 replays 5 % of the rows")
        if self.objective not in ("ce", "kl", "both"):
            raise ConfigError("objective", self.objective, "one of ce, kl, both")

    def _check_rows(self) -> None:
        if self.source == SELF.name and self.rows == "all":
            raise ConfigError("rows", self.rows, "a number, or null for as many as a stage draws", "set rows: null")
        if self.rows not in (None, "all") and not (isinstance(self.rows, int) and 1 <= self.rows <= 10**12):
            raise ConfigError("rows", self.rows, "a number of rows of at least 1, or all")

    def mixes_into(self, stage: int) -> bool:
        """Whether a stage that could have replayed rows has some."""
        return self.rate > 0 and (self.stages is None or stage in self.stages)

    @property
    def num_rows(self) -> int | None:
        """The size of the memory, or of a stage's sampled set; None where nothing limits it."""
        return self.rows if isinstance(self.rows, int) else None


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


def with_replay(stages: Sequence[Stage], replay: ReplayConfig | None, first: int = 1) -> tuple[Stage, ...]:
    """Stages whose mixtures give a share of their rows to the datasets of earlier stages, or to `self`.

    Args:
        first: the first stage that may have rows of `self`.
    """
    if replay is None or replay.rate == 0:
        return tuple(stages)
    _check_replayed(replay, first if replay.source == SELF.name else 1, len(stages))
    if replay.source == SELF.name:
        return tuple(
            _with_self(stage, replay.rate) if index >= first and replay.mixes_into(index) else stage
            for index, stage in enumerate(stages)
        )
    names = {sampling.name for stage in stages[:-1] for sampling in stage.mixture}
    if replay.from_ is not None and not replay.from_:
        raise ConfigError("training/replay/from", [], "at least one dataset", "null replays all earlier ones")
    for position, name in enumerate(replay.from_ or ()):
        if name not in names:
            expected = f"a dataset of a stage before the last: {', '.join(sorted(names))}"
            raise ConfigError(f"training/replay/from/{position}", name, expected)
    mixed = [stages[0]] if stages else []
    for index, stage in enumerate(stages[1:], 1):
        earlier = _earlier_shares(stages[:index], replay.from_) if replay.mixes_into(index) else {}
        if not earlier:
            mixed.append(stage)
            continue
        shares = {SourceKey(s.name, s.style): s.rate * (1 - replay.rate) for s in stage.mixture}
        for key, share in earlier.items():
            shares[key] = shares.get(key, 0.0) + replay.rate * share
        mixture = tuple(Sampling(key.name, round(rate, 12), key.style) for key, rate in shares.items())
        mixed.append(dataclasses.replace(stage, mixture=mixture))
    return tuple(mixed)


def _check_replayed(replay: ReplayConfig, first: int, count: int) -> None:
    """Refuse stages that can have no replayed rows."""
    if replay.stages is None:
        return
    if not replay.stages:
        raise ConfigError("training/replay/stages", [], "at least one stage", "null replays in all that could")
    for position, stage in enumerate(replay.stages):
        path = f"training/replay/stages/{position}"
        if stage not in range(first, count):
            could = f"{first} to {count - 1}" if count - 1 > first else f"{first}"
            raise ConfigError(path, stage, f"the index of a stage that could replay, {could}")
        if stage in replay.stages[:position]:
            raise ConfigError(path, stage, "each stage once")


def _with_self(stage: Stage, rate: float) -> Stage:
    if any(sampling.name == SELF.name for sampling in stage.mixture):
        raise ConfigError(
            "training/replay/source",
            SELF.name,
            "no dataset that is called self, as rows are that the model samples itself",
            "give the dataset another name in data/sources",
        )
    mixture = [dataclasses.replace(each, rate=round(each.rate * (1 - rate), 12)) for each in stage.mixture]
    return dataclasses.replace(stage, mixture=(*mixture, Sampling(SELF.name, round(rate, 12), SELF.style)))


def _memory(stages: Sequence[Stage], mixed: Sequence[Stage], replay: ReplayConfig | None) -> ReplayMemory | None:
    """What of earlier datasets replay draws from, where its size is given."""
    if replay is None or replay.source == SELF.name or replay.num_rows is None:
        return None
    replayed = tuple(
        tuple(key for key in _keys(after) if key not in _keys(before))
        for before, after in zip(stages, mixed, strict=True)
    )
    return ReplayMemory(replay.num_rows, replayed)


def _keys(stage: Stage) -> list[SourceKey]:
    return [SourceKey(sampling.name, sampling.style) for sampling in stage.mixture]


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


def from_section(
    options: "RunOptions", fade: FadeConfig, *, betas_allowed: bool = True, exactly: int | None = None
) -> Curriculum:
    """The curriculum of a `stages` section.

    Args:
        betas_allowed: whether the job has a penalty that a stage could weigh.
        exactly: how many stages there must be.
    """
    configs = options.stages.stages
    refuse_mixed_spellings(options.changed_beside("stages"))
    snapshot = configs[0].update_reference
    check_count([stage.tokens for stage in configs], "stages", options, snapshot=snapshot, exactly=exactly)
    for index, stage in enumerate(configs):
        if not betas_allowed and (stage.beta or stage.update_reference):
            name = "beta" if stage.beta else "update_reference"
            raise ConfigError(
                f"stages/{index}/{name}",
                getattr(stage, name),
                "nothing: this job has no penalty",
                "use the job continual/train/abcd_kl",
            )
    return curriculum_of(options, stages_from_section(configs), section_fade(configs, fade), SECTION)


def check_count(
    tokens: Sequence[int], path: str, options: "RunOptions", *, snapshot: bool = False, exactly: int | None = None
) -> None:
    """Refuse a curriculum with too few stages, or another number than the job has.

    One stage is enough to continue a model that exists: there is one, or something looks back at the weights that the
    stage begins with.

    Args:
        snapshot: the first stage takes one before its first step.
        exactly: how many stages the job has otherwise.
    """
    continued = (options.architecture.source, options.penalty.reference_from, options.run.methods, snapshot)
    if len(tokens) == 1 and any(continued):
        return
    if exactly is not None and len(tokens) != exactly:
        raise ConfigError(
            path,
            list(tokens),
            f"{exactly} stages, or one that continues a model (architecture/from)",
            "use a continual/train job for any number of stages",
        )
    if len(tokens) < 2:
        raise ConfigError(
            path,
            list(tokens),
            "at least 2 stages, or one that continues a model (architecture/from, or a reference snapshot at stage 0)",
            "use the job gpt/train/pretrain for one",
        )


def _check_one_stage(options: "RunOptions", stages: Sequence[Stage], *, samples: bool) -> None:
    """Refuse what looks at earlier stages in a run that has none.

    Args:
        samples: the stage has rows that the model samples from itself, which are old.
    """
    if samples:
        return
    if options.stages.replay is not None:
        raise ConfigError(
            "training/replay",
            options.stages.replay.rate,
            "null: a run of one stage has no earlier one to replay",
            "give it a stage before, write the old data into the stage's own mixture, or let a model that exists "
            "(architecture/from) replay itself (training/replay/source: self)",
        )
    if stages[0].beta > 0 and options.penalty.on == "old":
        raise ConfigError(
            "optimization/kl/on",
            "old",
            "batch: in a run of one stage no row is old, so that the penalty would see nothing",
        )


def curriculum_of(options: "RunOptions", stages: tuple[Stage, ...], fade: FadeConfig, spelling: Spelling) -> Curriculum:
    """Stages, replay and fade as one curriculum."""
    config, replay = options.trainer, options.stages.replay
    samples = replay is not None and replay.rate > 0 and replay.source == SELF.name
    # A model that exists has something to say from the first step on.
    first = 0 if samples and options.architecture.source is not None else 1
    unpenalised = [
        index
        for index, stage in enumerate(stages)
        if index >= first and stage.beta == 0 and (replay is None or replay.stages is None or index in replay.stages)
    ]
    if len(stages) == 1:
        _check_one_stage(options, stages, samples=samples and first == 0)
    if replay is not None and replay.objective == "kl" and unpenalised and not options.keep.limits:
        raise ConfigError(
            "training/replay/objective",
            "kl",
            f"ce or both, because stage {unpenalised[0]} has no penalty that could look at replayed rows",
            f"or give it one ({spelling.beta.format(unpenalised[0])})",
        )
    mixed = with_replay(stages, replay, first)
    made = Curriculum(
        mixed,
        config.batch_size,
        config.block_size,
        fade,
        reference_at=options.penalty.reference_at,
        initial_reference=options.penalty.reference_from is not None,
        sampled=SelfReplay(replay.num_rows, replay.temperature) if replay is not None and samples else None,
        memory=_memory(stages, mixed, replay),
        spelling=spelling,
    )
    _check_penalty_sees(made, options)
    return made


def _check_penalty_sees(curriculum: Curriculum, options: "RunOptions") -> None:
    """Refuse a penalty on old rows in a run in which it sees none."""
    penalty, replay = options.penalty, options.stages.replay
    held = [index for index, stage in enumerate(curriculum.stages) if stage.beta > 0]
    if penalty.on != "old" or penalty.estimator not in ("forward", "reverse") or not held or options.keep.limits:
        return
    if replay is not None and replay.objective == "ce":
        raise ConfigError(
            "optimization/kl/on",
            "old",
            "batch beside training/replay/objective: ce, which keeps old rows from the penalty: it would see nothing",
            "set it to batch, or training/replay/objective to both or kl",
        )
    if not any(curriculum.draws_old(index) for index in held):
        raise ConfigError(
            "optimization/kl/on",
            "old",
            f"batch: stage {held[0]} has a beta and no old rows, so that the penalty would see nothing",
            "set it to batch, or mix old rows in (training/replay: {rate: 0.25})",
        )
