"""The base trainer: what a subclass may declare, and what follows from the declarations.

A subclass overrides what returns a value (`optimizer`, `schedule`, `evaluator`, `curriculum`, `penalties`,
`batch`); the work is done by the functions of this package. The one mutable attribute is `state`.
"""

import functools
from pathlib import Path
from typing import Any, Generic, Optional, Tuple, TypeVar

import jax
import optax

from holdfast import registry
from holdfast.config import current
from holdfast.curriculum import Curriculum
from holdfast.data.batches import Batch, Batches, PenaltyView
from holdfast.data.plan import DataPlan
from holdfast.data.sampling import DatasetStyle
from holdfast.evaluation.evaluator import Evaluator
from holdfast.execution import ExecutionSpec, RestoreableJob
from holdfast.execution.checkpoints import CheckpointStore, find_checkpoint, list_checkpoints
from holdfast.models.axes import check_divisible
from holdfast.optim import Schedule, ScheduleContext, build_optimizer, build_schedule, scaled
from holdfast.training import blueprint, build, compiling, loop, measure, resume, step
from holdfast.training.agenda import Agenda, Intervals
from holdfast.training.configs import BaseTrainerConfig
from holdfast.training.curricula import curriculum_for
from holdfast.training.data import RunData, load_data, validation_batches
from holdfast.training.microbatch import check_batch, rows_at_once
from holdfast.training.settings import Settings
from holdfast.training.state import Objective, TrainState

C = TypeVar("C", bound=BaseTrainerConfig)
M = TypeVar("M")


