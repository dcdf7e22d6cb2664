"""The curriculum: which datasets, in which shares, with which KL weight, at which step.

Everything here is a pure function of the step, in numpy alone. A position is counted in tokens: before step s
it is `s * tokens_per_step`. Stage i covers `[sum(tokens[:i]), sum(tokens[:i+1]))`; around the boundary between
two stages a fade may blend their mixtures. There is one `Curriculum` for every trainer: a single stage, the
spec's parallel lists and the `stages` section all compile to it.
"""

import functools
import math
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import List

from holdfast.config import field
from holdfast.data.sampling import SELF, Sampling, SourceKey
from holdfast.errors import ConfigError

CURVES = ("linear", "cosine", "sigmoid")
RATE_TOLERANCE = 1e-6
MOST_TOKENS = 10**16
MOST_STEPS, MOST_FADING = 10**8, 10**7  # of a run, and those of them that fade, whose shares differ from step to step


@dataclass(frozen=True)
class FadeConfig:
    """Configuration for gradual dataset fade transitions."""

    overlap: float = field(
        "training/fade/overlap",
        resume="planned",
        default=0.0,
        help="blending region as a fraction of the smaller adjacent stage; 0 = hard switch, 1 = all of it",
        ge=0,
        le=1,
    )
    curve: str = field(
        "training/fade/curve", resume="planned", default="linear", help="shape of the blending function", choices=CURVES
    )
    steepness: float = field(
        "training/fade/steepness",
        resume="planned",
        default=10.0,
        help="slope of the sigmoid curve at its middle",
        gt=0,
        le=500,
    )
    per_boundary_overlap: List[float] = field(
        "training/fade/per_boundary_overlap",
        resume="planned",
        replaced_by="stages",
        default_factory=list,
        help="one overlap for each boundary instead of training/fade/overlap; empty = the same everywhere",
        ge=0,
        le=1,
    )

    def incoming(self, u: float) -> float:
        """Weight of the incoming stage at u, from 0 to 1 across the blending region.

        >>> [FadeConfig(curve=c).incoming(0.5) for c in ("linear", "cosine", "sigmoid")]
        [0.5, 0.5, 0.5]
        """
        if u <= 0.0:
            return 0.0
        if u >= 1.0:
            return 1.0
        if self.curve == "linear":
            return u
        if self.curve == "cosine":
            # sin² keeps small weights above 0 where (1 − cos) / 2 would cancel.
            return 0.5 if u == 0.5 else math.sin(math.pi * u / 2) ** 2
        # σ(k(u − ½)) shifted and scaled to run from exactly 0 to exactly 1 is this ratio of hyperbolic tangents.
        half = math.tanh(self.steepness / 4)
        return 0.5 * (1.0 + math.tanh(self.steepness * (u - 0.5) / 2) / half)


@dataclass(frozen=True)
class Stage:
    """One stage of a curriculum, whichever way it was written."""

    name: str
    tokens: int
    mixture: tuple[Sampling, ...]
    beta: float = 0.0
    update_reference: bool = False
    reset_optimizer: bool = False
    lr: float = 1.0  # learning rate of this stage as a multiple of the schedule's


@dataclass(frozen=True)
class SelfReplay:
    """Replay without old data: the source `self`, whose rows the model samples on entering a stage.

    Args:
        rows: of each stage; None is as many as the stage draws, so that each is drawn once.
        temperature: of the softmax that tokens are sampled from.
    """

    rows: int | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class ReplayMemory:
    """Replay from a memory of a fixed size.

    Args:
        rows: of each dataset, at most.
        replayed: for each stage the sources that it has from replay alone.
    """

    rows: int
    replayed: tuple[tuple[SourceKey, ...], ...]


@dataclass(frozen=True)
class Budget:
    """How much of a source may be forgotten.

    Args:
        name: of the source.
        limit: bits per byte that its loss may rise; of `self`, that the model may drift on its own samples.
        since: the first stage in which the source is old; its loss there is what the rise is counted from.
    """

    name: str
    limit: float
    since: int


@dataclass(frozen=True)
class Spelling:
    """Where the parts of a stage stand in the configuration, for error messages."""

    tokens: str = "training/tokens/{}"
    data: str = "training/dataset/{}"
    beta: str = "optimization/kl/betas/{}"
    reference: str = "optimization/kl/reference_update_stages"


