"""A run's steps, taken again from its checkpoints: the same to the bit, or with some rows left out.

The batches are the trainer's own, the step is the one the loop compiles, and stages are entered as the loop does it.
Nothing is written into the run's folder.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from holdfast.data.batches import Batch
from holdfast.errors import UserError
from holdfast.execution.checkpoints import CheckpointInfo, CheckpointStore, list_checkpoints
from holdfast.tracking import Tracker
from holdfast.training.loop import TrainLoop
from holdfast.training.manifest import Progress, facts
from holdfast.training.placement import shardings_of
from holdfast.training.restore import WEIGHTS_ALONE
from holdfast.training.results import ResultsRecorder
from holdfast.training.runs import open_run
from holdfast.training.state import TrainState
from holdfast.types import Tree

Masks = Mapping[int, Collection[int]]  # by step, rows of its batch that are left out, counted as they lie in it
NO_MASKS: Masks = {}


@dataclass(frozen=True)
class Snapshot:
    """A state on the host, to go on from as often as needed: steps use theirs up."""

    step: int
    arrays: Tree
    places: Tree

    @classmethod
    def of(cls, state: TrainState) -> "Snapshot":
        """A copy of a state."""
        # On a CPU the host's arrays would share the memory that the next step is given to write in.
        arrays = jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(state))
        return cls(int(state.step), arrays, shardings_of(state))

    def state(self) -> TrainState:
        """The state on the devices."""
        return jax.device_put(self.arrays, self.places)  # type: ignore[no-any-return]  # a tree of arrays


class Replay:
    """A run that exists, with its checkpoints to start from.

    Args:
        run_dir: its folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        opened = open_run(run_dir, looking=False)
        self.checkpoints = [
            info for info in list_checkpoints(run_dir / "checkpoints") if WEIGHTS_ALONE not in info.manifest
        ]
        if not self.checkpoints:
            raise UserError(f"{run_dir}: it has no checkpoints, so that no step of it can be taken again")
        check_devices(self.checkpoints[-1])
        self.trainer = opened.own_trainer()
        self.run = self.trainer.resolved
        self.curriculum = self.run.curriculum
        self._check_mesh(self.checkpoints[-1])
        self._begun = Snapshot.of(self.trainer.state)
        recorder = ResultsRecorder(self.run, run_dir, lambda: None, (), Progress())
        self.store = CheckpointStore(run_dir / "checkpoints", read_only=True)
        self.loop = TrainLoop(self.trainer, Tracker({}), self.store, recorder)
        self.steps_taken = 0
        self._check_data(self.checkpoints[-1])

    def close(self) -> None:
        """Let go of the checkpoints."""
        self.store.close()

    def _check_mesh(self, info: CheckpointInfo) -> None:
        now = dict(self.trainer.topology.sizes)
        if info.manifest["mesh"] != now:
            raise UserError(
                f"{self.run_dir}: its steps were taken on a mesh of {_sizes(info.manifest['mesh'])}, here it is "
                f"{_sizes(now)}, which rounds differently; give as many devices as the run had"
            )

    def _check_data(self, info: CheckpointInfo) -> None:
        known = facts(self.trainer.plan, info.step, info.manifest["format"])
        if known["plan"] != info.manifest["plan"]:
            raise UserError(
                f"{self.run_dir}: the prepared data is not what the run was trained on (its contents, its tokenizer or "
                "its options changed), so that its steps cannot be taken again; put the data back"
            )

    def restore(self, info: CheckpointInfo) -> TrainState:
        """The state of a checkpoint."""
        return self.trainer.restorer.load(self._begun.state(), info)

    def before(self, step: int) -> CheckpointInfo:
        """The last checkpoint at or before a step."""
        found = [info for info in self.checkpoints if info.step <= step]
        if not found:
            raise UserError(
                f"{self.run_dir}: it has no checkpoint at or before step {step}; the first is of step "
                f"{self.checkpoints[0].step}"
            )
        return found[-1]

    def batch(self, step: int, masked: Collection[int] = ()) -> Batch:
        """The rows of a step on the host, without the targets of those that are left out."""
        batch = self.trainer.batch("train", step)
        if not masked:
            return batch
        y = np.array(batch.y)
        y.reshape(-1, y.shape[-1])[list(masked)] = -1
        return batch._replace(y=y)

    def entered(self, state: TrainState) -> TrainState:
        """The state in which the next step is taken: where a stage begins, as the loop enters it."""
        self.trainer.state = state
        self.loop.enter(int(state.step))
        return self.trainer.state

    def advance(
        self,
        state: TrainState,
        until: int,
        masks: Masks = NO_MASKS,
        seen: Callable[[TrainState], object] | None = None,
    ) -> TrainState:
        """The state after the steps up to one; the one that goes in is used up.

        Args:
            masks: rows that are left out, by step.
            seen: is called with the state before every step and after the last.
        """
        for step in range(int(state.step), until):
            if seen is not None:
                seen(state)
            state = self.entered(state)
            batch = self.loop.place(self.batch(step, masks.get(step, ())))
            self.trainer.state = self.loop.steps.ready(state, batch)()[0]
            self.loop.certify(step + 1)
            state = self.trainer.state
            self.steps_taken += 1
        if seen is not None:
            seen(state)
        return state

    def text(self, step: int, place: int, most: int = 600) -> str:
        """A row of a step as text; an arrow stands before what the loss counts and another, the other way, ends it."""
        batch = self.trainer.batch("train", step)
        x, y, mask = (np.asarray(part).reshape(-1, part.shape[-1])[place] for part in batch[:3])
        real = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
        tokens, counted = np.append(x[:real], y[real - 1]), np.append([False], y[:real] >= 0)
        if not counted[-1]:  # the last target is not counted, and so not known
            tokens, counted = tokens[:-1], counted[:-1]
        if counted[1:].all():
            return self.run.tokenizer.decode(tokens)[:most]
        cuts = np.flatnonzero(np.diff(counted.astype(np.int8))) + 1
        parts = [self.run.tokenizer.decode(part) for part in np.split(tokens, cuts)]
        shown = parts[0] + "".join((" ⟶ " if number % 2 else " ⟵ ") + part for number, part in enumerate(parts[1:], 1))
        return shown[:most]

    def differs(self, state: TrainState) -> str | None:
        """What of a state is not as in the run's own checkpoint of that step; None where all is, or there is none."""
        step = int(state.step)
        info = next((info for info in self.checkpoints if info.step == step), None)
        if info is None:
            return None
        mine, own = state.arrays(), self.restore(info).arrays()
        for (path, one), two in zip(jax.tree_util.tree_flatten_with_path(mine)[0], jax.tree.leaves(own), strict=True):
            if np.asarray(one).tobytes() != np.asarray(two).tobytes():
                return f"{jax.tree_util.keystr(path)} at step {step}"
        return None


def check_devices(info: CheckpointInfo) -> None:
    """Refuse to take steps again that several processes took together."""
    count, here = info.manifest.get("processes", 1), jax.process_count()
    if count != 1 or here != 1:
        raise UserError(
            f"{info.path.parent.parent}: its steps were taken by {count} processes together, and this is {here}; steps "
            "are taken again by one process only"
        )


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def rows_of(steps: Sequence[int], batch_size: int) -> list[tuple[int, int]]:
    """All rows of some steps: (step, place in its batch).

    >>> rows_of([7, 8], 2)
    [(7, 0), (7, 1), (8, 0), (8, 1)]
    """
    return [(step, place) for step in steps for place in range(batch_size)]
