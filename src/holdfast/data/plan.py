"""The data plan: which rows of which source a step draws, as a pure function of (config, seed, step).

There is no cursor: resuming is a seek. The order of rows does not depend on hosts, devices or threads.
"""

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.curriculum import Curriculum
from holdfast.data.control import ControlRows
from holdfast.data.counts import CountTable
from holdfast.data.permutation import key_of, permute
from holdfast.data.sampling import SELF, SourceKey
from holdfast.errors import UserError


class RowRefs(NamedTuple):
    """Rows of a batch, by the number of their source and their index in it."""

    source: NDArray[np.int64]
    row: NDArray[np.int64]
    control: NDArray[np.int64]  # the place of a control row in its set, −1 of all others


@dataclasses.dataclass(frozen=True)
class SourceSize:
    """What the plan must know of a prepared source."""

    num_rows: int
    mean_loss_tokens: float
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class SampledSet:
    """The rows that the model samples from itself on entering a stage; the plan knows them before they are there.

    Args:
        stage: the stage that draws them.
        step: its first step, before which they are made.
        num_rows: how many there are.
        first_row: the index of the first among the rows of all sets.
        first_draw: rows of `self` that earlier steps have drawn.
        fingerprint: a digest of options, seed, step and the plan's past: what they are, not what they hold.
    """

    stage: int
    step: int
    num_rows: int
    first_row: int
    first_draw: int
    fingerprint: str


