"""The base trainer: what a subclass may declare, and what follows from the declarations.

A subclass overrides what returns a value: `MODEL`, `optimizer`, `schedule`, `methods`, `penalties`, `curriculum`,
`evaluator`, `batch`. `plan`, `run`, `eval` and `report` all ask the class. The work is done by the functions of this
package, which take what they use. The one mutable attribute is `state`.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Optional, Tuple, TypeVar, cast

import jax
import optax

from holdfast import registry
from holdfast.config import current
from holdfast.curriculum import Curriculum
from holdfast.data.batches import Batch, Batches, validation_batches
from holdfast.data.plan import DataPlan
from holdfast.data.rows import Rows
from holdfast.data.sampled import SampledRows
from holdfast.data.sampling import SELF, SourceKey
from holdfast.evaluation.evaluator import Evaluator
from holdfast.evaluation.forward import Runner
from holdfast.execution import ExecutionSpec, RestoreableJob, Topology, processes
from holdfast.execution.checkpoints import CheckpointStore, find_checkpoint, list_checkpoints
from holdfast.methods import Method
from holdfast.methods.budget import check_control
from holdfast.models.family import DECODER
from holdfast.optim import Schedule
from holdfast.training import initial, step
from holdfast.training import run as running
from holdfast.training import state as states
from holdfast.training.certificate import ControlSets
from holdfast.training.compile import MicroBatch, check_batch, choose_micro_batch, local_rows, slots_for
from holdfast.training.config import BaseTrainerConfig, RunOptions
from holdfast.training.data import RunData, load_data, penalty_view
from holdfast.training.manifest import manifest_of
from holdfast.training.resolve import ResolvedRun, resolve_options
from holdfast.training.restore import Restorer, recorded_micro_batch, recorded_row_order
from holdfast.training.results import build_evaluator
from holdfast.training.state import TrainState
from holdfast.training.triggers import Triggers, triggers_of
from holdfast.training.weights import held_facts
from holdfast.types import Json

C = TypeVar("C", bound=BaseTrainerConfig)
M = TypeVar("M")


class BaseTrainer(RestoreableJob[C], Generic[C, M]):
    """Generic pretrainer for GPT-style models."""

    CONFIG: type[Any] = BaseTrainerConfig
    STATE: type[TrainState] = TrainState
    MODEL: str = DECODER  # the family of models, where `architecture/family` names none

    def __init__(self, spec: ExecutionSpec) -> None:
        """Build a basic trainer from the current `configuration`, or from the resolved run that the spec carries.

        Args:
            spec: execution specification.

        Raises:
            AssertionError: if topology is not provided in spec.
        """
        super().__init__(spec)
        assert spec.topology is not None, "a trainer needs devices: ExecutionSpec.local(...) has a topology"
        self.topology: Topology = spec.topology
        self.resolved: ResolvedRun = spec.resolved or self._resolve()
        check_batch(self.config.batch_size, self.config.per_device_batch_size, self.topology.num_row_shards)
        self.resolved.model.check_mesh(self.topology.sizes)
        make = initial.described_state if self.topology.described else initial.initial_state
        self.state: TrainState = make(self.resolved, self.topology.mesh)

    def _resolve(self) -> ResolvedRun:
        """The run that the current configuration describes."""
        options: RunOptions = RunOptions.read(self.CONFIG, current())
        job = next((name for name in registry.jobs if registry.jobs.get(name) is type(self)), "gpt/train/pretrain")
        options.trainer.curriculum(options)  # what is wrong with the options is said before a subclass is asked
        return resolve_options(job, options, self.curriculum(options), type(self))

    # What a subclass may declare

    @classmethod
    def curriculum(cls, options: RunOptions) -> Curriculum:
        """The stages of a run with these options: those of the config class."""
        return options.trainer.curriculum(options)

    @classmethod
    def methods(cls, options: RunOptions) -> Mapping[str, Method]:
        """Ways to keep the old beside replay and the anchor, by name: those that `training/methods` lists."""
        return {
            name: registry.methods.get(name)(options.plugin(registry.methods, name)) for name in options.run.methods
        }

    @classmethod
    def penalties(cls, options: RunOptions) -> Tuple[str, ...]:  # noqa: ARG003  # for subclasses
        """Name of the registered penalty that a stage with a beta above 0 adds to the loss, if any."""
        return ()

    def evaluator(self) -> Optional[Evaluator[M]]:
        """Define what evaluator to use."""
        if not self.config.evaluate:
            return None
        return build_evaluator(self.resolved, self.topology, self.data.held_out())

    @classmethod
    def optimizer(cls) -> str | optax.GradientTransformation:
        """Return either an optimizer from the optimizer library, or a custom optax optimizer."""
        return "adamw"

    @classmethod
    def schedule(cls) -> Optional[str | Schedule]:
        """Return a learning rate schedule, a schedule name from the library, or nothing to use a constant lr."""
        return "wsd"

    def batch(self, slice: str = "train", step: int | None = None) -> Batch:  # the spec's name
        """This process's rows of a step, (S, B, T) each; calling it twice gives the same rows.

        The loop trains on what this returns, and asks ahead in a background thread.

        Args:
            slice: `train`, or `val` for the first validation rows of the stage's first dataset.
            step: the number of steps that are complete; None is that of the state.
        """
        curriculum = self.resolved.curriculum
        at = min(int(self.state.step) if step is None else step, curriculum.total_steps - 1)
        if slice == "train":
            return self.batches[at]
        assert slice == "val", f"slice: got {slice!r}, expected train or val"
        first = curriculum.stages[curriculum.stage_at(at)].mixture[0]
        rows = self.data.held_out()[first.name]
        return next(validation_batches(rows, self.config.validation_steps, self.batch_shape, self.resolved.packed))

    # The steps

    @staticmethod
    def sharded_init(model: Any, key: jax.Array, *args: Any, mesh: jax.sharding.Mesh, **kwargs: Any) -> Tuple[Any, Any]:
        """Initialize model params sharded across mesh from the start.

        Returns:
            (variables, var_sharding)
        """
        return initial.sharded_init(model, key, *args, mesh=mesh, **kwargs)

    @classmethod
    def train_step(
        cls, state: TrainState, batch: Batch | Tuple[Any, ...], key: jax.Array, accumulate_steps: int
    ) -> Tuple[TrainState, jax.Array, Any]:
        """Compute gradients over S micro-batches and apply one optimizer step.

        Args:
            state: current training state.
            batch: (x, y, padding_mask, …) each with shape (S, B, T).
            key: PRNG key for dropout.
            accumulate_steps: number of micro-batches (S).

        Returns:
            (updated_state, loss, meta)
        """
        return step.train_step(state, Batch(*batch), key, accumulate_steps)

    @classmethod
    def val_step(cls, state: TrainState, batch: Batch | Tuple[Any, ...]) -> Tuple[jax.Array, jax.Array, Any]:
        """Compute validation loss over S micro-batches.

        Returns:
            (loss_sum, token_count, last_meta)
        """
        return step.val_step(state, Batch(*batch))

    # What follows from the declarations

    @property
    def config(self) -> C:
        """The trainer's own options."""
        return cast(C, self.resolved.config)

    @functools.cached_property
    def triggers(self) -> Triggers:
        """When things happen."""
        return triggers_of(self.resolved)

    @functools.cached_property
    def data(self) -> RunData:
        """Rows of every source; what is missing is prepared now."""
        run = self.resolved
        return load_data(
            run.curriculum,
            run.options.data,
            run.tokenizer,
            evaluations=run.config.evaluations,
            measured=run.held_out,
            progress=jax.process_index() == 0,
            begun=self.checkpoint_dir.is_dir() and any(self.checkpoint_dir.iterdir()),
        )

    @functools.cached_property
    def plan(self) -> DataPlan:
        """Which rows each step draws."""
        options = self.resolved.options.run
        plan = self.data.plan(self.resolved.curriculum, options.seed_of("data"), options.mixture_unit)
        check_control(plan)
        return plan

    @functools.cached_property
    def sampled(self) -> SampledRows:
        """The rows that the model samples from itself, as far as they are there."""
        return SampledRows(self.plan.sampled_sets, self.spec.run_dir, self.resolved.curriculum.block_size)

    @functools.cached_property
    def micro_batch(self) -> MicroBatch:
        """How the rows of a step are cut; what an earlier process of this run found is taken again."""
        recorded = recorded_micro_batch(self.resolved, self.topology, self.checkpoint_dir, self.spec.parent)
        return choose_micro_batch(
            self.resolved, self.topology, self.state, self.train_step, processes.agreed(recorded), self.row_order
        )

    @functools.cached_property
    def row_order(self) -> int:
        """How the rows of a step are ordered (`manifest.ROW_ORDER`): as when the run was begun."""
        return int(processes.agreed(recorded_row_order(self.checkpoint_dir, self.spec.parent)))

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(S, B): micro-batches of a step and rows of one."""
        return self.micro_batch.shape

    @functools.cached_property
    def batches(self) -> Batches:
        """The batches of the data plan, by step."""
        local, shards = local_rows(self.topology.mesh, self.batch_shape), self.topology.num_row_shards
        return Batches(
            self.plan,
            {**self.data.train, SELF: self.sampled} if self.plan.sampled_sets else self.data.train,
            self.batch_shape[0],
            penalty_view(self.resolved),
            local,
            marks_old=states.marks_old(self.resolved),
            slots=slots_for(self.resolved, self.plan, self.batch_shape, shards, self.row_order),
            token_bytes=self.resolved.tokenizer.token_bytes() if self.resolved.curriculum.budgets else None,
        )

    def control_sets(self, runner: Runner) -> ControlSets | None:
        """What measures the control rows of budgets; None where there are none."""
        if not self.resolved.curriculum.budgets:
            return None
        rows: dict[SourceKey, Rows | SampledRows] = {**self.data.train, SELF: self.sampled}
        sizes, batch_size = self.resolved.tokenizer.token_bytes(), self.resolved.options.evaluation.batch_size
        return ControlSets(self.plan, rows, sizes, runner, batch_size)

    @property
    def done(self) -> bool:
        """Check if training is done."""
        return int(self.state.step) >= self.resolved.curriculum.total_steps

    # State on disk

    @property
    def restorer(self) -> Restorer:
        """What puts a checkpoint's arrays into this trainer's state."""
        return Restorer(self.resolved, self.topology.mesh, self.spec.run_dir)

    @property
    def machine(self) -> Json:
        """Where this process trains, as manifests record it."""
        return {
            "per_device_batch_size": self.batch_shape[1] // self.topology.num_row_shards,
            "mesh": dict(self.topology.sizes),
            "processes": jax.process_count(),
            "cores": processes.visible_cores(),
            "row_order": self.row_order,
        }

    def save(self, suffix: Path) -> None:
        """Save the state of the current step under a name."""
        store = CheckpointStore(self.checkpoint_dir, rolling=self.resolved.options.run.rolling)
        try:
            at = int(self.state.step)
            if at not in {info.step for info in list_checkpoints(self.checkpoint_dir)}:
                held = {**held_facts(self.state), **self.sampled.facts(at)}
                manifest = manifest_of(self.resolved, self.plan, at, [str(suffix)], self.machine, held)
                store.save(at, self.state.arrays(), manifest)
        finally:
            store.close()

    def load(self, suffix: Path) -> None:
        """Load the state from the checkpoint of a name (`latest`, a step, a tag), if available."""
        if list_checkpoints(self.checkpoint_dir):
            self.state = self.restorer.load(self.state, find_checkpoint(self.checkpoint_dir, str(suffix)))

    def run(self) -> None:
        """Main entry point to run training, called on all nodes."""
        running.run(self)


Trainer = BaseTrainer[Any, Any]  # of whatever config and model
