"""The data of a run: prepared stores of every source, as rows for training and for validation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.curriculum import Curriculum
from holdfast.data.batches import Batch, gather
from holdfast.data.config import DataConfig
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.prepare import prepare
from holdfast.data.rows import Rows
from holdfast.data.sampling import SourceKey
from holdfast.data.store import Prepared
from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation.tasks import find_task


@dataclass(frozen=True)
class RunData:
    """Training and validation rows of every source of a curriculum."""

    train: dict[SourceKey, Rows]
    validation: dict[SourceKey, Rows]
    leaks: tuple[Leak, ...] = ()  # held-out rows that were found in training data

    def plan(self, curriculum: Curriculum, seed: int, mixture_unit: str) -> DataPlan:
        """The data plan over these rows."""
        sizes = {
            source: SourceSize(len(rows), rows.mean_loss_tokens, rows.prepared.fingerprint)
            for source, rows in self.train.items()
        }
        return DataPlan(curriculum, seed, sizes, mixture_unit)

    def held_out(self) -> dict[str, Rows]:
        """Validation rows by dataset name, in the style in which the dataset first appears."""
        by_name: dict[str, Rows] = {}
        for source, rows in self.validation.items():
            by_name.setdefault(source.name, rows)
        return by_name


def load_data(
    curriculum: Curriculum,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    evaluations: Sequence[str] = (),
    progress: bool,
) -> RunData:
    """Open the stores that a run needs, preparing what is missing, and look for leaks between them.

    Args:
        evaluations: tasks whose questions must not occur in training data either.
    """

    def prepared(name: str, split: str) -> Prepared:
        return prepare(name, split, data=data, tokenizer=tokenizer, progress=progress)

    def rows(source: SourceKey, split: str) -> Rows:
        store = prepared(source.name, split)
        return Rows(store, source.style, curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id)

    train = {source: rows(source, "train") for source in curriculum.sources}
    validation = {source: rows(source, "validation") for source in curriculum.sources}
    held_out = {source.name: found.prepared for source, found in validation.items()}
    for name in evaluations:
        task = find_task(name, data)
        held_out.setdefault(name, prepared(task.dataset or name, task.split))
    leaks = check_leaks(
        held_out,
        {source.name: found.prepared for source, found in train.items()},
        tokenizer,
        max_leak=data.max_leak,
        cache=data.cache_path(),
    )
    return RunData(train, validation, tuple(leak for leak in leaks if leak.leaked))


def validation_batches(
    rows: Rows, num_rows: int, shape: tuple[int, int], packed: bool, local: slice = slice(None)
) -> Iterator[Batch]:
    """The first rows of a validation split as (S, B, T) batches, the last one filled up with masked rows.

    Args:
        local: the part of B that this process reads.
    """
    count = min(num_rows, len(rows))
    per_batch = shape[0] * shape[1]
    for start in range(0, count, per_batch):
        here = np.arange(start, start + per_batch).reshape(shape)[:, local]
        chosen, real = here.reshape(-1), here.reshape(-1) < count
        batch = gather([rows], np.zeros(len(chosen), np.int64), np.where(real, chosen, 0), rows.block_size)
        batch = batch._replace(padding_mask=batch.padding_mask * real[:, None].astype(np.int8))
        if not packed:
            batch = batch._replace(segment_ids=None, positions=None)
        yield Batch(*(None if a is None else a.reshape(*here.shape, a.shape[-1]) for a in batch))
