"""Steps of a run through its real loop, in a folder of their own and without its duties: for profiles, benchmarks.

Data is prefetched, placed and trained on exactly as `holdfast run` does it; nothing is validated, evaluated or
saved, and the run's own folder is not touched.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from holdfast.data.batches import Batch, prefetched
from holdfast.data.sampled import write_stand_in
from holdfast.errors import UserError
from holdfast.execution import ExecutionSpec, Topology
from holdfast.execution.checkpoints import CheckpointStore
from holdfast.tracking import Tracker
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import Sink
from holdfast.training.data import BoundaryRows
from holdfast.training.loop import TrainLoop
from holdfast.training.manifest import Progress
from holdfast.training.resolve import ResolvedRun
from holdfast.training.results import ResultsRecorder
from holdfast.training.run import make_trainer
from holdfast.training.state import entered_state


class Losses(Sink):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def log(self, event: Event) -> None:
        """Note the loss of a step's record."""
        if event.kind in ("train", "progress"):
            self.found.append(float(event.values["loss"]))


class Rehearsal:
    """A run whose steps are taken when asked for.

    Args:
        folder: of its own, for whatever a trainer or a test of checkpoints writes.
        stage: the stage to rehearse; one that needs a reference finds the initial weights there.
        topology: the devices; all that are here unless given.
    """

    def __init__(self, run: ResolvedRun, folder: Path, stage: int = 0, *, topology: Topology | None = None) -> None:
        curriculum = run.curriculum
        count = len(curriculum.stages)
        if not 0 <= stage < count:
            raise UserError(f"stage {stage}: expected one of 0 to {count - 1}, the stages of the config")
        self.trainer = make_trainer(run, ExecutionSpec(name="rehearsal", root=folder, topology=topology))
        self.losses = Losses()
        self.store = CheckpointStore(self.trainer.checkpoint_dir)
        tracker = Tracker({"losses": self.losses})
        recorder = ResultsRecorder(run, self.trainer.spec.run_dir, lambda: None, (), Progress())
        self.loop = TrainLoop(self.trainer, tracker, self.store, recorder)
        for made in self.trainer.plan.sampled_sets.values():
            write_stand_in(self.trainer.spec.run_dir, made, curriculum.block_size, run.tokenizer)
        self._first = curriculum.stage_start(stage)
        self._length = curriculum.stage_end(stage) - self._first
        self.taken = 0
        self.data_seconds = 0.0  # waiting for batches and placing them
        epoch_end = self.trainer.plan.epoch_end
        rows = BoundaryRows(curriculum, self._first, self.loop.batch_at, self.loop.place, lambda: None, epoch_end)
        self.trainer.state = entered_state(self.trainer.state, run, stage, rows)
        self.batches = self._prefetched()

    @property
    def step(self) -> int:
        """The step that comes next; after the last one of the stage its first one comes again."""
        return self._first + self.taken % self._length

    def _prefetched(self) -> Iterator[Batch]:
        """The batches of the stage, over and over."""
        run = self.trainer.resolved
        while True:
            batches = prefetched(self.loop.batch_at, run.curriculum.total_steps, self._first, run.options.run.prefetch)
            yield from itertools.islice(batches, self._length)

    def draw(self) -> Batch:
        """The next step's batch on the devices."""
        started = time.perf_counter()
        batch = self.loop.place(next(self.batches))
        self.data_seconds += time.perf_counter() - started
        return batch

    def one(self) -> None:
        """One step as the loop takes it: its metrics are fetched while the next one runs."""
        self.loop.advance(self.step, self.draw())
        self.taken += 1

    def take(self, count: int) -> None:
        """Some steps, and wait until they are done."""
        for _ in range(count):
            self.one()
        self.settle()

    def skip(self, count: int) -> None:
        """Leave out the batches of steps that a restored state has behind it."""
        for _ in range(count):
            next(self.batches)
        self.taken += count

    def settle(self) -> None:
        """Wait until everything that was started is done."""
        self.loop.settle()
        jax.block_until_ready(self.trainer.state)

    def close(self) -> None:
        """Finish what is being written."""
        self.store.close()