class DataPlan:
    """Counts of rows by source and step, and the rows themselves once the sizes of the sources are known.

    Args:
        curriculum: stages, fades and batch size.
        seed: the data seed of the run.
        sizes: prepared sources; None for a plan without data, which knows counts but no rows.
        mixture_unit: `rows` or `tokens`, what rates and fade weights are shares of.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        seed: int,
        sizes: Mapping[SourceKey, SourceSize] | None = None,
        mixture_unit: str = "rows",
    ) -> None:
        self.curriculum = curriculum
        self.seed = seed
        self.sources = curriculum.sources
        # The rows of `self` are counted set by set.
        own = SourceSize(1, float(curriculum.block_size), "")
        self.sizes = None
        if sizes is not None:
            self.sizes = [own if curriculum.is_sampled(source.name) else sizes[source] for source in self.sources]
        for source, size in zip(self.sources, self.sizes or (), strict=False):
            if size.num_rows < 1:
                raise UserError(
                    f"training/dataset: {source.name} as {source.style.name} has no row of "
                    f"{curriculum.block_size} tokens; make architecture/block_size smaller or give it more data"
                )
        self.mixture_unit = mixture_unit
        self.table = CountTable(curriculum.segments(), self.row_shares_at, curriculum.batch_size)

    def row_shares_at(self, step: int) -> list[float]:
        """Share of the rows of each source at a step.

        With `tokens` as the unit a source's rows are drawn in inverse proportion to the loss tokens they hold.
        """
        weights = self.curriculum.weights_at(step)
        shares = [weights[source] for source in self.sources]
        if self.mixture_unit == "tokens" and self.sizes is not None:
            shares = [share / max(size.mean_loss_tokens, 1e-9) for share, size in zip(shares, self.sizes, strict=True)]
        total = sum(shares)
        return [share / total for share in shares]

    def counts_at(self, step: int) -> dict[SourceKey, int]:
        """Rows of each source at a step."""
        return dict(zip(self.sources, self.table.counts_at(step).tolist(), strict=True))

    def is_old(self, stage: int) -> NDArray[np.bool_]:
        """Of each source whether its rows are old in a stage."""
        return np.array([self.curriculum.is_old(source, stage) for source in self.sources])

    def drawn_before(self, step: int) -> dict[SourceKey, int]:
        """Rows of each source that the steps before this one have drawn."""
        return dict(zip(self.sources, self.table.drawn_before(step).tolist(), strict=True))

    def rows_at(self, step: int) -> RowRefs:
        """The rows of a batch in their shuffled order.

        Every source walks through its rows in a new permutation each epoch, whichever stage draws them.
        """
        assert self.sizes is not None, "a plan without prepared sources has counts but no rows"
        start, counts = self.table.drawn_before(step), self.table.counts_at(step)
        stage = self.curriculum.stage_at(step)
        kept = {budget.name for budget in self.curriculum.budgets_in(stage)}
        sources, rows, control = [], [], []
        for number, (source, size) in enumerate(zip(self.sources, self.sizes, strict=True)):
            draws = np.arange(start[number], start[number] + counts[number])
            sources.append(np.full(len(draws), number))
            control.append(np.full(len(draws), -1))
            if len(draws) and source.name in kept:
                found, control[-1] = self.control.drawn_rows(draws, source, stage)
                rows.append(found)
            else:
                rows.append(self._rows(draws, source, size.num_rows, stage))
        batch_size = self.curriculum.batch_size
        order = permute(np.arange(batch_size), batch_size, key_of(self.seed, "batch", step))
        return RowRefs(*(np.concatenate(parts)[order] for parts in (sources, rows, control)))

    @functools.cached_property
    def control(self) -> ControlRows:
        """The control rows of sources with a budget."""
        return ControlRows(self)

    def _rows(self, draws: NDArray[np.int64], source: SourceKey, num_rows: int, stage: int) -> NDArray[np.int64]:
        """The rows behind some draws of a source in a stage: of all its rows, its memory, or the stage's own set."""
        if len(draws) and self.curriculum.is_sampled(source.name):
            made = self.sampled_sets[stage]
            return made.first_row + self.permuted(draws - made.first_draw, source, made.num_rows, made.step)
        kept = self._memory(source, stage)
        if kept is None:
            return self.permuted(draws, source, num_rows)
        draws = draws - self.drawn_before(self.curriculum.stage_start(stage))[source]
        return self.permuted(self.permuted(draws, source, kept, "memory", stage), source, num_rows)

    def permuted(self, draws: NDArray[np.int64], source: SourceKey, num_rows: int, *more: object) -> NDArray[np.int64]:
        """Rows behind some draws that walk through so many of them, shuffled anew in every epoch."""
        rows = np.empty_like(draws)
        epochs = draws // num_rows
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = key_of(self.seed, source.name, source.style.name, *more, int(epoch))
            rows[here] = permute(draws[here] % num_rows, num_rows, key)
        return rows

    def _memory(self, source: SourceKey, stage: int) -> int | None:
        """How many rows of a source replay draws from in a stage: the first that it drew; None where that is all."""
        memory, curriculum = self.curriculum.memory, self.curriculum
        if memory is None or source not in memory.replayed[stage]:
            return None
        seen = self.drawn_before(curriculum.stage_end(curriculum.home(source)))[source]
        known = memory.rows if self.sizes is None else self.sizes[self.sources.index(source)].num_rows
        return max(1, min(memory.rows, seen, known))

    def num_rows(self, source: SourceKey, stage: int) -> int | None:
        """How many different rows of a source a stage draws from; None where that is not known without data."""
        if self.curriculum.is_sampled(source.name):
            return self.sampled_sets[stage].num_rows if stage in self.sampled_sets else None
        kept = self._memory(source, stage)
        if kept is not None or self.sizes is None:
            return kept
        return self.sizes[self.sources.index(source)].num_rows

    def epoch_end(self, start: int, end: int) -> int:
        """The step before which, from `start` on, every new row of the stage was drawn; at most `end`."""
        stage, first = self.curriculum.stage_at(start), self.table.drawn_before(start)
        drawn, is_old = self.table.drawn_before(end) - first, self.is_old(stage)
        new = [place for place in range(len(self.sources)) if drawn[place] and not is_old[place]]
        wanted = {place: self.num_rows(self.sources[place], stage) for place in new}

        def over(step: int) -> bool:
            drawn = self.table.drawn_before(step) - first
            return all(count is not None and drawn[place] >= count for place, count in wanted.items())

        return start + bisect.bisect_left(range(start, end), True, key=over) if wanted else end

    @functools.cached_property
    def sampled_sets(self) -> dict[int, SampledSet]:
        """The rows that the model samples from itself, by the stage that draws them."""
        made: dict[int, SampledSet] = {}
        options, curriculum = self.curriculum.sampled, self.curriculum
        if options is None or SELF not in self.sources:
            return made
        total = 0
        for stage in range(len(curriculum.stages)):
            step = curriculum.stage_start(stage)
            before, after = (self.drawn_before(at)[SELF] for at in (step, curriculum.stage_end(stage)))
            if after == before:
                continue
            count = options.rows or after - before
            facts = {
                "temperature": options.temperature,
                "rows": count,
                "block_size": curriculum.block_size,
                "seed": self.seed,
                "step": step,
                "past": self._fingerprint(step, 2, made),
            }
            made[stage] = SampledSet(stage, step, count, total, before, _digest(json.dumps(facts, sort_keys=True)))
            total += count
        return made

    def fingerprint(self, step: int, version: int = 2) -> str:
        """A digest of everything that decides the rows of the steps before this one.

        Two plans with the same digest at a step have drawn the same rows up to it, whatever comes later.

        Args:
            version: of the manifest that it is compared with; the first one hashed the counts of every single step.
        """
        return self._fingerprint(step, version, self.sampled_sets)

    def _fingerprint(self, step: int, version: int, sampled: Mapping[int, SampledSet]) -> str:
        used = self.table.drawn_before(step) > 0
        if version < 2:
            hashed = self.table.counts_until(step)[:, used].tobytes()
        else:
            found = zip(self.table.digests_until(step), used.tolist(), strict=True)
            hashed = json.dumps([step, *(f"{digest:x}" for digest, drawn in found if drawn)]).encode()
        facts: dict[str, object] = {
            "seed": self.seed,
            "batch_size": self.curriculum.batch_size,
            "block_size": self.curriculum.block_size,
            "sources": [
                [source.name, source.style.name, self._identity(number, step, sampled)]
                for number, source in enumerate(self.sources)
                if used[number]
            ],
            "counts": hashlib.blake2b(hashed, digest_size=16).hexdigest(),
        }
        memory = self.curriculum.memory
        if memory is not None:
            kept = [
                [stage, source.name, source.style.name, self._memory(source, stage)]
                for stage, sources in enumerate(memory.replayed)
                if self.curriculum.stage_start(stage) < step
                for source in sources
            ]
            if kept:
                facts["memory"] = kept
        controlled = [
            [budget.name, stage]
            for budget in self.curriculum.budgets
            for stage in range(budget.since, len(self.curriculum.stages))
            if self.curriculum.stage_start(stage) < step
        ]
        if controlled:
            facts["control"] = controlled
        return _digest(json.dumps(facts, sort_keys=True))

    def _identity(self, number: int, step: int, sampled: Mapping[int, SampledSet]) -> str:
        """What says which rows a source has; of `self` the sets that were made before a step."""
        if self.curriculum.is_sampled(self.sources[number].name):
            return ",".join(each.fingerprint for each in sampled.values() if each.step < step)
        return self.sizes[number].fingerprint if self.sizes else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
