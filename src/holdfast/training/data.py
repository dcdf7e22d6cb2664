"""The data of a run: prepared stores of every source as rows, and the rows around a boundary."""

import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import TYPE_CHECKING

import numpy as np

from holdfast.curriculum import Curriculum
from holdfast.data.batches import Batch, PenaltyView
from holdfast.data.config import DataConfig
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.prepare import prepare, prepare_shard
from holdfast.data.rows import Rows
from holdfast.data.sampling import DatasetStyle, SourceKey
from holdfast.data.shards import Shard
from holdfast.data.sources import find_source
from holdfast.data.store import TokenStore
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.evaluation.harness_tasks import is_harness
from holdfast.evaluation.tasks import Task, find_task
from holdfast.methods import State
from holdfast.training.resolve import ResolvedRun
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class RunData:
    """Training and validation rows of every source of a curriculum."""

    train: dict[SourceKey, Rows]
    validation: dict[SourceKey, Rows]
    measured: dict[str, Rows] = plain_field(default_factory=dict)  # held-out rows of what is not trained on, by name
    leaks: tuple[Leak, ...] = ()  # held-out rows that were found in training data

    def plan(self, curriculum: Curriculum, seed: int, mixture_unit: str) -> DataPlan:
        """The data plan over these rows."""
        sizes = {
            source: SourceSize(len(rows), rows.mean_loss_tokens, rows.prepared.fingerprint)
            for source, rows in self.train.items()
        }
        return DataPlan(curriculum, seed, sizes, mixture_unit)

    def held_out(self) -> dict[str, Rows]:
        """Validation rows by dataset name, in the style in which the dataset first appears; then `eval/held_out`."""
        by_name: dict[str, Rows] = {}
        for source, rows in self.validation.items():
            by_name.setdefault(source.name, rows)
        return {**by_name, **self.measured}


def load_data(
    curriculum: Curriculum,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    evaluations: Sequence[str] = (),
    measured: Sequence[str] = (),
    progress: bool,
    begun: bool = False,
) -> RunData:
    """Open the stores that a run needs, preparing what is missing, and look for leaks between them.

    Args:
        evaluations: tasks whose questions must not occur in training data either.
        measured: datasets whose held-out rows are measured without any of theirs being trained on.
        begun: a run that has checkpoints is finished, whatever a later version finds leaking: it is only reported.
    """

    def prepared(name: str, split: str) -> TokenStore:
        return prepare(name, split, data=data, tokenizer=tokenizer, progress=progress)

    def rows(source: SourceKey, split: str) -> Rows:
        store = prepared(source.name, split)
        return Rows(store, source.style, curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id)

    train = {source: rows(source, "train") for source in curriculum.datasets}
    validation = {source: rows(source, "validation") for source in curriculum.datasets}
    others = {name: held_out_of(name, curriculum, data, tokenizer, progress=progress) for name in measured}
    held_out = {source.name: found.prepared for source, found in validation.items()}
    held_out |= {name: found.prepared for name, found in others.items()}
    for name in evaluations:
        if is_harness(name):
            continue  # its questions are the harness's, and no store is made of them
        task = find_task(name, data)
        assert isinstance(task, Task)
        held_out.setdefault(name, prepared(task.dataset or name, task.split))
    leaks = check_leaks(
        held_out,
        {source.name: found.prepared for source, found in train.items()},
        tokenizer,
        max_leak=1.0 if begun else data.max_leak,
        cache=data.cache_path(),
    )
    return RunData(train, validation, others, tuple(leak for leak in leaks if leak.leaked))


def prepare_share(
    curriculum: Curriculum,
    data: DataConfig,
    tokenizer: Tokenizer,
    shard: Shard,
    *,
    evaluations: Sequence[str] = (),
    measured: Sequence[str] = (),
    progress: bool,
) -> dict[tuple[str, str], TokenStore | None]:
    """One job's share of all stores that a run needs, by dataset and split; those that are whole now.

    Args:
        evaluations, measured: as `load_data` has them, which looks for leaks when all stores are there.
    """
    names = [source.name for source in curriculum.datasets]
    tasks = {name: find_task(name, data) for name in evaluations if not is_harness(name)}
    needed = [(name, split) for split in ("train", "validation") for name in names]
    needed += [(name, "validation") for name in measured]
    needed += [(task.dataset or name, task.split) for name, task in tasks.items() if isinstance(task, Task)]
    return {
        (name, split): prepare_shard(name, split, shard, data=data, tokenizer=tokenizer, progress=progress)
        for name, split in dict.fromkeys(needed)
    }


def held_out_of(
    name: str, curriculum: Curriculum, data: DataConfig, tokenizer: Tokenizer, *, progress: bool = False
) -> Rows:
    """Held-out rows of a dataset that no stage trains on: a task's examples and chats one a row, texts as a stream."""
    style = DatasetStyle.PMD if find_source(name, data).kind == "text" else DatasetStyle.PADDED
    store = prepare(name, "validation", data=data, tokenizer=tokenizer, progress=progress)
    rows = Rows(store, style, curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id)
    if len(rows) < 1:
        raise UserError(
            f"eval/held_out: {name} has no held-out row of {curriculum.block_size} tokens; make "
            "architecture/block_size smaller or give it more data"
        )
    return rows