LISTS = Spelling()
SINGLE = Spelling(tokens="training/tokens", data="training/dataset")
SECTION = Spelling(
    tokens="stages/{}/tokens", data="stages/{}/data", beta="stages/{}/beta", reference="stages/{}/update_reference"
)


@dataclass(frozen=True)
class Curriculum:
    """Stages on the axis of steps, with fades between them.

    Args:
        stages: the stages, in order.
        batch_size: rows a step.
        block_size: tokens a row.
        fade: how adjacent stages blend.
        reference_at: `boundary` or `fade_start`, where the reference snapshot of a stage is taken.
        initial_reference: a reference is loaded from elsewhere before the first step.
        referenced: stages in which a method looks at the reference, beside those with a beta.
        sampled: how rows of the source `self` are made; None where no stage has them.
        memory: what of earlier datasets is replayed; None is all of their rows.
        budgets: how much of which source may be forgotten.
    """

    stages: tuple[Stage, ...]
    batch_size: int
    block_size: int
    fade: FadeConfig = FadeConfig()
    reference_at: str = "boundary"
    initial_reference: bool = False
    referenced: tuple[int, ...] = ()
    sampled: SelfReplay | None = None
    memory: ReplayMemory | None = None
    budgets: tuple[Budget, ...] = ()
    spelling: Spelling = plain_field(default=LISTS, compare=False)

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            self._check_stage(index, stage)
        overlaps = self.fade.per_boundary_overlap
        if overlaps and len(overlaps) != len(self.stages) - 1:
            raise ConfigError(
                "training/fade/per_boundary_overlap",
                overlaps,
                f"{len(self.stages) - 1} overlaps, one for each boundary between {len(self.stages)} stages",
                "give one for each boundary, or an empty list to use training/fade/overlap everywhere",
            )
        self._check_references()
        self._check_length()

    def _check_length(self) -> None:
        fading = sum(end - start for start, end, constant in self.segments() if not constant)
        if self.total_steps > MOST_STEPS or fading > MOST_FADING:
            steps = f"{self.total_steps:,} steps" + (f", {fading:,} of them fading," if fading > MOST_FADING else "")
            raise ConfigError(
                self.spelling.tokens.format(len(self.stages) - 1),
                self.stages[-1].tokens,
                f"at most {MOST_STEPS:,} steps, of which {MOST_FADING:,} fade; {steps} of {self.tokens_per_step:,} "
                "tokens are not that",
                "raise training/batch_size or architecture/block_size, or give fewer tokens",
            )

    def _check_stage(self, index: int, stage: Stage) -> None:
        tokens_path, data_path = self.spelling.tokens.format(index), self.spelling.data.format(index)
        if stage.tokens < self.tokens_per_step:
            raise ConfigError(
                tokens_path,
                stage.tokens,
                f"at least one step of {self.tokens_per_step} tokens (batch_size x block_size)",
                "give the stage more tokens, or make training/batch_size or architecture/block_size smaller",
            )
        if self.stage_end(index) <= self.stage_start(index):
            raise ConfigError(
                tokens_path,
                stage.tokens,
                "enough tokens for a whole step after the stages before it",
                f"add {self.tokens_per_step} tokens",
            )
        if not stage.mixture:
            raise ConfigError(data_path, [], "at least one dataset", "add {name: ..., rate: 1, style: PMD}")
        total = sum(sampling.rate for sampling in stage.mixture)
        if abs(total - 1) > RATE_TOLERANCE:
            rates = [sampling.rate for sampling in stage.mixture]
            raise ConfigError(data_path, rates, "rates that sum to 1", f"they sum to {total:g}")
        keys = [SourceKey(sampling.name, sampling.style) for sampling in stage.mixture]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(data_path, key.name, "each dataset once in a mixture", "add its rates together")
        if not (math.isfinite(stage.beta) and stage.beta >= 0):
            raise ConfigError(self.spelling.beta.format(index), stage.beta, "a number of at least 0")

    def _check_references(self) -> None:
        for index, stage in enumerate(self.stages):
            has_one = self.initial_reference or any(s.update_reference for s in self.stages[: index + 1])
            if stage.beta > 0 and not has_one:
                raise ConfigError(
                    self.spelling.beta.format(index),
                    stage.beta,
                    "0, because no reference snapshot has been taken by then",
                    f"take one at stage {index} or before ({self.spelling.reference.format(index)}) or set it to 0",
                )

    # Positions

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.block_size

    @functools.cached_property
    def _edges(self) -> list[int]:
        edges = [0]
        for stage in self.stages:
            edges.append(edges[-1] + stage.tokens)
        return edges

    @property
    def total_steps(self) -> int:
        """Whole steps that the tokens of all stages give."""
        return self._edges[-1] // self.tokens_per_step

    def stage_start(self, index: int) -> int:
        """First step of a stage."""
        return -(-self._edges[index] // self.tokens_per_step)

    def stage_end(self, index: int) -> int:
        """The step after the last one of a stage."""
        return self.total_steps if index == len(self.stages) - 1 else self.stage_start(index + 1)

    def stage_at(self, step: int) -> int:
        """Index of the stage that step belongs to; the last one from the end of the run on."""
        position = step * self.tokens_per_step
        index = 0
        while index < len(self.stages) - 1 and position >= self._edges[index + 1]:
            index += 1
        return index

    def boundaries(self) -> tuple[int, ...]:
        """First steps of stages 1, 2, …"""
        return tuple(self.stage_start(index) for index in range(1, len(self.stages)))

    # Fades

    def overlap_tokens(self, boundary: int) -> float:
        """Length of the blending region between stages `boundary` and `boundary + 1`."""
        overlaps = self.fade.per_boundary_overlap
        overlap = overlaps[boundary] if overlaps else self.fade.overlap
        return overlap * min(self.stages[boundary].tokens, self.stages[boundary + 1].tokens)

    def _incoming(self, boundary: int, step: int) -> float:
        position, centre = step * self.tokens_per_step, self._edges[boundary + 1]
        length = self.overlap_tokens(boundary)
        if length == 0:
            return 1.0 if position >= centre else 0.0
        return self.fade.incoming((position - (centre - length / 2)) / length)

    def fade_steps(self, boundary: int) -> tuple[int, int]:
        """First step that may draw from stage `boundary + 1`, and first one that draws from it alone.

        Both are the boundary itself for a hard switch.
        """
        return self._fades[boundary]

    @functools.cached_property
    def _fades(self) -> list[tuple[int, int]]:
        return [self._fade_steps(boundary) for boundary in range(len(self.stages) - 1)]

    def _fade_steps(self, boundary: int) -> tuple[int, int]:
        centre, half = self._edges[boundary + 1], self.overlap_tokens(boundary) / 2
        # The region's ends in tokens give the steps up to rounding; the weights themselves decide.
        start_step = max(int((centre - half) // self.tokens_per_step) - 1, 0)
        while self._incoming(boundary, start_step) == 0:
            start_step += 1
        end_step = max(int((centre + half) // self.tokens_per_step) - 1, start_step)
        while self._incoming(boundary, end_step) < 1:
            end_step += 1
        boundary_step = self.stage_start(boundary + 1)
        return min(start_step, boundary_step), max(end_step, boundary_step)

    def fades_at(self, step: int) -> bool:
        """Whether a step lies in a blending region."""
        stage = self.stage_at(step)
        near = [boundary for boundary in (stage - 1, stage) if 0 <= boundary < len(self.stages) - 1]
        return any(start <= step < end for start, end in map(self.fade_steps, near))

    def stage_weights_at(self, step: int) -> list[float]:
        """Share of each stage's mixture at a step; they sum to 1 and at most two are above 0."""
        current = self.stage_at(step)
        weights = [0.0] * len(self.stages)
        # Regions touch at most, so only the boundaries on either side of the current stage can be blending.
        entered = self._incoming(current - 1, step) if current > 0 else 1.0
        left = self._incoming(current, step) if current < len(self.stages) - 1 else 0.0
        if entered < 1.0:
            weights[current - 1], weights[current] = 1.0 - entered, entered
        elif left > 0.0:
            weights[current], weights[current + 1] = 1.0 - left, left
        else:
            weights[current] = 1.0
        return weights

    def weights_at(self, step: int) -> dict[SourceKey, float]:
        """Share of every source at a step; they sum to 1."""
        weights = dict.fromkeys(self.sources, 0.0)
        shares = self.stage_weights_at(step)
        if self.sampled is not None:
            self._hold_back(shares, self.stage_at(step))
        for index, (stage, share) in enumerate(zip(self.stages, shares, strict=True)):
            if share > 0:
                left_out = self.sampled is not None and index > self.stage_at(step)
                for sampling in stage.mixture:
                    if not (left_out and self.is_sampled(sampling.name)):
                        weights[SourceKey(sampling.name, sampling.style)] += share * sampling.rate
        return weights

    def _hold_back(self, shares: list[float], stage: int) -> None:
        """Before its boundary an incoming stage has no sampled rows yet: their share stays with the outgoing one."""
        if stage + 1 < len(self.stages):
            rate = sum(s.rate for s in self.stages[stage + 1].mixture if self.is_sampled(s.name))
            shares[stage] += shares[stage + 1] * rate

    @functools.cached_property
    def sources(self) -> tuple[SourceKey, ...]:
        """All sources in order of first appearance, so that a later stage never reorders earlier ones."""
        return tuple(dict.fromkeys(SourceKey(s.name, s.style) for stage in self.stages for s in stage.mixture))

    def is_sampled(self, name: str) -> bool:
        """Whether a source's rows are sampled from the model itself: no dataset, and nothing to measure."""
        return self.sampled is not None and name == SELF.name

    @property
    def datasets(self) -> tuple[SourceKey, ...]:
        """The sources that are datasets."""
        return tuple(source for source in self.sources if not self.is_sampled(source.name))

    def datasets_of(self, index: int) -> tuple[Sampling, ...]:
        """The mixture of a stage without rows that the model samples itself."""
        return tuple(sampling for sampling in self.stages[index].mixture if not self.is_sampled(sampling.name))

    def is_old(self, source: SourceKey, stage: int) -> bool:
        """Whether a source's rows are old in a stage: it is of an earlier one, sampled from the model itself, or kept.

        What a pretrained model knew can be kept from the first stage on.
        """
        kept = any(budget.name == source.name and budget.since <= stage for budget in self.budgets)
        return kept or self.is_sampled(source.name) or self.home(source) < stage

    def budgets_in(self, stage: int) -> tuple[Budget, ...]:
        """The budgets that hold in a stage."""
        return tuple(budget for budget in self.budgets if budget.since <= stage)

    def home(self, source: SourceKey) -> int:
        """The first stage whose mixture holds a source."""
        return next(
            index
            for index, stage in enumerate(self.stages)
            if any((s.name, s.style) == tuple(source) for s in stage.mixture)
        )

    def draws_old(self, stage: int) -> bool:
        """Whether a stage draws from sources of earlier stages: in its mixture, or in the fade into it."""
        mixture = self.stages[stage].mixture
        replayed = any(s.rate > 0 and self.is_old(SourceKey(s.name, s.style), stage) for s in mixture)
        return replayed or (stage > 0 and self.fade_steps(stage - 1)[1] > self.stage_start(stage))

    def draws_new(self, stage: int) -> bool:
        """Whether the mixture of a stage has a source that no earlier stage has."""
        mixture = self.datasets_of(stage)
        return any(s.rate > 0 and self.home(SourceKey(s.name, s.style)) == stage for s in mixture)

    def segments(self) -> list[tuple[int, int, bool]]:
        """`(start_step, end_step, constant)` spans that cover the run; inside a fade weights are not constant."""
        spans, position = [], 0
        for boundary in range(len(self.stages) - 1):
            start_step, end_step = self.fade_steps(boundary)
            for start, end, constant in ((position, start_step, True), (start_step, end_step, False)):
                if end > start:
                    spans.append((start, end, constant))
            position = max(position, end_step)
        if self.total_steps > position:
            spans.append((position, self.total_steps, True))
        return spans

    # The anchor

    def beta_at(self, step: int) -> float:
        """Weight of the KL penalty at a step."""
        return self.stages[self.stage_at(step)].beta

    def snapshot_steps(self) -> dict[int, int]:
        """Steps before which the reference snapshot is taken, and the stage each belongs to.

        A snapshot that no later stage uses is not taken.
        """
        steps = {}
        for index, stage in enumerate(self.stages):
            if stage.update_reference and self.needs_reference(index):
                early = self.reference_at == "fade_start" and index > 0
                steps[self.fade_steps(index - 1)[0] if early else self.stage_start(index)] = index
        return steps

    def has_reference(self, step: int) -> bool:
        """Whether the state after `step` steps, before entering the next, holds a reference.

        It is there from the first snapshot to the end of the last stage that looks at it.
        """
        if step == 0:
            return False
        taken = self.initial_reference or any(snapshot < step for snapshot in self.snapshot_steps())
        return taken and self.needs_reference(self.stage_at(step - 1))

    def needs_reference(self, stage: int) -> bool:
        """Whether this stage or a later one has a penalty, or a method that looks at the reference."""
        looking = any(index >= stage for index in self.referenced)
        return looking or any(later.beta > 0 for later in self.stages[stage:])
