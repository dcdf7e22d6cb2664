"""Steps of a run through its real loop, in a folder of their own and without its duties: for profiles, benchmarks.

Data is prefetched, placed and trained on exactly as `holdfast run` does it; nothing is validated, evaluated or
saved, and the run's own folder is not touched.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import DictConfig

from holdfast.config import configure
from holdfast.data.batches import prefetched
from holdfast.errors import UserError
from holdfast.execution import ExecutionSpec, TopologyConfig
from holdfast.execution.checkpoints import CheckpointStore
from holdfast.tracking import Tracker
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import Sink
from holdfast.training import compiling, loop, resume
from holdfast.training.start import make_trainer
from holdfast.training.state import KLDivergenceTrainState


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
    """

    def __init__(self, job: str, cfg: DictConfig, folder: Path, stage: int = 0) -> None:
        spec = ExecutionSpec.local(folder, name="rehearsal", topology=configure(TopologyConfig, cfg))
        self.trainer: Any = make_trainer(job, cfg, spec)
        self.losses = Losses()
        self.store = CheckpointStore(self.trainer.checkpoint_dir)
        self.session = loop.Session(self.trainer, Tracker({"losses": self.losses}), self.store, resume.Progress())
        count = len(self.trainer.stages.stages)
        if not 0 <= stage < count:
            raise UserError(f"stage {stage}: expected one of 0 to {count - 1}, the stages of the config")
        stages = self.trainer.stages
        self._first: int = stages.stage_start(stage)
        self._length: int = (stages.stage_start(stage + 1) if stage + 1 < count else stages.total_steps) - self._first
        self.taken = 0
        self.data_seconds = 0.0  # waiting for batches and placing them
        self._go_to_stage()
        self.batches = self._prefetched()

    @property
    def step(self) -> int:
        """The step that comes next; after the last one of the stage its first one comes again."""
        return self._first + self.taken % self._length

    def _prefetched(self) -> Iterator[Any]:
        """The batches of the stage, over and over."""
        while True:
            batches = prefetched(self.trainer.batches, self._first, self.trainer.settings.run.prefetch)
            yield from itertools.islice(batches, self._length)

    def _go_to_stage(self) -> None:
        """Put the state where the run would have it at the first step of the stage."""
        trainer = self.trainer
        placed = jax.device_put(jnp.int32(self._first), trainer.state.step.sharding)
        trainer.state = trainer.state.replace(step=placed)
        if trainer.stages.has_reference(self._first):
            assert isinstance(trainer.state, KLDivergenceTrainState)
            trainer.state = trainer.state.snapshot()
        self.session.enter(self._first)

    def draw(self) -> Any:
        """The next step's batch on the devices."""
        started = time.perf_counter()
        batch = compiling.place(next(self.batches), self.trainer.topology.mesh, self.trainer.batch_shape)
        self.data_seconds += time.perf_counter() - started
        return batch

    def one(self) -> None:
        """One step as the loop takes it: its metrics are fetched while the next one runs."""
        self.session.advance(self.step, self.draw())
        self.taken += 1

    def take(self, count: int) -> None:
        """Some steps, and wait until they are done."""
        for _ in range(count):
            self.one()
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was started is done."""
        self.session.settle()
        jax.block_until_ready(self.trainer.state)

    def close(self) -> None:
        """Finish what is being written."""
        self.store.close()
