"""The data plan: which rows of which source a step draws, as a pure function of (config, seed, step).

There is no cursor: resuming is a seek. The order of rows does not depend on hosts, devices or threads.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.curriculum import Curriculum
from holdfast.data.counts import CountTable
from holdfast.data.permutation import key_of, permute
from holdfast.data.sampling import SourceKey
from holdfast.errors import UserError


class RowRefs(NamedTuple):
    """Rows of a batch, by the number of their source and their index in it."""

    source: NDArray[np.int64]
    row: NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class SourceSize:
    """What the plan must know of a prepared source."""

    num_rows: int
    mean_loss_tokens: float
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
        self.sizes = None if sizes is None else [sizes[source] for source in self.sources]
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

    def drawn_before(self, step: int) -> dict[SourceKey, int]:
        """Rows of each source that the steps before this one have drawn."""
        return dict(zip(self.sources, self.table.drawn_before(step).tolist(), strict=True))

    def rows_at(self, step: int) -> RowRefs:
        """The rows of a batch in their shuffled order.

        Every source walks through its rows in a new permutation each epoch, whichever stage draws them.
        """
        assert self.sizes is not None, "a plan without prepared sources has counts but no rows"
        start, counts = self.table.drawn_before(step), self.table.counts_at(step)
        sources, rows = [], []
        for number, (source, size) in enumerate(zip(self.sources, self.sizes, strict=True)):
            draws = np.arange(start[number], start[number] + counts[number])
            sources.append(np.full(len(draws), number))
            rows.append(self._permuted(draws, source, size.num_rows))
        batch_size = self.curriculum.batch_size
        order = permute(np.arange(batch_size), batch_size, key_of(self.seed, "batch", step))
        return RowRefs(np.concatenate(sources)[order], np.concatenate(rows)[order])

    def _permuted(self, draws: NDArray[np.int64], source: SourceKey, num_rows: int) -> NDArray[np.int64]:
        rows = np.empty_like(draws)
        epochs = draws // num_rows
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = key_of(self.seed, source.name, source.style.name, int(epoch))
            rows[here] = permute(draws[here] % num_rows, num_rows, key)
        return rows

    def fingerprint(self, step: int, version: int = 2) -> str:
        """A digest of everything that decides the rows of the steps before this one.

        Two plans with the same digest at a step have drawn the same rows up to it, whatever comes later.

        Args:
            version: of the manifest that it is compared with; the first one hashed the counts of every single step.
        """
        used = self.table.drawn_before(step) > 0
        if version < 2:
            hashed = self.table.counts_until(step)[:, used].tobytes()
        else:
            found = zip(self.table.digests_until(step), used.tolist(), strict=True)
            hashed = json.dumps([step, *(f"{digest:x}" for digest, drawn in found if drawn)]).encode()
        facts = {
            "seed": self.seed,
            "batch_size": self.curriculum.batch_size,
            "block_size": self.curriculum.block_size,
            "sources": [
                [source.name, source.style.name, self.sizes[number].fingerprint if self.sizes else ""]
                for number, source in enumerate(self.sources)
                if used[number]
            ],
            "counts": hashlib.blake2b(hashed, digest_size=16).hexdigest(),
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