def held_out_rows(
    curriculum: Curriculum,
    data: DataConfig,
    tokenizer: Tokenizer,
    names: Collection[str],
    *,
    measured: Sequence[str] = (),
    left_out: Callable[[str], None] | None = None,
) -> dict[str, Rows]:
    """Validation rows of the named datasets as `RunData.held_out` has them; training data is not asked for.

    Args:
        measured: those that no stage trains on.
        left_out: is told which dataset is not here, and why; None raises.
    """

    def trained(source: SourceKey) -> Rows:
        store = prepare(source.name, "validation", data=data, tokenizer=tokenizer)
        return Rows(store, source.style, curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id)

    makers: dict[str, Callable[[], Rows]] = {}
    for source in curriculum.datasets:
        makers.setdefault(source.name, functools.partial(trained, source))
    for name in measured:
        makers.setdefault(name, functools.partial(held_out_of, name, curriculum, data, tokenizer))
    found: dict[str, Rows] = {}
    for name, make in makers.items():
        if name not in names:
            continue
        try:
            found[name] = make()
        except UserError as error:
            if left_out is None:
                raise
            left_out(f"{name}: {error}")
    return found


def penalty_view(run: ResolvedRun) -> PenaltyView | None:
    """What of a batch the penalty sees; None where no stage has one."""
    options, replay = run.options.penalty, run.options.stages.replay
    if not run.curriculum.needs_reference(0):
        return None
    return PenaltyView(options.tokens, options.on, replay.objective if replay else "both")


@dataclass(frozen=True)
class BoundaryRows:
    """Rows on both sides of the boundary at a step, for methods that remember some (`methods.StageData`).

    Args:
        batch_at: the batch of a step, as the run trains on it; of control rows nothing is remembered.
        place: puts a batch on the devices.
        reference: the weights that `optimization/kl/reference_from` names, loaded when asked for.
        epoch_end: `DataPlan.epoch_end`: where all new rows were drawn.
        seed: of the run.
    """

    curriculum: Curriculum
    step: int
    batch_at: Callable[[int], Batch]
    place: Callable[[Batch], Batch]
    reference: Callable[[], Tree]
    epoch_end: Callable[[int, int], int]
    seed: int = 0

    def old(self, num_rows: int) -> Batch:
        """The newest rows of the stage before, from the time when no row of the next one was drawn yet."""
        before = self.curriculum.stage_at(self.step) - 1
        assert before >= 0, "nothing is old in the first stage"
        end = self.curriculum.fade_steps(before)[0]
        first = max(self.curriculum.stage_start(before), end - self._steps(num_rows))
        return self._batches(range(min(first, end - 1), end))

    def new(self, num_rows: int) -> Batch:
        """The first rows that are drawn when the fade into the stage is over."""
        return self._batches(self._new_steps(num_rows))

    def new_batches(self, num_rows: int | None) -> Iterator[Batch]:
        """The same, one step's batch after another; None: each once, as far as drawn before the stage fades out."""
        return (self.place(self.batch_at(step)) for step in self._new_steps(num_rows))

    @property
    def renews_reference(self) -> bool:
        """Whether the snapshot is taken at this step."""
        return self.step in self.curriculum.snapshot_steps()

    def input_moments(self, state: State, num_rows: int) -> "Mapping[str, jax.Array]":
        """Mean squares of the inputs of dense kernels over rows of the stage before."""
        return state.input_moments(self.old(num_rows))

    def key(self, stream: str) -> "jax.Array":
        """A random key for a stream of that name, from seed and step."""
        import jax

        own = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(stream.encode()))
        return jax.random.fold_in(own, self.step)

    def initial_reference(self) -> Tree:
        """The weights that the options name as the reference."""
        return self.reference()

    def _new_steps(self, num_rows: int | None) -> range:
        curriculum, stage = self.curriculum, self.curriculum.stage_at(self.step)
        last = stage == len(curriculum.stages) - 1
        end = curriculum.total_steps if last else curriculum.fade_steps(stage)[0]
        start = min(curriculum.fade_steps(stage - 1)[1] if stage else 0, curriculum.total_steps - 1)
        if curriculum.sampled is not None:  # rows of the next stage are not sampled yet
            start = min(start, curriculum.stage_end(stage) - 1)
        wanted = self.epoch_end(start, end) if num_rows is None else start + self._steps(num_rows)
        return range(start, max(min(wanted, end), start + 1))

    def _steps(self, num_rows: int) -> int:
        return -(-num_rows // self.curriculum.batch_size)

    def _batches(self, steps: range) -> Batch:
        # Steps differ in how many slots they have, and nothing looks for old rows here.
        parts = zip(*(Batch(*self.batch_at(step))._replace(slots=None) for step in steps), strict=True)
        return self.place(Batch(*(None if each[0] is None else np.concatenate(each) for each in parts)))