class BaseTrainer(RestoreableJob[C], Generic[C, M]):
    """Generic pretrainer for GPT-style models."""

    CONFIG: type[Any] = BaseTrainerConfig
    STATE: type[TrainState] = TrainState

    def __init__(self, spec: ExecutionSpec) -> None:
        """Build a basic trainer from the current `configuration`.

        Args:
            spec: execution specification.

        Raises:
            AssertionError: if topology is not provided in spec.
        """
        super().__init__(spec)
        assert spec.topology is not None, "a trainer needs devices: ExecutionSpec.local(...) has a topology"
        self.topology = spec.topology
        self.settings: Settings[C] = Settings.read(self.CONFIG, current())
        self.config: C = self.settings.trainer
        drawn = blueprint.draw(self.settings, self.curriculum(self.settings))
        self.stages, self.tokenizer, self.model_spec = drawn.curriculum, drawn.tokenizer, drawn.model
        self.trainable = drawn.trainable
        check_batch(self.config.batch_size, self.config.per_device_batch_size, self.topology.num_row_shards)
        check_divisible(self.model_spec, self.topology.sizes)
        self.state: TrainState = self._initial_state()
        self.compiled_ahead: compiling.Ahead | None = None  # what the search for a micro-batch has compiled
        self.search_seconds = 0.0  # that it took

    def _initial_state(self) -> TrainState:
        kind, objective, mesh = self.STATE, self.objective_at(0), self.topology.mesh
        if self.topology.described:
            return build.described_state(kind, objective, mesh)
        seed, source = self.settings.run.seed_of("init"), self.settings.architecture.source
        return build.initial_state(kind, objective, seed, mesh, source)

    # What a subclass may declare

    @classmethod
    def curriculum(cls, settings: Settings[C]) -> Curriculum:
        """The stages of a run with these options."""
        return curriculum_for(settings)

    def penalties(self) -> Tuple[str, ...]:
        """Names of the penalties that a stage with a beta above 0 adds to the loss."""
        return ()

    def evaluator(self) -> Optional[Evaluator[M]]:
        """Define what evaluator to use."""
        return measure.build_evaluator(self) if self.config.evaluate else None

    @classmethod
    def optimizer(cls) -> str | optax.GradientTransformation:
        """Return either an optimizer from the optimizer library, or a custom optax optimizer."""
        return "adamw"

    @classmethod
    def schedule(cls) -> Optional[str | Schedule]:
        """Return a learning rate schedule, a schedule name from the library, or nothing to use a constant lr."""
        return "wsd"

    def batch(self, slice: str = "train") -> Batch:  # the spec's name
        """The batch of the current step, (S, B, T) each; calling it twice gives the same rows.

        Args:
            slice: `train`, or `val` for the first validation rows of the current stage's first dataset.
        """
        at = min(int(self.state.step), self.stages.total_steps - 1)
        if slice == "train":
            return self.batches[at]
        assert slice == "val", f"slice: got {slice!r}, expected train or val"
        first = self.stages.stages[self.stages.stage_at(at)].mixture[0]
        rows = self.data.held_out()[first.name]
        return next(validation_batches(rows, self.config.validation_steps, self.batch_shape, self.packed))

    # The steps

    @staticmethod
    def sharded_init(model: Any, key: jax.Array, *args: Any, mesh: jax.sharding.Mesh, **kwargs: Any) -> Tuple[Any, Any]:
        """Initialize model params sharded across mesh from the start.

        Returns:
            (variables, var_sharding)
        """
        return build.sharded_init(model, key, *args, mesh=mesh, **kwargs)

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

    @functools.cached_property
    def agenda(self) -> Agenda:
        """When things happen."""
        config, evaluation = self.config, self.settings.evaluation
        intervals = Intervals(
            report=config.report_interval,
            validation=config.validation_interval if config.validate else None,
            checkpoint=config.checkpoint_interval,
            validates_first_stage=config.validates_first_stage,
            evaluate=config.evaluate,
            probe=evaluation.probe_interval,
            probe_window=evaluation.probe_window,
        )
        return Agenda(self.stages, intervals)

    @functools.cached_property
    def learning_rate(self) -> Schedule:
        """The learning rate as a function of the step."""
        return schedule_for(type(self), self.settings, self.stages)

    def objective_at(self, stage: int) -> Objective:
        """What the steps of a stage minimise; stages of one kind share one objective, and so one compiled step."""
        return self._objectives[self.stages.stages[stage].beta > 0]

    @functools.cached_property
    def _objectives(self) -> dict[bool, Objective]:
        choice, names = self.optimizer(), self.penalties()
        plugin = self.settings.plugin(registry.optimizers, self.settings.optim.optimizer or choice)
        plain = Objective(
            model=self.model_spec,
            optimizer=build_optimizer(choice, self.settings.optim, plugin),
            schedule=self.learning_rate,
            z_loss=self.settings.run.z_loss,
            trainable=self.trainable,
            ema=self.settings.run.ema,
        )
        return {False: plain, True: plain.penalised(names, self.settings.penalty.target)}

    @property
    def penalty_view(self) -> PenaltyView | None:
        """What of a batch the penalty sees; None where no stage has one."""
        options, replay = self.settings.penalty, self.settings.stages.replay
        if not self.stages.needs_reference(0):
            return None
        return PenaltyView(options.tokens, options.on, replay.objective if replay else "both")

    @functools.cached_property
    def data(self) -> RunData:
        """Rows of every source; what is missing is prepared now."""
        return load_data(
            self.stages,
            self.settings.data,
            self.tokenizer,
            evaluations=self.config.evaluations,
            progress=jax.process_index() == 0,
        )

    @functools.cached_property
    def plan(self) -> DataPlan:
        """Which rows each step draws."""
        run = self.settings.run
        return self.data.plan(self.stages, run.seed_of("data"), run.mixture_unit)

    @functools.cached_property
    def batch_shape(self) -> tuple[int, int]:
        """(S, B): micro-batches of a step and rows of one."""
        asked, shards = self.config.per_device_batch_size, self.topology.num_row_shards
        found = rows_at_once(self.config.batch_size, asked, shards) if asked > 0 else compiling.find_micro_batch(self)
        rows = found * shards
        return self.config.batch_size // rows, rows

    @property
    def packed(self) -> bool:
        """Whether any source is packed, so that batches carry segments."""
        return any(source.style is DatasetStyle.PACKED for source in self.stages.sources)

    @functools.cached_property
    def batches(self) -> Batches:
        """The batches of the run, by step."""
        local = compiling.local_rows(self.topology.mesh, self.batch_shape)
        return Batches(self.plan, self.data.train, self.batch_shape[0], self.penalty_view, local)

    @property
    def job_name(self) -> str:
        """The name under which this trainer is registered."""
        return next((name for name in registry.jobs if registry.jobs.get(name) is type(self)), "gpt/train/pretrain")

    @property
    def done(self) -> bool:
        """Check if training is done."""
        return int(self.state.step) >= self.stages.total_steps

    # State on disk

    def save(self, suffix: Path) -> None:
        """Save the state of the current step under a name."""
        store = CheckpointStore(self.checkpoint_dir, rolling=self.settings.run.rolling)
        try:
            at = int(self.state.step)
            if at not in {info.step for info in list_checkpoints(self.checkpoint_dir)}:
                store.save(at, self.state.arrays(), resume.manifest_of(self, at, [str(suffix)]))
        finally:
            store.close()

    def load(self, suffix: Path) -> None:
        """Load the state from the checkpoint of a name (`latest`, a step, a tag), if available."""
        if list_checkpoints(self.checkpoint_dir):
            resume.load(self, find_checkpoint(self.checkpoint_dir, str(suffix)))

    def run(self) -> None:
        """Main entry point to run training, called on all nodes."""
        loop.run(self)


def schedule_for(trainer: type[BaseTrainer[Any, Any]], settings: Settings[Any], curriculum: Curriculum) -> Schedule:
    """The learning-rate schedule of a trainer class over a curriculum."""
    config, choice = settings.trainer, trainer.schedule()
    context = ScheduleContext(
        lr=config.lr,
        total_steps=curriculum.total_steps,
        stage_starts=tuple(curriculum.stage_start(index) for index in range(len(curriculum.stages))),
        warmup_pct=config.warmup_pct,
        decay_pct=config.decay_pct,
        constant_pct=config.tail_pct,
        optim=settings.optim,
        section=config.schedule_section,
    )
    schedule = build_schedule(choice, context, settings.plugin(registry.schedules, settings.optim.schedule or choice))
    return scaled(schedule, context.stage_starts, tuple(stage.lr for stage in curriculum.stages))
